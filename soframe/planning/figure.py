"""A plan as a figure; matplotlib is optional, in the extra `cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soframe.diagnostics.display import COLORS
from soframe.planning.planner import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def front(plan: Plan) -> Figure:
    """Draw the options of a plan, time against memory, and name the ones that none surpasses."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 4.5), layout="constrained")
    axes = drawn.subplots()
    kinds = ((True, "o", 0, "all ranks' statistics"), (False, "^", 1, "fewer samples"))
    for exact, marker, color, label in kinds:
        sizes, times = list[float](), list[float]()
        for row in plan.rows:
            if row.exact == exact:
                sizes.append(row.memory["total"] / 1e9)
                times.append(1e3 * row.timing.mean)
        axes.plot(sizes, times, marker, color=COLORS[color], alpha=0.6, label=label)
    for number, row in enumerate(plan.front, 1):
        at = row.memory["total"] / 1e9, 1e3 * row.timing.mean
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
