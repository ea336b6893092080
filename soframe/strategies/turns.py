"""Turns: staggered solves, spread over the steps of an interval."""

from __future__ import annotations

from soframe.strategies.balance import assign, compute_cost
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockWork


def turns(placement: Placement, interval: int) -> tuple[int, ...]:
    """Return the turn of each block: the step of every interval at which it is solved.

    LPT balances turns under ``groups n^3``, so the solves of one step cost at most ``total /
    interval + (1 - 1 / interval) largest`` (Graham, 1969). Turns depend on the shapes of the blocks
    alone: every rank, one process, and another strategy that resumes from a checkpoint compute the
    same ones.

    Args:
        placement: The placement.
        interval: The interval of solves, in steps.

    Returns:
        For each block a number in ``[0, interval)``.
    """
    costs = list(map(_solve_cost, placement.work))
    return tuple(assign(costs, _empty(interval, len(costs))))


def _empty(turns: int, jobs: int) -> list[float]:
    """Return zero loads, ``[min(turns, jobs)]``: no more turns than jobs are needed."""
    return [0.0] * min(turns, max(jobs, 1))


def _solve_cost(work: BlockWork) -> float:
    return sum(map(compute_cost, work.factors))
