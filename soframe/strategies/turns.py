"""Turns: the work of an interval spread over its steps, so that no step has to do it all."""

from __future__ import annotations

from soframe.strategies.balance import assign, compute_cost
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockWork


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
    costs = list(map(_solve_cost, placement.work))
    return tuple(assign(costs, _empty(interval, len(costs))))


def _empty(turns: int, jobs: int) -> list[float]:
    """Return the loads of turns before they have any; of those beyond the jobs none is needed."""
    return [0.0] * min(turns, max(jobs, 1))


def _solve_cost(work: BlockWork) -> float:
    return sum(map(compute_cost, work.factors))
