"""A plan as a figure; matplotlib is optional, in the extra `cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soframe.diagnostics.display import COLORS
from soframe.planning.planner import Plan, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def front(plan: Plan) -> Figure:
    """Draw the options of a plan, time against memory, and name the ones that none surpasses."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 4.5), layout="constrained")
    axes = drawn.subplots()
    kinds = ((True, "o", "all ranks' statistics"), (False, "^", "fewer samples"))
    for exact, marker, label in kinds:
        rows = [row for row in plan.rows if row.exact == exact]
        sizes, times = [row.memory["total"] / 1e9 for row in rows], [_ms(row) for row in rows]
        color = COLORS[0] if exact else COLORS[1]
        axes.plot(sizes, times, marker, color=color, alpha=0.6, label=label)
    for number, row in enumerate(plan.front, 1):
        at = row.memory["total"] / 1e9, _ms(row)
        axes.annotate(str(number), at, (4, 4), textcoords="offset points", fontsize=8)
        axes.plot([], [], " ", label=f"{number}  {row.option}")
    if plan.limit is not None:
        axes.axvline(plan.limit / 1e9, color=COLORS[5], linestyle="--", label="limit")
    axes.set(xlabel="GB of the fullest rank, at the peak of a step", ylabel="ms of a step")
    axes.margins(x=0.2)
    axes.grid(visible=True, linewidth=0.5, color="#DDDDDD")
    axes.spines[["top", "right"]].set_visible(False)
    drawn.legend(frameon=False, fontsize=8, loc="outside right upper")
    axes.set_title(f"planned: {plan.ranks} ranks, {plan.hardware.name}", fontsize=10)
    return drawn


def _ms(row: Row) -> float:
    return 1e3 * row.timing.mean
