"""The first damping: the one whose step brings most on the first batch."""

from __future__ import annotations

from collections.abc import Callable

from soframe.damping.policies import APART

TRIES = 10
"""Dampings that are tried either way, before the first step."""

BETTER = 2.0
"""How many times as much a damping must bring to be begun with in place of the last one. What
brings most in one step is not what brings most in a hundred: on CURVES the lower dampings that this
passes over took a third more steps."""


def best_damping(first: float, start: float, after: Callable[[float], float]) -> float:
    """Look for a damping, downwards as long as steps bring more; upwards if the first is too low.

    Args:
        first: Where to begin.
        start: The objective before a step.
        after: Returns it after the step with a damping.

    Returns:
        The last damping that brought `BETTER` times as much as the one before.
    """
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
