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
        totals = [b.effort + sum(self.cost(factor) for factor in b.factors) for b in work]
        column_of = assign(totals, [0.0] * columns, [len(ranks_) for ranks_ in members])
        owners = [[0] * len(block.factors) for block in work]
        for column, ranks_ in enumerate(members):
            mine = [index for index, chosen in enumerate(column_of) if chosen == column]
            if self.colocate:
                jobs = [(index, slice(None)) for index in mine]
                costs = [totals[index] for index in mine]
            else:
                jobs = [(i, slice(f, f + 1)) for i in mine for f in range(len(work[i].factors))]
                costs = [self.cost(factor) for index in mine for factor in work[index].factors]
            for (index, factors), row in zip(jobs, assign(costs, [0.0] * len(ranks_)), strict=True):
                owned = len(owners[index][factors])
                owners[index][factors] = [ranks_[row]] * owned
        sources = {one: _sources(members[one], ranks, columns) for one in set(column_of)}
        blocks = tuple(
            BlockPlacement(
                block.name,
                tuple(owners[i]),
                members[column_of[i]],
                sources[column_of[i]],
                packed=ranks > 1,
            )
            for i, block in enumerate(work)
        )
        return Placement(name, ranks, work=tuple(work), blocks=blocks, notes=notes)


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
        wanted = self.gradient_workers
        whole = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1
        fraction = isinstance(wanted, float) and 0 < wanted <= 1
        if not whole and not fraction:
            raise ValueError(
                f"HybridOpt: gradient_workers must be a fraction in (0, 1] (float) or a number of "
                f"ranks (int), not {wanted!r}"
            )

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        wanted = self.gradient_workers
        if isinstance(wanted, int):
            if wanted > ranks:
                raise ValueError(
                    f"HybridOpt: gradient_workers={wanted} but there are {ranks} rank(s); "
                    f"pass at most {ranks}, or a fraction"
                )
            workers = float(wanted)
        else:
            workers = max(1.0, ranks * wanted)
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
