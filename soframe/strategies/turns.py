"""Turns: the work of an interval spread over its steps, so that no step has to do it all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

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


@dataclass(frozen=True)
class Turns:
    """The turns of all blocks, in the placement's order.

    Attributes:
        statistics: The step of every interval of statistics at which a block takes them.
        solves: The step of every interval of solves at which it is solved.
    """

    statistics: tuple[int, ...]
    solves: tuple[int, ...]


def all_turns(
    placement: Placement,
    statistics_every: int,
    solve_every: int,
    rows: Sequence[int],
    inputs: Sequence[str],
) -> Turns:
    """Return turns of statistics and of solves."""
    # Statistics take about ``rows n^2`` operations for each factor, solves ``n^3``. Where the
    # interval of solves is a multiple of the other, a block is solved at a step at which it takes
    # statistics, and turns of statistics are balanced under both, that is under ``rows n^2 + n^3
    # statistics_every / solve_every``; the solves of one such turn are balanced over the steps at
    # which it comes. Each is by LPT, with the bound of `turns`. Otherwise statistics and solves
    # have turns that know nothing of each other.
    #
    # Blocks with one input take statistics at one turn, where its moment is computed once.
    together: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(inputs):
        together[name].append(index)
    solves = list(map(_solve_cost, placement.work))
    aligned = solve_every % statistics_every == 0
    share = statistics_every / solve_every if aligned else 0.0
    costs = [
        statistics_cost([placement.work[i] for i in members], [rows[i] for i in members])
        + share * sum(solves[i] for i in members)
        for members in together.values()
    ]
    taken = [0] * len(inputs)
    chosen = assign(costs, _empty(statistics_every, len(costs)))
    for members, turn in zip(together.values(), chosen, strict=True):
        for index in members:
            taken[index] = turn
    if not aligned:
        return Turns(tuple(taken), turns(placement, solve_every))
    solved = [0] * len(inputs)
    for turn in sorted(set(taken)):
        mine = [index for index, its in enumerate(taken) if its == turn]
        visits = _empty(solve_every // statistics_every, len(mine))
        for index, visit in zip(mine, assign([solves[i] for i in mine], visits), strict=True):
            solved[index] = turn + visit * statistics_every
    return Turns(tuple(taken), tuple(solved))


def statistics_cost(work: Sequence[BlockWork], rows: Sequence[int]) -> float:
    """Return the operations of the statistics of blocks with one input, up to a constant."""
    return float(
        sum(
            number * (factor.groups if factor.kind == "diagonal" else prod(factor.shape))
            for index, (block, number) in enumerate(zip(work, rows, strict=True))
            for factor in block.factors
            if factor.captured and (index == 0 or factor.reads != "inputs")
        )
    )


def _solve_cost(work: BlockWork) -> float:
    return sum(map(compute_cost, work.factors))
