"""Solving in the background: what is due is solved while training goes on, and used later.

A solve of step s starts from what is there at step s: copies of the running factors, the damping,
the last second-order data. It *lands*, which means that its results are shared and put to use, at
the beginning of preconditioning

- in step s + n, for ``background=n``: the same bits in every run, however long the solves take;
- in the first step that finds all ranks' owners done, for ``background="ready"``;
- earlier in either case where one of its blocks is due again, or somebody asks for the state.

Every rank lands the same solves at the same steps, so that collectives keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from torch import Tensor

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.gradients.applying import Directions
from soframe.solving.refresh import follow
from soframe.solving.solution import Solution, update
from soframe.solving.worker import Worker


@dataclass
class _UnderWay:
    """A solution that has begun, and the step at which it lands at the latest."""

    solution: Solution
    lands: float


class Background:
    """When solves are put to use, and those that are under way: the same on every rank.

    Args:
        when: After how many steps, or ``"ready"``; 0 to solve in the step.
        overlap: Whether there is a thread that solves; otherwise what begins is solved at once,
            and lands at the same step.

    Raises:
        TypeError: If ``when`` is neither an integer nor a string.
        ValueError: If it is negative, or another string.
    """

    def __init__(self, when: object, *, overlap: bool = True) -> None:
        remedy = (
            f"background must be 0 (factors are solved in the step), a positive number of steps "
            f"after which solves are put to use, or 'ready', not {when!r}"
        )
        if isinstance(when, bool) or not isinstance(when, Integral | str):
            raise TypeError(remedy)
        self._ready = when == "ready"
        self._steps = 0 if isinstance(when, str) else int(when)
        if self._steps < 0 or (isinstance(when, str) and not self._ready):
            raise ValueError(remedy)
        self._worker = Worker(beside=overlap)
        self._under_way: list[_UnderWay] = []

    def __repr__(self) -> str:
        return f"Background({'ready' if self._ready else self._steps})"

    @property
    def on(self) -> bool:
        """Whether anything is solved in the background."""
        return self._ready or self._steps > 0

    # -- what ranks agree on ----------------------------------------------------------------------

    def waits(self) -> list[float]:
        """Return what ranks add up and pass to `agree`: whether this one solves the oldest still.

        Returns:
            One number for ``"ready"``; none otherwise.
        """
        if not self._ready:
            return []
        return [float(bool(self._under_way) and not self._under_way[0].solution.finished)]

    def agree(self, waiting: Sequence[float]) -> None:
        """Take note of what ranks are ready for.

        Args:
            waiting: The added-up `waits` of all ranks.
        """
        if self._under_way and list(waiting) == [0.0]:
            self._under_way[0].lands = 0

    # -- the step ---------------------------------------------------------------------------------

    def update(
        self,
        placed: PlacedBlocks,
        due: Sequence[Block],
        *,
        damping: float,
        counters: dict[str, int],
        gradients: Callable[[], Mapping[Block, Tensor | None]],
        step: int | None = None,
        changed: Collection[Block] = (),
    ) -> Directions:
        """Land what lands, begin or solve what is due, and precondition.

        Args:
            placed: All blocks, with their places.
            due: Those to solve, the same on every rank.
            damping: The damping of this step, and of the solves that begin in it.
            counters: ``retried_solves`` and ``failed_solves`` are raised.
            gradients: See `soframe.solving.solution.update`.
            step: Completed steps; None to solve everything at once, between steps.
            changed: The blocks that have new statistics.

        Returns:
            See `soframe.solving.solution.update`, which raises what solvers raised in the
            background too.
        """
        now, later = self._split(due, step)
        landing = self._land(-1 if step is None else step, due)
        followers = _blocks(landing).union(changed).difference(now)
        follow(placed, followers)
        self._begin(placed, later, damping, step)
        return update(
            placed, now, damping=damping, counters=counters, gradients=gradients, landing=landing
        )

    def solve_after(
        self,
        placed: PlacedBlocks,
        due: Sequence[Block],
        *,
        damping: float,
        counters: dict[str, int],
        step: int,
    ) -> None:
        """Solve what is due once the directions of a step are made, or begin to.

        Args:
            placed: All blocks, with their places.
            due: Those to solve, the same on every rank.
            damping: The damping of this step.
            counters: ``retried_solves`` and ``failed_solves`` are raised.
            step: Completed steps.
        """
        if not due:
            return
        now, later = self._split(due, step)
        for solution in self._land(-1, due):
            solution.conclude(counters)
        self._begin(placed, later, damping, step)
        solution = Solution(placed, now, damping)
        solution.deliver()
        solution.conclude(counters)

    def _split(self, due: Sequence[Block], step: int | None) -> tuple[list[Block], list[Block]]:
        """Return what is solved at once, and what in the background."""
        beside = self.on and step is not None
        now = [block for block in due if not (beside and block.solved)]
        return now, [block for block in due if beside and block.solved]

    def _begin(
        self, placed: PlacedBlocks, due: Sequence[Block], damping: float, step: int | None
    ) -> None:
        if due and step is not None:
            solution = Solution(placed, due, damping, self._worker)
            lands = math.inf if self._ready else step + self._steps
            self._under_way.append(_UnderWay(solution, lands))

    def _land(self, step: float, due: Collection[Block] = ()) -> list[Solution]:
        """Deliver what lands at a step, and what has a block that is about to be solved again."""
        landing: list[Solution] = []
        staying: list[_UnderWay] = []
        for one in self._under_way:
            if one.lands <= step or any(block in one.solution.blocks for block in due):
                landing.append(one.solution)
            else:
                staying.append(one)
        self._under_way = staying
        for solution in landing:
            solution.deliver()
        for solution in landing:
            for block in solution.blocks:
                if block in due or block.follows:  # their data are about to be looked at
                    solution.arrive(block)
        return landing

    # -- between steps ----------------------------------------------------------------------------

    def land(self, placed: PlacedBlocks, counters: dict[str, int], what: str) -> None:
        """Put everything to use that is under way; every rank must call.

        Args:
            placed: All blocks, with their places.
            counters: ``retried_solves`` and ``failed_solves`` are raised.
            what: What the ranks are about to do, for the error where one does not come.
        """
        if not self._under_way:
            return
        placed.backend.meet(what)
        landing = self._land(math.inf)
        for solution in landing:
            solution.conclude(counters)
        follow(placed, _blocks(landing))

    def drop(self) -> None:
        """Forget what is under way; every rank does."""
        under_way, self._under_way = self._under_way, []
        for one in reversed(under_way):
            one.solution.drop()

    def close(self) -> None:
        """Forget what is under way, and end the thread."""
        self.drop()
        self._worker.close()

    def held(self) -> list[Tensor] | None:
        """Return what this rank holds for solves under way; None without a background.

        Returns:
            Copies of factors, and results that are not in use yet.
        """
        if not self.on:
            return None
        return [tensor for one in self._under_way for tensor in one.solution.held()]


def _blocks(landing: Sequence[Solution]) -> set[Block]:
    return {block for solution in landing for block in solution.blocks}
