"""The first damping: the one with the largest reduction on the first batch."""

from __future__ import annotations

from collections.abc import Callable

from soframe.damping.policies import APART

TRIES = 10
"""The number of dampings tried in each direction before the first step."""

BETTER = 2.0
"""The factor by which another damping must increase the last one's reduction. The damping with the
best single step is not the best over a hundred: on CURVES the lower dampings skipped by this factor
took a third more steps.
"""


def best_damping(first: float, start: float, after: Callable[[float], float]) -> float:
    """Search downwards, or else upwards, given the objective before and after a damping's step."""
    best, least = first, after(first)
    for factor in (1 / APART, APART):
        begun = best
        for _ in range(TRIES):
            objective = after(best * factor)
            if not start - objective > BETTER * max(0.0, start - least):
                break
            best, least = best * factor, objective
        if best != begun:
            break
    return best
