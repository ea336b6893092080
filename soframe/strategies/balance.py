"""Load balancing by longest processing time first (LPT), under a replaceable cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from soframe.specs import FactorSpec
from soframe.strategies.placement import Placement

Cost = Callable[[FactorSpec], float]
"""The cost of owning a factor, in any unit."""


def compute_cost(factor: FactorSpec) -> float:
    """Return the operations of a factorisation, up to a constant: ``groups n^3``.

    A factor that is not a matrix, such as a diagonal, costs its number of elements.
    """
    if factor.kind == "psd":
        return float(factor.groups * factor.size**3)
    return float(factor.packed_numel)


def memory_cost(factor: FactorSpec) -> float:
    """Return the elements of the second-order data, up to a constant: ``groups n^2``.

    A factor that is not a matrix, such as a diagonal, counts its own elements.
    """
    return float(prod(factor.shape))


def assign(
    costs: Sequence[float], loads: list[float], sizes: Sequence[int] | None = None
) -> list[int]:
    """Assign jobs to bins by LPT: in descending cost, each to the bin with the least load.

    The makespan is at most 4/3 - 1/(3 bins) of the optimal one (Graham, 1969). Ties go to the
    earlier job and the lower bin, so that every rank computes the same assignment.

    Args:
        costs: The cost of each job.
        loads: The present load of each bin; the jobs' costs are added in place.
        sizes: The ranks of each bin, by which a job's cost is divided; one by default.

    Returns:
        The bin of each job.
    """
    if sizes is None:
        sizes = [1] * len(loads)
    shares = [1.0 / size for size in sizes]
    bins = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        cost = costs[job]
        least = min(range(len(loads)), key=lambda b: (loads[b] + cost * shares[b], loads[b], b))
        loads[least] += cost * shares[least]
        bins[job] = least
    return bins


def share_out(costs: Sequence[float], sizes: Sequence[int]) -> list[list[int]]:
    """Return the jobs of each bin, see `assign`; bins have as many ranks as ``sizes``."""
    jobs_of: list[list[int]] = [[] for _ in sizes]
    for job, chosen in enumerate(assign(costs, [0.0] * len(sizes), sizes)):
        jobs_of[chosen].append(job)
    return jobs_of


def turns(placement: Placement, interval: int) -> tuple[int, ...]:
    """Return the turn of each block in staggered solves: the step of every interval of its own.

    LPT balances turns under ``groups n^3``, so the solves of one step cost at most ``total /
    interval + (1 - 1 / interval) largest`` (Graham, 1969). Turns depend on the shapes of the blocks
    alone: every rank, one process, and another strategy that resumes from a checkpoint compute the
    same ones.
    """
    costs = [sum(map(compute_cost, work.factors)) for work in placement.work]
    # No more turns than blocks are needed.
    return tuple(assign(costs, [0.0] * min(interval, max(len(costs), 1))))
