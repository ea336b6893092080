"""Metrics from a file: reading, tables and a figure; and a figure of the spectra of a curvature.

The libraries are optional: rich and matplotlib, in the extra `cli`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from numpy import arange
from torch import Tensor, finfo

from soframe.blocks.block import Block
from soframe.diagnostics.metrics import FORMAT, VERSION
from soframe.text import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000")
"""Okabe and Ito's palette."""


COLUMNS = (
    "block",
    "factor",
    "damping",
    "gradient",
    "direction",
    "weight",
    "statistics",
    "solve",
    "condition",
    "effective rank",
    "failed",
)
"""Of the table of blocks."""


def read(path: Path) -> dict[str, Any]:
    """Read metrics from a JSON file of the result of ``metrics()``."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"), parse_constant=_constant)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(metrics, dict) or metrics.get("format") != FORMAT:
        raise ValueError(
            f"{path} has no metrics: write json.dumps(preconditioner.metrics()) into it"
        )
    if metrics.get("version") != VERSION:
        raise ValueError(
            f"{path} has metrics of version {metrics.get('version')!r}, and this soframe reads "
            f"{VERSION}"
        )
    return metrics


def _constant(constant: str) -> None:
    """Raise a ValueError: JSON has no NaN or infinity, which Python writes and reads."""
    raise ValueError(f"{constant} is none of its numbers")


def tables(metrics: Mapping[str, Any]) -> list[Table]:
    """Return the tables of metrics: of blocks and their factors, and of phases."""
    where = f"rank {metrics['rank']} of {metrics['world_size']}"
    blocks = _table(
        f"step {metrics['step']}, {where}: clip factor {_show(metrics['clip_factor'])}",
        COLUMNS,
    )
    for name, block in metrics["blocks"].items():
        numbers = ("damping", "gradient_norm", "direction_norm", "weight_norm")
        shown = [_show(block[number]) for number in numbers]
        blocks.add_row(name, "", *shown)
        for factor, of_factor in block["factors"].items():
            spectrum = of_factor["spectrum"] or {}
            cells = [
                _show(of_factor["statistics_age"]),
                _show(of_factor["solve_age"]),
                _show(spectrum.get("condition")),
                _show(spectrum.get("effective_rank")),
                _show(of_factor["failed_solves"]),
            ]
            blocks.add_row("", f"{factor} ({of_factor['size']})", "", "", "", "", *cells)
    steps = metrics["timed_steps"]
    timed = f"{steps} step(s) timed" if steps else "not timed"
    phases = _table(f"phases, {timed}", ("phase", "ms per step", "share", "bytes", "collectives"))
    for name, phase in metrics["phases"].items():
        time, share = "-", "-"
        if phase["seconds"] is not None and steps:
            time = f"{1e3 * phase['seconds'] / steps:.3g}"
        if phase["share"] is not None:
            share = f"{phase['share']:.1%}"
        phases.add_row(name, time, share, format_bytes(phase["bytes"]), str(phase["calls"]))
    return [blocks, phases]


def figure(metrics: Mapping[str, Any]) -> Figure:
    """Draw spectra (of ``metrics(spectra="full")``), condition numbers and ages of all factors."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 4.2), layout="constrained")
    spectra, conditions, ages = drawn.subplots(1, 3)
    factors = _factors(metrics)
    names = list(factors)
    for number, (name, factor) in enumerate(factors.items()):
        _plot_spectrum(spectra, number, name, factor["spectrum"])
    for axes in (spectra, ages):
        axes.xaxis.get_major_locator().set_params(integer=True)
    spectra.set(yscale="log", xlabel="number", ylabel="eigenvalue over the largest")
    if spectra.lines:
        spectra.legend(frameon=False, fontsize=8)
    condition_numbers = [factor["spectrum"].get("condition") for factor in factors.values()]
    _bars(conditions, names, [condition_numbers], ("condition number",))
    if any(condition_numbers):
        conditions.set_xscale("log")
    statistics_ages = [factor["statistics_age"] for factor in factors.values()]
    solve_ages = [factor["solve_age"] for factor in factors.values()]
    _bars(ages, names, [statistics_ages, solve_ages], ("statistics", "solve"))
    ages.legend(frameon=False, fontsize=8)
    for axes, title in ((spectra, "spectra"), (conditions, "condition"), (ages, "steps ago")):
        axes.set_title(title, fontsize=10)
        _plain(axes)
    drawn.suptitle(f"factors after {metrics['step']} steps", fontsize=12)
    return drawn


def _factors(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of all factors by name; a spectrum that is not known is empty."""
    factors: dict[str, dict[str, Any]] = {}
    for name, block in metrics["blocks"].items():
        for factor, of_factor in block["factors"].items():
            full_name = f"{name}.{factor}" if name else factor
            factors[full_name] = {**of_factor, "spectrum": of_factor["spectrum"] or {}}
    return factors


def _plain(axes: Axes) -> None:
    """Draw a faint grid, and two sides of the frame."""
    axes.grid(visible=True, which="major", linewidth=0.5, color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


class WithSpectra(Protocol):
    """A fitted curvature."""

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks."""

    def eigenvalues(self, block: str | None = None) -> Tensor:
        """Return the eigenvalues of a block, ascending."""


def spectra(curvature: WithSpectra) -> Figure:
    """Draw the eigenvalues of a fitted `soframe.Curvature` by layer; every rank must call.

    The largest of each layer is on the left. Eigenvalues that are zero to rounding are left out;
    the legend has the part of the trace, and the number of eigenvalues above zero of all. Of many
    layers it has the twelve with the largest traces.
    """
    from matplotlib.figure import Figure

    values_of = {b.name: curvature.eigenvalues(b.name).flip(0) for b in curvature.blocks}
    traces = {name: float(values.sum()) for name, values in values_of.items()}
    trace, largest = sum(traces.values()), sorted(traces, key=traces.__getitem__)[-12:]
    drawn = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawn.subplots()
    for number, (name, values) in enumerate(values_of.items()):
        rounding = finfo(values.dtype).eps * float(values[0]) * len(values)
        positive = values[values > rounding]
        share = traces[name] / trace if trace else 0.0
        label = f"{name or 'model'}: {share:.0%} of the trace, {len(positive)} of {len(values)}"
        if name not in largest:
            label = f"_{name}"  # which matplotlib leaves out of the legend
        places = range(1, len(positive) + 1)
        axes.plot(places, positive.tolist(), label=label, **_look(number))
    axes.set(xscale="log", yscale="log", xlabel="number", ylabel="eigenvalue")
    _plain(axes)
    axes.legend(frameon=False, fontsize=8)
    return drawn


def _plot_spectrum(axes: Axes, number: int, name: str, spectrum: Mapping[str, Any]) -> None:
    """Draw the positive eigenvalues of each group over the group's largest."""
    for group, values in enumerate(spectrum.get("eigenvalues", ())):
        positive = [value / values[0] for value in values if value > 0]
        label = name if group == 0 else f"_{name}"
        axes.plot(range(1, len(positive) + 1), positive, label=label, **_look(number))


def _look(number: int) -> dict[str, Any]:
    """Return the color and the dashes of a curve: all colors solid, then dashed."""
    turn, color = divmod(number, len(COLORS))
    return {"color": COLORS[color], "linestyle": ("-", "--")[turn % 2]}


def _bars(
    axes: Axes, names: Sequence[str], rows: Sequence[Sequence[float | None]], labels: Sequence[str]
) -> None:
    height, places = 0.8 / len(rows), arange(len(names))
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        widths = [value or 0 for value in row]
        axes.barh(
            places + number * height, widths, height=height, color=COLORS[number], label=label
        )
    middle = 0.8 / 2 - height / 2
    axes.set_yticks(places + middle, names, fontsize=8)
    axes.invert_yaxis()


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _show(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
