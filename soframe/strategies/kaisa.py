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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from soframe.checks.values import is_part
from soframe.registry import register
from soframe.strategies.balance import Cost, assign, compute_cost, share_out
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement, BlockWork


def _owners(
    totals: Sequence[float],
    costs: Sequence[Sequence[float]],
    workers: Sequence[int],
    *,
    colocate: bool,
) -> list[tuple[int, ...]]:
    """Return each block's owners by factor, from the costs of blocks, or of factors."""
    loads = [0.0] * len(workers)
    owners: list[tuple[int, ...]] = []
    if colocate:
        for row, of_block in zip(assign(totals, loads), costs, strict=True):
            owners.append(tuple(itertools.repeat(workers[row], len(of_block))))
        return owners
    rows = iter(assign(list(itertools.chain.from_iterable(costs)), loads))
    for of_block in costs:
        owners.append(tuple(workers[next(rows)] for _ in of_block))
    return owners


def _sources(workers: tuple[int, ...], ranks: int, columns: int) -> tuple[int, ...]:
    by_row = {worker // columns: worker for worker in workers}
    return tuple(by_row.get(rank // columns, workers[0]) for rank in range(ranks))


@register("strategy", "hybrid-opt")
@dataclass(frozen=True)
class HybridOpt(Strategy):
    """A fraction of the ranks preconditions each gradient.

    Attributes:
        colocate: Solve the factors of one block on the same rank.
        cost: The cost of owning a factor.
        gradient_workers: The number of ranks that precondition a gradient: a fraction of the ranks
            in (0, 1] as a float, or a count as an int.
    """

    colocate: bool = True
    cost: Cost = compute_cost
    gradient_workers: float | int = 0.5

    def __post_init__(self) -> None:
        if not is_part(self.gradient_workers):
            raise ValueError(
                f"HybridOpt: gradient_workers must be a fraction in (0, 1] (float) or a number of "
                f"ranks (int), not {self.gradient_workers!r}"
            )

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        columns, notes = self._columns(ranks)
        members = [tuple(range(column, ranks, columns)) for column in range(columns)]
        costs = [list(map(self.cost, block.factors)) for block in work]
        totals = [block.effort + sum(cost) for block, cost in zip(work, costs, strict=True)]
        blocks_of = share_out(totals, list(map(len, members)))
        placed: dict[int, BlockPlacement] = {}
        for workers, blocks in zip(members, blocks_of, strict=True):
            if not blocks:
                continue
            sources = _sources(workers, ranks, columns)
            sizes = [totals[block] for block in blocks]
            owners = _owners(sizes, [costs[b] for b in blocks], workers, colocate=self.colocate)
            for block, of_factors in zip(blocks, owners, strict=True):
                place = (of_factors, workers, sources)
                placed[block] = BlockPlacement(work[block].name, *place, packed=ranks > 1)
        in_order = tuple(placed[block] for block in range(len(work)))
        return Placement("hybrid-opt", ranks, work=tuple(work), blocks=in_order, notes=notes)

    def _columns(self, ranks: int) -> tuple[int, tuple[str, ...]]:
        """Return the number of columns, and a note if the gradient workers are others."""
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
            return columns, ()
        lengths = f"{shortest} or {shortest + 1}" if rest else f"{shortest}"
        note = (
            f"{workers:g} gradient workers do not divide {ranks} ranks: {columns} column(s) "
            f"of {lengths} ranks instead"
        )
        return columns, (note,)


@register("strategy", "comm-opt")
@dataclass(frozen=True)
class CommOpt(Strategy):
    """Every rank preconditions every gradient: most memory, no communication between solves.

    Attributes:
        colocate: Solve the factors of one block on the same rank.
        cost: The cost of owning a factor.
    """

    colocate: bool = True
    cost: Cost = compute_cost

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        hybrid = HybridOpt(self.colocate, self.cost, gradient_workers=ranks)
        return replace(hybrid.place(work, ranks), strategy="comm-opt")


@register("strategy", "mem-opt")
@dataclass(frozen=True)
class MemOpt(Strategy):
    """One rank preconditions a gradient and sends it to the others: least memory of the grid.

    Attributes:
        cost: The cost of owning a factor.
    """

    cost: Cost = compute_cost

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        hybrid = HybridOpt(cost=self.cost, gradient_workers=1)
        return replace(hybrid.place(work, ranks), strategy="mem-opt")
