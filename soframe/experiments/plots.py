"""Plots of recorded runs: the training loss against steps and against seconds."""

from __future__ import annotations

import math
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
_FIXED: Mapping[str, _Style] = {
    "sgd": ("#000000", "-"),
    "adamw": ("#E69F00", "-"),
    "trust-region": ("#CC79A7", "-"),
    "stochastic-trust-region": ("#CC79A7", (0, (5, 2))),
    "soap": ("#56B4E9", "-"),
    "muon": ("#009E73", "-"),
    "shampoo": ("#D55E00", "-"),
}
DIVERGED = 3.0
"""Times the loss at the beginning: above it nothing is drawn."""
MARGIN = 1.2
"""Below the lowest, in a panel that is cut."""
_PRECONDITIONED: Sequence[_Style] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 2))),
    ("#009E73", (0, (1.5, 1.5))),
    ("#56B4E9", (0, (4, 1.5, 1, 1.5))),
)


def loss_curves(
    workload: Workload, records: Sequence[RunRecord], targets: Sequence[float] | None = None
) -> Figure:
    """Draws the loss of several runs, logarithmic.

    Args:
        workload: What was trained.
        records: One run for each curve; those of one name look alike, and are named once.
        targets: Where to draw lines; the workload's if None.

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
    lines = workload.targets if targets is None else targets
    _dress(left, lines, "steps")
    _dress(right, lines, "seconds of training (evaluations excluded)")
    for target in lines:
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
    begun = [record.rows[0].loss for record in records if record.rows]
    losses = [row.loss for record in records for row in record.rows if 0 < row.loss < math.inf]
    # What diverges leaves the panel: it would leave the others no room.
    if begun and max(losses, default=0.0) > DIVERGED * max(begun):
        left.set_ylim(min(*losses, *lines) / MARGIN, DIVERGED * max(begun))
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
    assigned: dict[str, _Style] = {}
    preconditioned = 0
    for record in records:
        label, fixed = record.config.label, _FIXED.get(record.config.optimizer)
        named = label in assigned
        if not named:
            cycle = _PRECONDITIONED[preconditioned % len(_PRECONDITIONED)]
            preconditioned += fixed is None
            assigned[label] = fixed or cycle
        color, dashes = assigned[label]
        styles.append(
            {
                "color": color,
                "linestyle": dashes,
                "linewidth": 1.0 if named else 1.8,
                "label": f"_{label}" if named else label,
            }
        )
    return styles


def _dress(axes: Axes, targets: Sequence[float], label: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(_minor_label)
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(visible=True, which="major", linewidth=0.5, color="#DDDDDD")
    axes.spines[["top", "right"]].set_visible(False)
    for target in targets:
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":", zorder=0)


def _minor_label(value: float, position: float) -> str:
    """Labels 2 and 5 between powers of ten: few decades are drawn, and no exponents needed."""
    del position
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""
