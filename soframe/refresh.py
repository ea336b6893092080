"""Which blocks are solved at a step: all of them at once, or each at its turn of the interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from soframe.blocks import Block
from soframe.schedules import Every
from soframe.strategies.placement import Placement
from soframe.strategies.turns import turns


@dataclass
class Refresh:
    """When blocks are solved. What is due follows from the step and the placement alone.

    Attributes:
        every: The interval of solves.
        stagger: Whether each block has a turn of its own within the interval.
    """

    every: Every
    stagger: bool = False
    _placed: Placement | None = field(default=None, repr=False)
    _turns: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.stagger, bool):
            raise TypeError(f"stagger must be True or False, not {self.stagger!r}")

    def due(self, blocks: Sequence[Block], placement: Placement, step: int) -> list[Block]:
        """Return the blocks to solve, the same on every rank.

        Args:
            blocks: All blocks, in the placement's order.
            placement: Who owns what.
            step: Completed steps.

        Returns:
            Of the blocks that have statistics those whose turn it is, and those that have never
            been solved.
        """
        interval = self.every.at(step)
        turn = step % interval
        own = self._of(placement, interval) if self.stagger else (0,) * len(blocks)
        return [
            block
            for block, its in zip(blocks, own, strict=True)
            if block.mass > 0 and (turn == its or not block.solved)
        ]

    def _of(self, placement: Placement, interval: int) -> tuple[int, ...]:
        if self._placed is not placement:
            self._placed, self._turns = placement, {}
        if interval not in self._turns:
            self._turns[interval] = turns(placement, interval)
        return self._turns[interval]


def follow(blocks: Sequence[Block], due: Sequence[Block], placement: Placement, rank: int) -> None:
    """Let second-order data follow running factors that have changed, where solvers can do that.

    A factor's data follow where all gradient workers hold the factor, so that they stay the same
    on all of them; statistics that are not reduced yet are not waited for.

    Args:
        blocks: All blocks, in the placement's order.
        due: Those that are about to be solved.
        placement: Who holds what.
        rank: This rank.
    """
    for block, place in zip(blocks, placement.blocks, strict=True):
        if not block.solver.follows or block in due or not block.solved or block.pending > 0:
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
