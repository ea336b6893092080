"""The first damping: the one whose step brings most on the first batch."""

from __future__ import annotations

from collections.abc import Callable

from soframe.damping.policies import APART

TRIES = 10
"""Dampings that are tried in each direction, before the first step."""

BETTER = 2.0
"""How many times the reduction of the last damping a further one must bring. The damping that
brings most in one step is not the best of a hundred: on CURVES the lower dampings that this passes
over took a third more steps."""


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
