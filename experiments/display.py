"""Tables, plots and progress bars of recorded runs."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments import train
from experiments.libraries import MissingLibraryError, require
from experiments.records import MARK, NOTE, RunRecord, jsonable, labels
from experiments.workloads import Workload
from soframe.text import format_bytes

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from experiments.tuning import Trial

    Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class State:
    """A run in words, and the fraction of it that is done."""

    status: str
    fraction: float


Watch = Callable[[str, State | train.Progress], None]
"""Called with the label of a run, and how far it is."""

# Okabe and Ito's palette, distinguishable under every common colour blindness; dashes separate
# coinciding curves, such as the strategies' against steps.
_Style = tuple[str, str | tuple[float, tuple[float, ...]]]
_FIXED: Mapping[str, _Style] = {
    "sgd": ("#000000", "-"),
    "adamw": ("#E69F00", "-"),
    "trust-region": ("#CC79A7", "-"),
    "stochastic-trust-region": ("#CC79A7", (0, (5, 2))),
    "soap": ("#56B4E9", "-"),
    "muon": ("#009E73", "-"),
    "shampoo": ("#D55E00", "-"),
}
_PRECONDITIONED: Sequence[_Style] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 2))),
    ("#009E73", (0, (1.5, 1.5))),
    ("#56B4E9", (0, (4, 1.5, 1, 1.5))),
)
NARROW = 4.0  # from the lowest loss to the highest: within it scales are linear
DIVERGED = 3.0  # times the loss at the beginning: above it nothing is drawn
MARGIN = 1.2  # below the lowest loss, in a panel that is cut


def console(*, to_stderr: bool = False, width: int = 100) -> Console:
    """Return a console on the standard output, or the error output where JSON has the other one."""
    screen = Console(stderr=to_stderr)
    if not screen.is_terminal:
        screen.width = max(screen.width, width)  # no terminal, no edge to wrap at
    return screen


def print_json(value: object) -> None:
    """Print JSON and nothing else on the standard output."""
    json.dump(jsonable(value), sys.stdout, indent=1, allow_nan=False)
    print()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of arguments, whose help is a module's docstring as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run_command(main: Callable[..., None]) -> None:
    """Run a command; what a user can put right is an error of one line."""
    try:
        typer.run(main)
    except (FileNotFoundError, MissingLibraryError, ValueError) as error:
        sys.exit(f"error: {error}")


_COLUMNS = (
    TextColumn("{task.description:<18}"),
    BarColumn(bar_width=32),
    TimeRemainingColumn(),
    TextColumn("{task.fields[status]}"),
)


@contextlib.contextmanager
def bars(screen: Console, labels: Sequence[str], *, hidden: bool = False) -> Iterator[Watch]:
    """One progress bar for each run, with the loss; nothing unless on a terminal."""
    hidden = hidden or not screen.is_terminal
    with Progress(*_COLUMNS, console=screen, disable=hidden) as shown:
        tasks = {label: shown.add_task(label, total=1.0, status="") for label in labels}

        def watch(label: str, progress: State | train.Progress) -> None:
            shown.update(tasks[label], completed=progress.fraction, status=progress.status)

        yield watch


@contextlib.contextmanager
def trials(
    screen: Console, optimizer: str, number: int
) -> Iterator[tuple[Callable[[Trial], None], Callable[[Any], None]]]:
    """One progress bar for the trials of an optimizer; nothing unless on a terminal.

    Yields:
        Functions to call after each trial, and at each evaluation of one.
    """
    with Progress(*_COLUMNS, console=screen, disable=not screen.is_terminal) as shown:
        task = shown.add_task(f"tuning {optimizer}", total=number, status="")
        done: list[Trial] = []

        def tell(trial: Trial) -> None:
            done.append(trial)
            best = min(done, key=lambda finished: finished.rank)
            status = f"trial {len(done)}/{number}, best loss {best.loss:.4g}"
            shown.update(task, completed=len(done), status=status)

        def watch(progress: train.Progress) -> None:
            shown.update(task, completed=len(done) + progress.fraction)

        yield tell, watch


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> Table:
    """Return a table, its first columns at the left and the others at the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        # On a narrow terminal cells are wrapped rather than cut.
        justify: Any = "left" if index < left else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def comparison(workload: Workload, records: Sequence[RunRecord]) -> Table:
    """Return the table of several runs of one workload."""
    names = labels(records, MARK)
    columns = ["optimizer", *(f"to {target:g}\nsteps / s" for target in records[0].targets)]
    columns.append("last\nloss")
    if workload.classifies:
        columns.append("test\nacc.")
    columns += ["ms/\nstep", "sent per\nstep, rank", "curvature\npeak, rank"]
    rows = []
    for name, record in zip(names, records, strict=True):
        cells = [name]
        for target in record.targets:
            row = record.reached(target)
            if row is None:
                cells.append("not reached")
            else:
                cells.append(f"{row.step} / {row.seconds:.1f}")
        cells.append(f"{record.last.loss:.3g}")
        if workload.classifies:
            cells.append(f"{record.last.accuracy:.1%}")
        cells.append(f"{record.milliseconds_per_step:.1f}")
        cells.append(format_bytes(sum(record.sent_bytes_per_step.values())))
        cells.append(format_bytes(max(record.curvature_bytes, default=0)))
        rows.append(cells)
    title = f"{workload.title}: {workload.loss_name}"
    if names != [record.label for record in records]:
        title += f"\n{NOTE}"
    return table(title, columns, rows)


def aligned(title: str, lines: Sequence[Sequence[str]]) -> str:
    """Return cells as text, in columns: the head first; the first of each line is at the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"\n{title}"]
    for first, *rest in lines:
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(text)


def loss_curves(
    workload: Workload, records: Sequence[RunRecord], targets: Sequence[float] | None = None
) -> Figure:
    """Draw the loss of runs, logarithmic, against steps on the left and seconds on the right.

    Runs of one name look alike, and are named once; targets are the workload's if None.
    """
    figure, left, right = _panels()
    end = max(record.last.seconds for record in records)
    for record, style in zip(records, _styles(records), strict=True):
        rows = [row for row in record.rows if row.loss > 0]
        losses = [row.loss for row in rows]
        left.plot([row.step for row in rows], losses, **style)
        right.plot([row.seconds for row in rows], losses, **style)
        if not record.diverged:
            _hold(right, record.last.seconds, record.last.loss, end, style)
    if targets is None:
        targets = workload.targets
    _finish(workload, records, targets, left, right)
    where, processes = "1 process", max(record.processes for record in records)
    if processes > 1:
        where = f"{processes} processes"
    figure.suptitle(f"{workload.title}, {where}", fontsize=12)
    right.legend(frameon=False, fontsize=9, loc="upper right")
    return figure


def loss_bands(workload: Workload, groups: Mapping[str, Sequence[RunRecord]], title: str) -> Figure:
    """Draw the mean loss of each group over its seeds, in a band from the lowest to the highest.

    Args:
        workload: The workload.
        groups: Name in the legend -> runs that differ in their seeds. Those that diverged are thin
            lines, outside of mean and band, and the legend counts them.
        title: The title.
    """
    figure, left, right = _panels()
    every = list(itertools.chain.from_iterable(groups.values()))
    end = max(record.last.seconds for record in every)
    ranks = sorted({records[0].processes for records in groups.values()})
    styles = _styles([records[0] for records in groups.values()])
    for (label, records), style in zip(groups.items(), styles, strict=True):
        drawn = [record for record in records if not record.diverged]
        lost = [record for record in records if record.diverged]
        style["label"] = label
        if lost:
            style["label"] += f", {len(lost)} of {len(records)} diverged"
        if records[0].processes != ranks[0]:
            # Their curves against steps coincide with those on fewer ranks.
            style["linestyle"] = (0, (4, 2 * ranks.index(records[0].processes)))
        for axes, of in ((left, "step"), (right, "seconds")):
            _draw_band(axes, of, drawn, lost, style)
        _hold_mean(right, drawn, end, style)
    _finish(workload, every, every[0].targets, left, right)
    figure.suptitle(title, fontsize=12)
    handles, labels = left.get_legend_handles_labels()
    place: Any = "outside lower center"
    columns = 2 if len(labels) < 7 else 3
    figure.legend(handles, labels, frameon=False, fontsize=9, loc=place, ncols=columns)
    return figure


def _hold_mean(
    axes: Axes, drawn: Sequence[RunRecord], end: float, style: Mapping[str, Any]
) -> None:
    """Go on with the last mean loss of runs, from the end of the slowest of them."""
    if drawn:
        slowest = max(record.last.seconds for record in drawn)
        loss = float(np.mean([record.last.loss for record in drawn]))
        _hold(axes, slowest, loss, end, style)


def _draw_band(
    axes: Axes,
    of: str,
    drawn: Sequence[RunRecord],
    lost: Sequence[RunRecord],
    style: Mapping[str, Any],
) -> None:
    """Draw the mean of runs in their band, and each run that diverged."""
    grid, losses = _on_grid(drawn, of)
    axes.plot(grid, losses.mean(axis=0), **style)
    if len(drawn) > 1:
        low, high = losses.min(axis=0), losses.max(axis=0)
        axes.fill_between(grid, low, high, color=style["color"], alpha=0.2, linewidth=0)
    for record in lost:
        points = [getattr(row, of) for row in record.rows]
        thin = {**style, "linewidth": 0.8, "label": "_"}
        axes.plot(points, [row.loss for row in record.rows], **thin)


def _hold(axes: Axes, last: float, loss: float, end: float, style: Mapping[str, Any]) -> None:
    """Mark the end of a run, and keep its last loss until the slowest contender has ended.

    A curve that breaks off earlier would be compared with others at its own end alone.
    """
    if last < end:
        look: dict[str, Any] = {"color": style["color"], "linewidth": 1.0, "linestyle": ":"}
        axes.plot([last, end], [loss, loss], marker=".", markevery=[0], label="_", **look)


def _on_grid(records: Sequence[RunRecord], of: str) -> tuple[Array, Array]:
    """Return points, and the losses `(runs, points)` there.

    Steps end where a run does. Seconds run to the end of the slowest run: a faster one that has
    ended keeps its last loss.
    """
    curves: list[tuple[list[float], list[float]]] = []
    for record in records:
        points = [getattr(row, of) for row in record.rows]
        curves.append((points, [row.loss for row in record.rows]))
    if not curves:
        return np.empty(0), np.empty((1, 0))
    grid = np.unique(np.concatenate([points for points, _ in curves]))
    ends = [points[-1] for points, _ in curves]
    end = min(ends)
    if of == "seconds":
        end = max(ends)
    grid = grid[grid <= end]
    return grid, np.stack([np.interp(grid, points, losses) for points, losses in curves])


def _panels() -> tuple[Figure, Axes, Axes]:
    # A figure of its own: no display, and none of pyplot's global state.
    figure: Figure = require("matplotlib.figure").Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    return figure, left, right


def _finish(
    workload: Workload,
    records: Sequence[RunRecord],
    targets: Sequence[float],
    left: Axes,
    right: Axes,
) -> None:
    """Add scales, names and targets."""
    rows = itertools.chain.from_iterable(record.rows for record in records)
    losses = [row.loss for row in rows if math.isfinite(row.loss)]
    low, high = min(losses, default=0.0), max(losses, default=0.0)
    # A part of a decade has too few powers of ten, and their multiples, to read losses at.
    logarithmic = low >= 0 and high > NARROW * low
    positive = [loss for loss in losses if loss > 0]
    _dress(left, targets, "steps", logarithmic=logarithmic)
    _dress(right, targets, "seconds of training (evaluations excluded)", logarithmic=logarithmic)
    _name_targets(right, targets)
    right.set_xlim(right=max(record.last.seconds for record in records) or None)
    top = DIVERGED * max(record.rows[0].loss for record in records)
    # Runs that diverge leave the panel: they would leave the others no room.
    if logarithmic and max(positive, default=0.0) > top:
        left.set_ylim(min(itertools.chain(positive, targets)) / MARGIN, top)
    left.set_ylabel(workload.loss_name)


def _name_targets(axes: Axes, targets: Sequence[float]) -> None:
    """Write each target beside its line, right of the panel."""
    for target in targets:
        axes.annotate(
            f"{target:g}",
            (1.0, target),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#555555",
        )


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as an image, whose suffix chooses the format, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _styles(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    assigned: dict[str, _Style] = {}
    preconditioned = 0
    for record, marked in zip(records, labels(records, " (not tuned)"), strict=True):
        label, fixed = record.label, _FIXED.get(record.config.optimizer)
        shown, width = f"_{label}", 1.0  # named before
        if label not in assigned:
            shown, width = marked, 1.8
            if fixed is None:
                fixed = _PRECONDITIONED[preconditioned % len(_PRECONDITIONED)]
                preconditioned += 1
            assigned[label] = fixed
        color, dashes = assigned[label]
        yield {"color": color, "linestyle": dashes, "linewidth": width, "label": shown}


def _dress(axes: Axes, targets: Sequence[float], label: str, *, logarithmic: bool) -> None:
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(_twos_and_fives)
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(visible=True, which="major", linewidth=0.5, color="#DDDDDD")
    axes.spines[["top", "right"]].set_visible(False)
    for target in targets:
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":", zorder=0)


def _twos_and_fives(number: float, _: object) -> str:
    """Return 2 and 5 between powers of ten: few decades are drawn, and no exponents needed."""
    if f"{number:e}"[0] not in "25":
        return ""
    return f"{number:g}"


def processor() -> str:
    """Return the machine's name of its processor, or of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
