"""When blocks take statistics and are solved: all of them at once, or each at its turn.

What is due follows from the step, the placement and, for turns of statistics, from what they cost:
the rows that each block's statistics are made of. No shape tells these, so the first statistics are
those of all blocks, and the ranks add up their rows. They are part of the state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.window import Cost
from soframe.comm.agreement import add_over_ranks
from soframe.schedules import Every, Interval
from soframe.statistics.window import Statistics
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
    _told: set[tuple[int, int]] = field(default_factory=set, repr=False)

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
        return cls(statistics_every=every[0], solve_every=every[1], stagger=stagger)

    def owe(self, steps: int) -> None:
        """Let all blocks take statistics at some steps, whatever the interval says.

        Args:
            steps: How many, the one under way included.
        """
        self.owed = steps

    def end_step(self) -> None:
        """Count a step of those that are owed."""
        self.owed = max(0, self.owed - 1)

    def warn_of_settings(self, blocks: Sequence[Block], stacklevel: int) -> None:
        """Warn of intervals that are numbers, before the first step.

        Args:
            blocks: All blocks.
            stacklevel: How far up the code is that chose the intervals.
        """
        numbers = not callable(self.statistics_every.value) and not callable(self.solve_every.value)
        if numbers and _solves_calls(blocks):
            self.warn_of_intervals(0, stacklevel=stacklevel + 1)

    def warn_of_intervals(self, step: int, stacklevel: int = 3) -> None:
        """Warn of intervals under which solves lack new statistics, once of each pair.

        Args:
            step: Completed steps.
            stacklevel: How far up the code is that chose the intervals.
        """
        pair = (self.statistics_every.at(step), self.solve_every.at(step))
        if pair not in self._told:
            self._told.add(pair)
            if (what := mismatch(*pair)) is not None:
                warnings.warn(f"soframe: {what}", stacklevel=stacklevel)

    def observed(self, placed: PlacedBlocks, step: int) -> list[Block]:
        """Return the blocks that take statistics.

        Args:
            placed: All blocks, with their places.
            step: Completed steps.

        Returns:
            Of those that take statistics of calls: all, where statistics are owed; otherwise those
            whose turn it is, and those with a factor that has none since what it needs is new.
        """
        captured = [block for block in placed.blocks if block.captured]
        if self.owed > 0:
            return captured
        turn = step % self.statistics_every.at(step)
        turns = zip(placed.blocks, self._turns(placed, step).statistics, strict=True)
        return [block for block, its in turns if block.captured and (turn == its or block.lacks)]

    def due(self, placed: PlacedBlocks, step: int) -> list[Block]:
        """Return the blocks to solve.

        Args:
            placed: All blocks, with their places.
            step: Completed steps.

        Returns:
            Of the blocks that have statistics those whose turn it is, and those that have never
            been solved.
        """
        if _solves_calls(placed.blocks):
            self.warn_of_intervals(step)
        turn = step % self.solve_every.at(step)
        solve_turns = self._turns(placed, step).solves
        return [
            block
            for block, its in zip(placed.blocks, solve_turns, strict=True)
            if block.tensors and block.mass > 0 and (turn == its or not block.solved)
        ]

    def learn(self, placed: PlacedBlocks, window: Statistics, step: int) -> None:
        """Learn what statistics cost, from a window in which all blocks took them that ever do.

        Where ranks saw different layers share an input, none is taken to be shared.

        Args:
            placed: All blocks, with their places.
            window: The statistics of the window, usable on all ranks; every rank must call.
            step: Completed steps.
        """
        every = self.statistics_every.at(step)
        blocks = placed.blocks
        captured = {block for block in blocks if block.captured}
        if self.stagger is not True or every == 1 or window.due < captured:
            return
        first = window.first
        index = {block.name: number for number, block in enumerate(blocks)}
        rows = [float(block.window.rows) for block in blocks]
        where = [index[first.get(block.name, block.name)] for block in blocks]
        # Of the ranks' indices, weighted by rows, the mean and the mean square: whole numbers.
        numbers = [n * i**power for power in range(3) for n, i in zip(rows, where, strict=True)]
        sums = iter(map(int, add_over_ranks(placed.backend, numbers, "start")))
        each = zip(blocks, *([next(sums) for _ in blocks] for _ in range(3)), strict=True)
        for block, total, indices, squares in each:
            if total > 0:
                agreed = total * squares == indices**2
                first_block = blocks[indices // total] if agreed else block
                block.window.learn(Cost(rows=total, input_of=first_block.name))

    def _turns(self, placed: PlacedBlocks, step: int) -> Turns:
        blocks, placement = placed.blocks, placed.placement
        if not self.stagger:
            zeros = (0,) * len(blocks)
            return Turns(zeros, zeros)
        rows = tuple(block.window.cost.rows for block in blocks)
        every = (self.statistics_every.at(step), self.solve_every.at(step))
        inputs = tuple(block.window.cost.input_of or block.name for block in blocks)
        key = (every, rows, inputs)
        if self._of is not placement:
            self._of, self._known = placement, {}
        if key not in self._known:
            if self.stagger is True and any(rows):
                staggered = all_turns(placement, *every, rows, inputs)
            else:
                staggered = Turns((0,) * len(blocks), turns(placement, every[1]))
            self._known[key] = staggered
        return self._known[key]


def _solves_calls(blocks: Sequence[Block]) -> bool:
    """Return whether any solve is of statistics of calls, which have an interval of their own."""
    return any(block.captured and block.tensors for block in blocks)


def mismatch(statistics_every: int, solve_every: int) -> str | None:
    """Return what two intervals have against each other, or None if they go together.

    Args:
        statistics_every: That of statistics.
        solve_every: That of solves.

    Returns:
        What the solves lack, and the nearest intervals under which they do not.
    """
    if solve_every % statistics_every == 0:
        return None
    if solve_every < statistics_every:
        return (
            f"solve_every={solve_every} is less than statistics_every={statistics_every}, so that "
            f"most solves find no new statistics; pass solve_every={statistics_every}, or "
            f"statistics_every={solve_every}"
        )
    below = solve_every // statistics_every * statistics_every
    age = statistics_every - math.gcd(solve_every, statistics_every)
    return (
        f"solve_every={solve_every} is no multiple of statistics_every={statistics_every}, so that "
        f"solves use statistics which are up to {age} step(s) old; pass solve_every={below} or "
        f"solve_every={below + statistics_every}"
    )


def follow(placed: PlacedBlocks, changed: Collection[Block]) -> None:
    """Let second-order data follow running factors that have changed, where solvers can do that.

    All gradient workers hold the factor (see `soframe.combinations`): data stay the same on all.

    Args:
        placed: All blocks, with their places.
        changed: Those that have new statistics, and are not about to be solved.
    """
    for block, place in placed:
        if block not in changed or not block.follows or not block.solved:
            continue
        if block.running.pending > 0:
            continue
        workers = place.gradient_workers
        for _, factor, solver in block.solved_here:
            if placed.rank not in workers or not solver.follows:
                continue
            data = block.second_order[factor.name]
            new = solver.follow(block.running.matrix(factor), data)
            if new is not None:
                block.second_order.change(factor.name, new)
