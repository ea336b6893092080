"""Turns: the solves of an interval spread over its steps, so that no step has to do them all."""

from __future__ import annotations

from soframe.strategies.balance import assign, compute_cost
from soframe.strategies.placement import Placement


def turns(placement: Placement, interval: int) -> tuple[int, ...]:
    """Return the turn of each block: the step of every interval at which it is solved.

    Turns are balanced by LPT under ``groups n^3``, so that what is solved at one of them costs at
    most ``total / interval + (1 - 1 / interval) largest`` (Graham, 1969). They follow from the
    shapes of the blocks alone: every rank finds the same, and so does one process, or another
    strategy that goes on from a checkpoint.

    Args:
        placement: The placement.
        interval: The interval of solves, in steps.

    Returns:
        For each block a number in ``[0, interval)``.
    """
    costs = [sum(map(compute_cost, work.factors)) for work in placement.work]
    return tuple(assign(costs, [0.0] * interval))
