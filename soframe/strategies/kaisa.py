"""The KAISA grid: COMM-OPT, MEM-OPT and everything between (Pauloski et al., 2021, section 4).

Ranks form a grid with ``columns`` columns: rank r stands in column ``r % columns``, row ``r //
columns``. A block is assigned to one column; its ranks are the block's gradient workers, and one of
them owns each factor. Within each row the column's rank sends the preconditioned gradient to the
others. With one column every rank preconditions everything and no gradient is sent (COMM-OPT); with
as many columns as ranks a single rank does (MEM-OPT).

Where the number of gradient workers does not divide the number of ranks, the lengths of columns
differ by one; a rank whose row has no rank of the block's column receives from the column's first
rank.

Every rank holds every running factor, as in KAISA. Statistics travel as triangles and stay packed
between solves: half the memory, and only the owner unpacks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from soframe.registry import register
from soframe.strategies.balance import Cost, assign, compute_cost
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement, BlockWork


@dataclass(frozen=True)
class _Grid(Strategy):
    """The grid, for any number of columns."""

    colocate: bool = True
    cost: Cost = compute_cost

    def _place(
        self, name: str, work: Sequence[BlockWork], ranks: int, columns: int, *notes: str
    ) -> Placement:
        members = [tuple(range(column, ranks, columns)) for column in range(columns)]
        costs = [list(map(self.cost, block.factors)) for block in work]
        totals = [block.effort + sum(cost) for block, cost in zip(work, costs, strict=True)]
        column_of = assign(totals, [0.0] * columns, list(map(len, members)))
        owners = [[0] * len(block.factors) for block in work]
        blocks_of: dict[int, list[int]] = {}  # by column
        for index, column in enumerate(column_of):
            blocks_of.setdefault(column, []).append(index)
        for column, indices in blocks_of.items():
            if self.colocate:
                _assign_blocks(owners, totals, indices, members[column])
            else:
                _assign_factors(owners, costs, indices, members[column])
        sources = {column: _sources(members[column], ranks, columns) for column in blocks_of}
        blocks = []
        for block, column, block_owners in zip(work, column_of, owners, strict=True):
            place = (tuple(block_owners), members[column], sources[column])
            blocks.append(BlockPlacement(block.name, *place, packed=ranks > 1))
        return Placement(name, ranks, work=tuple(work), blocks=tuple(blocks), notes=notes)


def _assign_blocks(
    owners: list[list[int]], totals: Sequence[float], blocks: Sequence[int], workers: Sequence[int]
) -> None:
    """Write the owner of all factors of each of some blocks, by the blocks' costs."""
    rows = assign([totals[block] for block in blocks], [0.0] * len(workers))
    for block, row in zip(blocks, rows, strict=True):
        owners[block] = [workers[row] for _ in owners[block]]


def _assign_factors(
    owners: list[list[int]],
    costs: Sequence[Sequence[float]],
    blocks: Sequence[int],
    workers: Sequence[int],
) -> None:
    """Write the owner of each factor of some blocks, by the factors' costs."""
    factors: list[tuple[int, int]] = []  # the index of a block, and of a factor in it
    for block in blocks:
        factors += [(block, factor) for factor in range(len(costs[block]))]
    rows = assign([costs[block][factor] for block, factor in factors], [0.0] * len(workers))
    for (block, factor), row in zip(factors, rows, strict=True):
        owners[block][factor] = workers[row]


def _sources(workers: tuple[int, ...], ranks: int, columns: int) -> tuple[int, ...]:
    by_row = {worker // columns: worker for worker in workers}
    return tuple(by_row.get(rank // columns, workers[0]) for rank in range(ranks))


@register("strategy", "comm-opt")
@dataclass(frozen=True)
class CommOpt(_Grid):
    """Every rank preconditions every gradient: most memory, no communication between solves.

    Attributes:
        colocate: Solve the factors of one block on the same rank.
        cost: The cost of owning a factor.
    """

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        return self._place("comm-opt", work, ranks, 1)


@register("strategy", "mem-opt")
@dataclass(frozen=True)
class MemOpt(_Grid):
    """One rank preconditions a gradient and sends it to the others: least memory of the grid.

    Attributes:
        colocate: Without effect, as in the other strategies of the grid; a single rank owns all
            factors of a block.
        cost: The cost of owning a factor.
    """

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        return self._place("mem-opt", work, ranks, ranks)


@register("strategy", "hybrid-opt")
@dataclass(frozen=True)
class HybridOpt(_Grid):
    """A fraction of the ranks preconditions each gradient.

    Attributes:
        colocate: Solve the factors of one block on the same rank.
        cost: The cost of owning a factor.
        gradient_workers: The number of ranks that precondition a gradient: a fraction of the ranks
            in (0, 1] as a float, or a count as an int.
    """

    gradient_workers: float | int = 0.5

    def __post_init__(self) -> None:
        workers = self.gradient_workers
        is_number = isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1
        is_fraction = isinstance(workers, float) and 0 < workers <= 1
        if not is_number and not is_fraction:
            raise ValueError(
                f"HybridOpt: gradient_workers must be a fraction in (0, 1] (float) or a number of "
                f"ranks (int), not {workers!r}"
            )

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        if isinstance(self.gradient_workers, int):
            workers = float(self.gradient_workers)
            if workers > ranks:
                raise ValueError(
                    f"HybridOpt: gradient_workers={self.gradient_workers} but there are {ranks} "
                    f"rank(s); pass at most {ranks}, or a fraction"
                )
        else:
            workers = max(1.0, ranks * self.gradient_workers)
        columns = max(1, round(ranks / workers))
        notes = []
        lengths = sorted({len(range(c, ranks, columns)) for c in range(columns)})
        # A fraction of the ranks is a whole number up to rounding.
        if len(lengths) > 1 or not math.isclose(lengths[0], workers):
            notes.append(
                f"{workers:g} gradient workers do not divide {ranks} ranks: {columns} column(s) "
                f"of {' or '.join(map(str, lengths))} ranks instead"
            )
        return self._place("hybrid-opt", work, ranks, columns, *notes)
