"""Turns: staggered solves, spread over the steps of an interval."""

from __future__ import annotations

from soframe.strategies.balance import assign, compute_cost
from soframe.strategies.placement import Placement


def turns(placement: Placement, interval: int) -> tuple[int, ...]:
    """Return the turn of each block: the step of every interval at which it is solved.

    LPT balances turns under ``groups n^3``, so the solves of one step cost at most ``total /
    interval + (1 - 1 / interval) largest`` (Graham, 1969). Turns depend on the shapes of the blocks
    alone: every rank, one process, and another strategy that resumes from a checkpoint compute the
    same ones.
    """
    costs = [sum(map(compute_cost, work.factors)) for work in placement.work]
    # No more turns than blocks are needed.
    return tuple(assign(costs, [0.0] * min(interval, max(len(costs), 1))))
