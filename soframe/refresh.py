"""When blocks take statistics and are solved: all of them at once, or each at its turn.

What is due follows from the step, the placement and, for turns of statistics, from what they cost:
the rows that each block's statistics are made of. No shape tells these, so the first statistics are
those of all blocks, and the ranks add up their rows. They are part of the state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from soframe.agreement import add_over_ranks
from soframe.blocks import Block
from soframe.comm.base import Backend
from soframe.schedules import Every, Interval
from soframe.statistics import Statistics
from soframe.strategies.placement import Placement
from soframe.strategies.turns import Turns, all_turns, turns

Stagger = bool | Literal["solves"]


@dataclass
class Refresh:
    """When blocks take statistics and are solved, the same on every rank.

    Attributes:
        statistics_every: The interval of statistics.
        solve_every: The interval of solves.
        stagger: Whether each block has turns of its own within the intervals; ``"solves"`` for
            those of solves alone.
        owed: Steps to come at which all blocks take statistics, whatever the interval says.
    """

    statistics_every: Every
    solve_every: Every
    stagger: Stagger = False
    owed: int = field(default=0, repr=False)
    _known: dict[tuple[object, ...], Turns] = field(default_factory=dict, repr=False)
    _of: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.stagger, bool) and self.stagger != "solves":
            raise TypeError(f"stagger must be True, 'solves' or False, not {self.stagger!r}")

    @classmethod
    def of(cls, statistics_every: Interval, solve_every: Interval, stagger: Stagger) -> Refresh:
        """Return the refresh of a preconditioner's settings.

        Args:
            statistics_every: The interval of statistics.
            solve_every: The interval of solves.
            stagger: See `Refresh`.

        Raises:
            ValueError: If an interval is none.
            TypeError: If ``stagger`` is nothing that is known.
        """
        every = (Every("statistics_every", statistics_every), Every("solve_every", solve_every))
        return cls(*every, stagger)

    def observed(self, blocks: Sequence[Block], placement: Placement, step: int) -> list[Block]:
        """Return the blocks that take statistics.

        Args:
            blocks: All blocks, in the placement's order.
            placement: Who owns what.
            step: Completed steps.

        Returns:
            All of them, where statistics are owed; otherwise those whose turn it is.
        """
        if self.owed > 0:
            return list(blocks)
        turn = step % self.statistics_every.at(step)
        own = self._turns(blocks, placement, step).statistics
        return [block for block, its in zip(blocks, own, strict=True) if turn == its]

    def due(self, blocks: Sequence[Block], placement: Placement, step: int) -> list[Block]:
        """Return the blocks to solve.

        Args:
            blocks: All blocks, in the placement's order.
            placement: Who owns what.
            step: Completed steps.

        Returns:
            Of the blocks that have statistics those whose turn it is, and those that have never
            been solved.
        """
        turn = step % self.solve_every.at(step)
        own = self._turns(blocks, placement, step).solves
        return [
            block
            for block, its in zip(blocks, own, strict=True)
            if block.mass > 0 and (turn == its or not block.solved)
        ]

    def learn(
        self, blocks: Sequence[Block], window: Statistics, backend: Backend, step: int
    ) -> None:
        """Learn what statistics cost, from a window in which all blocks took them.

        Where ranks saw different layers share an input, none is taken to be shared.

        Args:
            blocks: All blocks.
            window: The statistics of the window, usable on all ranks; every rank must call.
            backend: The backend.
            step: Completed steps.
        """
        every = self.statistics_every.at(step)
        if self.stagger is not True or every == 1 or len(window.due) < len(blocks):
            return
        first = window.first
        index = {block.name: number for number, block in enumerate(blocks)}
        rows = [float(sum(block.counts.rows.values())) for block in blocks]
        own = [n * index[first.get(b.name, b.name)] for b, n in zip(blocks, rows, strict=True)]
        sums = add_over_ranks(backend, rows + own, "start")
        for block, total, where in zip(blocks, sums, sums[len(blocks) :], strict=False):
            if total > 0:
                agreed = where % total == 0
                block.rows = int(total)
                block.input_of = blocks[int(where / total)].name if agreed else block.name

    def _turns(self, blocks: Sequence[Block], placement: Placement, step: int) -> Turns:
        if not self.stagger:
            zeros = (0,) * len(blocks)
            return Turns(zeros, zeros)
        rows = tuple(block.rows for block in blocks)
        every = (self.statistics_every.at(step), self.solve_every.at(step))
        inputs = tuple(block.input_of or block.name for block in blocks)
        key = (every, rows, inputs)
        if self._of is not placement:
            self._of, self._known = placement, {}
        if key not in self._known:
            if self.stagger is True and any(rows):
                own = all_turns(placement, *every, rows, inputs)
            else:
                own = Turns((0,) * len(blocks), turns(placement, every[1]))
            self._known[key] = own
        return self._known[key]


def follow(
    blocks: Sequence[Block], changed: Collection[Block], placement: Placement, rank: int
) -> None:
    """Let second-order data follow running factors that have changed, where solvers can do that.

    A factor's data follow where all gradient workers hold the factor, so that they stay the same
    on all of them; statistics that are not reduced yet are not waited for.

    Args:
        blocks: All blocks, in the placement's order.
        changed: Those that have new statistics, and are not about to be solved.
        placement: Who holds what.
        rank: This rank.
    """
    for block, place in zip(blocks, placement.blocks, strict=True):
        follows = block.solver.follows and block in changed
        if not follows or not block.solved or block.pending > 0:
            continue
        workers = place.gradient_workers
        for index, factor in enumerate(block.factors):
            if rank not in workers or not all(place.holds(w, index) for w in workers):
                continue
            data = block.second_order[factor.name]
            new = block.solver.follow(block.matrix(factor), data)
            if new is not None:
                # In new tensors: what others kept of the old data stays what it was.
                block.second_order[factor.name] = {**data, **new}
