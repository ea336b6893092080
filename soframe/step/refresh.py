"""When blocks take statistics and are solved: at the intervals, or solves each at its turn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.schedules import Every, Interval
from soframe.strategies.turns import turns


@dataclass
class Refresh:
    """When blocks take statistics and are solved, the same on every rank.

    Attributes:
        statistics_every: The interval of statistics.
        solve_every: The interval of solves.
        stagger: Whether the solves of an interval are spread over its steps.
        owed: Steps to come at which all blocks take statistics, whatever the interval says.
    """

    statistics_every: Every
    solve_every: Every
    stagger: bool = False
    owed: int = field(default=0, repr=False)
    _turns_of: tuple[object, int, Sequence[int]] | None = field(default=None, repr=False)
    _told: set[tuple[int, int]] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.stagger, bool):
            raise TypeError(f"stagger must be True or False, not {self.stagger!r}")

    @classmethod
    def of(cls, statistics_every: Interval, solve_every: Interval, stagger: bool) -> Refresh:
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
        return [block for block in captured if turn == 0 or block.lacks]

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
        return [
            block
            for block, its in zip(placed.blocks, self._turns(placed, step), strict=True)
            if block.tensors and block.mass > 0 and (turn == its or not block.solved)
        ]

    def _turns(self, placed: PlacedBlocks, step: int) -> Sequence[int]:
        """Return the step of the interval at which each block is solved."""
        if not self.stagger:
            return (0,) * len(placed.blocks)
        every = self.solve_every.at(step)
        if self._turns_of is None or self._turns_of[:2] != (placed.placement, every):
            self._turns_of = (placed.placement, every, turns(placed.placement, every))
        return self._turns_of[2]


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
