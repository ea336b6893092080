"""Blocks with their places and their stacks, for the phases of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

from soframe.blocks.block import Block, Stack
from soframe.comm.base import Backend
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement

log = logging.getLogger("soframe")


@dataclass(eq=False)
class PlacedBlocks:
    """The blocks of a model, their placement on ranks, and the backend that sends their tensors.

    Iterate for pairs of block and place.
    """

    blocks: Sequence[Block]
    placement: Placement  # the owner, gradient workers and receivers of each block
    backend: Backend  # the collectives between them
    errors: list[Exception] = field(default_factory=list, repr=False)  # the first of this rank

    def __post_init__(self) -> None:
        self.rank = self.backend.rank  # this rank
        self._pairs = tuple(zip(self.blocks, self.placement.blocks, strict=True))
        stacks: list[Stack] = []
        for members in self.placement.stacks:
            blocks = [self.blocks[index] for index in members]
            stacks.append(Stack(blocks, [self.placement.blocks[index] for index in members]))
        self.stacks = tuple(stacks)  # the blocks that are alike, batched
        self.captured = tuple(b for b in self.blocks if b.captured)  # with statistics of calls
        self.solvable = tuple(b for b in self.blocks if b.tensors)  # with solved factors

    def __iter__(self) -> Iterator[tuple[Block, BlockPlacement]]:
        return iter(self._pairs)

    def trained(self) -> PlacedBlocks:
        """Return the blocks that are trained, within the stacks of all; all if none is."""
        trained = copy(self)
        pairs = tuple([(block, place) for block, place in self if not block.frozen])
        if pairs:
            trained._pairs = pairs
        trained.blocks = [block for block, _ in trained._pairs]
        return trained

    def members(self, blocks: Sequence[Block]) -> dict[Stack, tuple[int, ...]]:
        """Return the stacks of some blocks, in the order of all stacks, with their members."""
        chosen = set(blocks)
        members_of: dict[Stack, tuple[int, ...]] = {}
        for stack in self.stacks:
            members = tuple([i for i, block in enumerate(stack.blocks) if block in chosen])
            if members:
                members_of[stack] = members
        return members_of

    def keep(self, error: Exception, stack: Stack) -> None:
        """Raise an error of the middle of a step; with other ranks keep it: they go on."""
        if self.backend.alone:
            raise error
        if not self.errors:
            names = ", ".join(block.name for block in stack.blocks)
            error.add_note(
                f"in the step before, of {names}: weights may differ between ranks since, so load "
                f"the last checkpoint"
            )
            # Now too, since no status follows the last step.
            log.error("soframe: rank %d", self.rank, exc_info=error)
            self.errors.append(error)
