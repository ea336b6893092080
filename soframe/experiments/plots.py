"""Plots of recorded runs: the training loss against steps and against seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soframe.experiments.records import RunRecord
from soframe.experiments.requirements import require
from soframe.experiments.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart under every common colour blindness; the dashes tell curves
# apart that lie on each other, as those of the strategies do against steps.
_Style = tuple[str, str | tuple[float, tuple[float, ...]]]
_FIRST_ORDER: Mapping[str, _Style] = {"sgd": ("#000000", "-"), "adamw": ("#E69F00", "-")}
_PRECONDITIONED: Sequence[_Style] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 2))),
    ("#009E73", (0, (1.5, 1.5))),
    ("#CC79A7", (0, (4, 1.5, 1, 1.5))),
)


def loss_curves(workload: Workload, records: Sequence[RunRecord]) -> Figure:
    """Draws the training loss of several runs, logarithmic.

    Args:
        workload: What was trained.
        records: One run for each curve.

    Returns:
        A figure of two panels: against steps on the left, against seconds on the right.
    """
    (module,) = require("matplotlib.figure")
    # A figure of its own: no display, and none of pyplot's global state.
    figure: Figure = module.Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for record, style in zip(records, _styles(records), strict=True):
        rows = [row for row in record.rows if row.loss > 0]
        losses = [row.loss for row in rows]
        left.plot([row.step for row in rows], losses, **style)
        right.plot([row.seconds for row in rows], losses, **style)
    _dress(left, workload, "steps")
    _dress(right, workload, "seconds of training (evaluations excluded)")
    for target in workload.targets:
        right.annotate(
            f"{target:g}",
            (1.0, target),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#555555",
        )
    left.set_ylabel(workload.loss_name)
    processes = max((record.processes for record in records), default=1)
    where = f"{processes} processes" if processes > 1 else "1 process"
    figure.suptitle(f"{workload.title}, {where}", fontsize=12)
    right.legend(frameon=False, fontsize=9, loc="upper right")
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as an image.

    Args:
        figure: The figure.
        path: Of the image, whose suffix chooses the format; its folder is made.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _styles(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    styles: list[dict[str, Any]] = []
    preconditioned = 0
    for record in records:
        if record.config.optimizer in _FIRST_ORDER:
            color, dashes = _FIRST_ORDER[record.config.optimizer]
        else:
            color, dashes = _PRECONDITIONED[preconditioned % len(_PRECONDITIONED)]
            preconditioned += 1
        styles.append(
            {"color": color, "linestyle": dashes, "linewidth": 1.8, "label": record.config.label}
        )
    return styles


def _dress(axes: Axes, workload: Workload, label: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(_minor_label)
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(visible=True, which="major", linewidth=0.5, color="#DDDDDD")
    axes.spines[["top", "right"]].set_visible(False)
    for target in workload.targets:
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":", zorder=0)


def _minor_label(value: float, position: float) -> str:
    """Labels 2 and 5 between powers of ten: few decades are drawn, and no exponents needed."""
    del position
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""
