"""The steps at which blocks take statistics and are solved: by intervals, or solves in turns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from soframe.blocks.block import Block, PlacedBlocks
from soframe.checks.warning import warn
from soframe.estimate.gradients import Gradients
from soframe.estimate.plan import Plan
from soframe.schedules import (
    NEVER,
    Every,
    Interval,
    SolveInterval,
    WarmInterval,
    interval_of,
)
from soframe.strategies.balance import turns


@dataclass
class Refresh:
    """The steps at which blocks take statistics and are solved, the same on every rank."""

    statistics_every: Every  # the interval of statistics of calls
    gradients_every: Every  # the interval of statistics of the averaged gradient
    solve_every: Every
    stagger: bool = False  # whether the solves of an interval are spread over its steps
    # The number of coming steps, in a step with the present one, in which all blocks take
    # statistics at any interval.
    owed: int = field(default=0, repr=False)
    # The interval of statistics of calls in the window under way, agreed on by all ranks.
    coming: int = field(init=False, repr=False)
    # The turns of the blocks, and the placed blocks and the interval that they are for.
    _last_turns: Mapping[Block, int] = field(default_factory=dict, repr=False)
    _last_turns_for: tuple[object, ...] = field(default=(), repr=False)
    _warned_of: set[tuple[int, int]] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.stagger, bool):
            raise TypeError(f"stagger must be True or False, not {self.stagger!r}")
        self.coming = self.statistics_every.at(0)

    @classmethod
    def of(
        cls,
        statistics_every: Interval | None,
        solve_every: SolveInterval | None,
        stagger: bool,
        *,
        reads_calls: bool,
    ) -> Refresh:
        """Return the refresh of a preconditioner's settings, with None for the usual intervals.

        Statistics of calls are taken every 10 steps, of gradients at every step. Solves are 10
        steps apart; if all methods read calls, from step 100 on 100 steps. With "demand" no step
        solves: see `Curvature.solve`.
        """
        calls: Interval = 10
        gradients: Interval = 1
        if statistics_every is not None:
            calls = gradients = statistics_every
        if solve_every is None:
            solve_every = WarmInterval(100, steps=100, first=10) if reads_calls else 10
        return cls(
            Every("statistics_every", calls),
            Every("statistics_every", gradients),
            Every("solve_every", interval_of(solve_every)),
            stagger=stagger,
        )

    def continue_from(self, step: int, owed: int) -> None:
        """Continue after ``step`` completed steps."""
        self.owed, self.coming = owed, self.statistics_every.at(step)

    def owe(self, steps: int) -> None:
        """Let all blocks take statistics in the next steps, at any interval."""
        self.owed = steps

    def end_step(self, statistics_every: int) -> None:
        """Count a step, and set the interval of the next one."""
        self.coming = statistics_every
        self.owed = max(0, self.owed - 1)

    def warn_of_settings(self, blocks: Sequence[Block]) -> None:
        """Warn of mismatched intervals before the first step, if they are numbers."""
        if not any(map(callable, (self.statistics_every.value, self.solve_every.value))):
            every = self.solve_every.at(0)
            self._warn_of_intervals(blocks, every)

    def _warn_of_intervals(self, blocks: Sequence[Block], solve_every: int) -> None:
        """Warn if solves lack new statistics at these intervals, once per pair."""
        pair = (self.coming, solve_every)
        if pair in self._warned_of:
            return
        # `statistics_every` is for statistics of calls alone.
        if any(block.captured for block in blocks if block.tensors):
            self._warned_of.add(pair)
            if (conflict := mismatch(*pair)) is not None:
                warn(conflict)

    def observed(self, placed: PlacedBlocks, step: int, late: Collection[str]) -> list[Block]:
        """Return the blocks that take statistics of calls in the window after ``step`` steps.

        These are all such blocks, if statistics are owed or at their interval; otherwise the blocks
        with a factor that waits for its first statistics with new second-order data, but for the
        names in ``late``, and the blocks that missed a turn, see `note_missed_turns`.
        """
        if self.owed > 0 or step % self.coming == 0:
            return list(placed.captured)
        return [
            block
            for block in placed.captured
            if block.record.missed > 1 or (block.has_factor_to_begin and block.name not in late)
        ]

    def note_missed_turns(
        self, placed: PlacedBlocks, due: Collection[Block], gradients: Gradients, step: int
    ) -> None:
        """Let blocks that were not used at their turn take statistics once they are used again.

        Layers that alternate, such as heads of several tasks, may be used between the turns alone.
        From the first gradient between turns on they are due at every step, until they have taken
        statistics. A gradient without statistics at a turn waits for none: hooks do not see it.
        The blocks ``due`` were to take statistics in this step, which `Record.statistics_at` has
        for blocks that did.
        """
        used: set[Block] = set()
        for stack, gradient in gradients.items():
            used.update(stack.blocks_of(gradient.members))
        for block in placed.captured:
            record, is_used = block.record, block in used
            if block not in due:
                if is_used and record.missed:
                    record.missed = 2
            elif is_used or step in record.statistics_at.values():
                record.missed = 0
            else:
                record.missed = max(record.missed, 1)

    def interval(self, placed: PlacedBlocks, step: int) -> int:
        """Return the interval of statistics in force: of calls, if any block reads them."""
        if placed.captured:
            return self.statistics_every.at(step)
        return self.gradients_every.at(step)

    def due(self, placed: PlacedBlocks, plan: Plan, *, after: bool) -> list[Block]:
        """Return the blocks with statistics whose turn it is, or that were never solved.

        These are the blocks whose solves come before their updates, or with ``after`` behind them.
        Frozen blocks are solved once, with their last statistics from before the freeze.
        """
        if not placed.solvable:
            return []
        # Schedules may change the intervals during training.
        if placed.captured and not after:
            self._warn_of_intervals(placed.solvable, plan.solve_every)
        turn = plan.step % plan.solve_every
        due: list[Block] = []
        turn_of: Mapping[Block, int] = {}
        if self.stagger:
            turn_of = self._turns(placed, plan.solve_every)
        for block in placed.solvable:
            if block.method.refreshes_after != after:
                continue
            is_turn = turn == turn_of.get(block, 0) and not block.rests
            if (is_turn or not block.solved) and block.mass > 0:
                due.append(block)
        return due

    def _turns(self, placed: PlacedBlocks, every: int) -> Mapping[Block, int]:
        """Return the step of the interval at which each block is solved, spread over it."""
        # Not by the placement: a model that changes has new blocks, perhaps in an equal one.
        if self._last_turns_for != (placed, every):
            self._last_turns_for = (placed, every)
            numbers = turns(placed.placement, every)
            self._last_turns = dict(zip(placed.blocks, numbers, strict=True))
        return self._last_turns


def mismatch(statistics_every: int, solve_every: int) -> str | None:
    """Return how two intervals conflict, with the nearest ones that fit; None if they fit."""
    if solve_every % statistics_every == 0 or solve_every == NEVER:
        return None
    if solve_every < statistics_every:
        return (
            f"solve_every={solve_every} is less than statistics_every={statistics_every}, so that "
            f"most solves find no new statistics; pass solve_every={statistics_every}, or "
            f"statistics_every={solve_every}"
        )
    below = solve_every // statistics_every * statistics_every
    # The oldest statistics that any solve finds, over all its steps.
    age = statistics_every - math.gcd(solve_every, statistics_every)
    return (
        f"solve_every={solve_every} is not a multiple of statistics_every={statistics_every}, so "
        f"solves use statistics that are up to {age} step(s) old; pass solve_every={below} or "
        f"solve_every={below + statistics_every}"
    )
