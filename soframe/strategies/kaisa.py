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

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soframe.registry import register
from soframe.strategies.balance import Cost, assign, compute_cost, share_out
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
        blocks_of = share_out(totals, list(map(len, members)))
        placed: dict[int, BlockPlacement] = {}
        for workers, indices in zip(members, blocks_of, strict=True):
            if not indices:
                continue
            sources = _sources(workers, ranks, columns)
            for index, owners in self._owners(indices, costs, totals, workers):
                place = (owners, workers, sources)
                placed[index] = BlockPlacement(work[index].name, *place, packed=ranks > 1)
        blocks = tuple(placed[index] for index in range(len(work)))
        return Placement(name, ranks, work=tuple(work), blocks=blocks, notes=notes)

    def _owners(
        self,
        blocks: Sequence[int],
        costs: Sequence[Sequence[float]],
        totals: Sequence[float],
        workers: Sequence[int],
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield some blocks with the owner of each factor, by the costs of blocks or factors."""
        loads = [0.0] * len(workers)
        if self.colocate:
            rows = assign([totals[block] for block in blocks], loads)
            for block, row in zip(blocks, rows, strict=True):
                yield block, tuple(itertools.repeat(workers[row], len(costs[block])))
            return
        of_factors = list(itertools.chain.from_iterable(costs[block] for block in blocks))
        owners = [workers[row] for row in assign(of_factors, loads)]
        start = 0
        for block in blocks:
            end = start + len(costs[block])
            yield block, tuple(owners[start:end])
            start = end


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
        is_valid = False
        match workers:
            case bool():
                pass
            case int():
                is_valid = workers >= 1
            case float():
                is_valid = 0 < workers <= 1
        if not is_valid:
            raise ValueError(
                f"HybridOpt: gradient_workers must be a fraction in (0, 1] (float) or a number of "
                f"ranks (int), not {workers!r}"
            )

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        workers = float(self.gradient_workers)
        if isinstance(self.gradient_workers, float):
            workers = max(1.0, ranks * workers)
        elif workers > ranks:
            raise ValueError(
                f"HybridOpt: gradient_workers={self.gradient_workers} but there are {ranks} "
                f"rank(s); pass at most {ranks}, or a fraction"
            )
        columns = max(1, round(ranks / workers))
        # Columns differ by one rank where they do not divide the ranks.
        shortest, rest = divmod(ranks, columns)
        # A fraction of the ranks is a whole number up to rounding.
        if rest == 0 and math.isclose(shortest, workers):
            return self._place("hybrid-opt", work, ranks, columns)
        lengths = f"{shortest} or {shortest + 1}" if rest else f"{shortest}"
        note = (
            f"{workers:g} gradient workers do not divide {ranks} ranks: {columns} column(s) "
            f"of {lengths} ranks instead"
        )
        return self._place("hybrid-opt", work, ranks, columns, note)
