"""Blocks with their places and their stacks, for the phases of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from soframe.blocks.block import Block, Stack
from soframe.comm.base import Backend
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement

log = logging.getLogger("soframe")


@dataclass(frozen=True, eq=False)
class PlacedBlocks:
    """The blocks of a model, their placement on ranks, and the backend that sends their tensors.

    Iterate for pairs of block and place.
    """

    blocks: Sequence[Block]
    placement: Placement  # the owner, gradient workers and receivers of each block
    backend: Backend  # the collectives between them
    stacks: tuple[Stack, ...] = field(init=False, repr=False)  # the blocks that are alike, batched
    captured: tuple[Block, ...] = field(init=False, repr=False)  # with statistics of calls
    solvable: tuple[Block, ...] = field(init=False, repr=False)  # with solved factors
    errors: list[Exception] = field(default_factory=list, repr=False)  # the first of this rank
    rank: int = field(init=False, repr=False)  # this rank

    def __post_init__(self) -> None:
        blocks, places = self.blocks, self.placement.blocks
        stacks: list[Stack] = []
        for members in self.placement.stacks:
            of_stack = [blocks[index] for index in members]
            stacks.append(Stack(of_stack, [places[index] for index in members]))
        object.__setattr__(self, "rank", self.backend.rank)
        object.__setattr__(self, "stacks", tuple(stacks))
        object.__setattr__(self, "captured", tuple(b for b in blocks if b.captured))
        object.__setattr__(self, "solvable", tuple(b for b in blocks if b.tensors))

    def __iter__(self) -> Iterator[tuple[Block, BlockPlacement]]:
        return zip(self.blocks, self.placement.blocks, strict=True)

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
            # Now too: after the last step there is no status.
            log.error("soframe: rank %d", self.rank, exc_info=error)
            self.errors.append(error)
