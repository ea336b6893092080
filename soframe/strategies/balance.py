"""Load balancing by longest processing time first (LPT), under a replaceable cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from soframe.specs import FactorSpec

Cost = Callable[[FactorSpec], float]
"""The cost of owning a factor, in any unit."""


def compute_cost(factor: FactorSpec) -> float:
    """Return the operations of a factorisation, up to a constant: ``groups n^3``.

    A factor that is not a matrix, such as a diagonal, costs its number of elements.
    """
    return float(factor.groups * factor.size**3 if factor.kind == "psd" else factor.packed_numel)


def memory_cost(factor: FactorSpec) -> float:
    """Return the elements of the second-order data, up to a constant: ``groups n^2``.

    A factor that is not a matrix, such as a diagonal, counts its own elements.
    """
    return float(prod(factor.shape))


def assign(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Assign jobs to bins by LPT: in descending cost, each to the bin with the least load.

    The makespan is at most 4/3 - 1/(3 bins) of the optimal one (Graham, 1969). Ties go to the
    earlier job and the lower bin, so that every rank computes the same assignment.

    Args:
        costs: The cost of each job.
        loads: The present load of each bin; the jobs' costs are added in place.

    Returns:
        The bin of each job.
    """
    bins = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        bins[job] = min(range(len(loads)), key=lambda b: (loads[b], b))
        loads[bins[job]] += costs[job]
    return bins


def assign_to_groups(costs: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Assign jobs to groups of ranks by LPT, with loads per rank."""
    shares = [1.0 / size for size in sizes]
    loads = [0.0] * len(shares)
    chosen = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        group = min(
            range(len(loads)), key=lambda g: (loads[g] + costs[job] * shares[g], loads[g], g)
        )
        loads[group] += costs[job] * shares[group]
        chosen[job] = group
    return chosen
