"""Sharded curvature: one rank holds a running factor; statistics come from a few ranks or all.

KAISA keeps every running factor on every rank and reduces statistics to all of them. Here only the
rank that solves a factor holds it, as a packed triangle, and statistics are reduced to that rank.
Three choices remain, each with its price (T: the elements of all triangles, P ranks, statistics
every F and solves every K steps):

=====================================  =====================  ==================================
statistics                             sent per rank, step    kept per rank, beside owned factors
=====================================  =====================  ==================================
of all ranks, reduced eagerly          T / F                  nothing
of all ranks, deferred to the solves   T / K                  T: an accumulator for every factor
of ``group`` ranks, eagerly            T group / (P F)        nothing
of ``group`` ranks, deferred           T group / (P K)        T group / P
of the owner (``group=1``)             nothing                nothing
=====================================  =====================  ==================================

Deferred and eager reduction give the same factors (`soframe.estimate.averages`). A group of m of P
ranks that draw their data alike estimates the same factors from m/P of the batch; averages over
time make up for the fewer samples. With the owner's data alone this is DP-KFAC (Zhang et al.,
2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from soframe.checks.values import is_integer
from soframe.registry import register
from soframe.strategies.balance import Cost, assign, memory_cost, share_out
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement
from soframe.strategies.work import ITEM_BYTES, BlockPlacement, BlockWork


def _places(totals: Sequence[float], ranks: int, *, colocate: bool) -> list[tuple[int, int]]:
    """Return the worker and the holder of each block of a group, by number in the group."""
    loads = [0.0] * ranks
    # Place second-order data first: the step waits for its exchange. Running factors, half as
    # large, then go to the ranks with the least load.
    workers = assign(totals, loads)
    holders = [0] * len(totals)
    for block in sorted(range(len(totals)), key=lambda block: (-totals[block], block)):
        worker, size = workers[block], totals[block] / 2
        holder = worker
        # Split a block only if its parts together would exceed every rank's load.
        if not colocate and loads[worker] + size > max(loads):
            holder = min(range(ranks), key=lambda rank: (loads[rank], rank != worker, rank))
        loads[holder] += size
        holders[block] = holder
    return list(zip(workers, holders, strict=True))


def _groups(ranks: int, size: int) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Split the ranks into groups of at most ``size`` neighbours, as evenly as possible."""
    number = -(-ranks // size)
    groups: list[tuple[int, ...]] = []
    for index in range(number):
        start, end = ranks * index // number, ranks * (index + 1) // number
        groups.append(tuple(range(start, end)))
    lengths = sorted({len(members) for members in groups})
    if lengths == [min(size, ranks)]:
        return groups, ()
    sizes = " or ".join(map(str, lengths))
    note = f"groups of {size} do not divide {ranks} ranks: {number} group(s) of {sizes} ranks"
    return groups, (f"{note} instead",)


@register("strategy", "sharded")
@dataclass(frozen=True)
class Sharded(Strategy):
    """Running factors on one rank each, statistics reduced to it.

    Attributes:
        cost: The cost of a factor for its rank.
        colocate: Hold and solve the factors of a block on its gradient worker, which saves sending
            second-order data; otherwise on another rank of the group where that lowers the peak
            memory over ranks.
        group: The number of neighbouring ranks that contribute to a block's statistics, for example
            the ranks of a node; None for all.
        deferred: Reduce statistics when a solve needs them instead of at every statistics step:
            less traffic, but an accumulator on every contributor.
        wire: The dtype in which statistics travel, for example ``"bfloat16"``; None for the
            factors' own.
    """

    cost: Cost = memory_cost
    colocate: bool = False
    group: int | None = 4
    deferred: bool = False
    wire: str | None = None

    def __post_init__(self) -> None:
        if self.group is not None and not is_integer(self.group, 1):
            raise ValueError(f"Sharded: group must be a number of ranks or None, not {self.group}")
        if self.wire is not None and self.wire not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ValueError(f"Sharded: wire must be one of {known} or None, not {self.wire!r}")

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        groups, notes = _groups(ranks, ranks if self.group is None else self.group)
        totals = [block.elements + sum(map(self.cost, block.factors)) for block in work]
        blocks_of = share_out(totals, list(map(len, groups)))
        placed: dict[int, BlockPlacement] = {}
        for members, blocks in zip(groups, blocks_of, strict=True):
            sizes = [totals[block] for block in blocks]
            places = _places(sizes, len(members), colocate=self.colocate)
            for block, (worker, holder) in zip(blocks, places, strict=True):
                factors = len(work[block].factors)
                contributors = () if len(members) == ranks else itertools.repeat(members, factors)
                placed[block] = BlockPlacement(
                    work[block].name,
                    owners=tuple(itertools.repeat(members[holder], factors)),
                    gradient_workers=(members[worker],),
                    sources=tuple(itertools.repeat(members[worker], ranks)),
                    contributors=tuple(contributors),
                    holders=tuple(itertools.repeat((members[holder],), factors)),
                    deferred=self.deferred,
                    packed=True,
                    wire=self.wire,
                )
        in_order = tuple(placed[block] for block in range(len(work)))
        return Placement("sharded", ranks, work=tuple(work), blocks=in_order, notes=notes)


@register("strategy", "owner-local")
@dataclass(frozen=True)
class OwnerLocal(Strategy):
    """Statistics of a block from its owner's data alone: no statistics are sent.

    The data-parallel K-FAC of Zhang et al. (2022). The factors depend on the rank that owns a
    block, so results change with the number of ranks.

    Attributes:
        cost: The cost of a factor for its rank.
    """

    cost: Cost = memory_cost

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        sharded = Sharded(cost=self.cost, group=1)
        return replace(sharded.place(work, ranks), strategy="owner-local")
