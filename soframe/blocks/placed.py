"""Blocks with their places and their stacks, for the phases of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from soframe.blocks.block import Block
from soframe.blocks.stack import Stack
from soframe.comm.base import Backend
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement


@dataclass(frozen=True, eq=False)
class PlacedBlocks:
    """The blocks of a model, their placement on ranks, and the backend that sends their tensors.

    Iterate for pairs of block and place.

    Attributes:
        blocks: The blocks, in the placement's order.
        placement: The owner, gradient workers and receivers of each block.
        backend: The collectives between them.
        stacks: The blocks that are alike, batched.
    """

    blocks: Sequence[Block]
    placement: Placement
    backend: Backend
    stacks: tuple[Stack, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        blocks, places = self.blocks, self.placement.blocks
        stacks = [
            Stack([blocks[i] for i in members], [places[i] for i in members])
            for members in self.placement.stacks
        ]
        object.__setattr__(self, "stacks", tuple(stacks))

    def __iter__(self) -> Iterator[tuple[Block, BlockPlacement]]:
        return zip(self.blocks, self.placement.blocks, strict=True)

    def members(self, blocks: Sequence[Block]) -> dict[Stack, tuple[int, ...]]:
        """Return the stacks of some blocks, in the order of all stacks, with their members."""
        chosen = set(blocks)
        found = {s: tuple(i for i, b in enumerate(s.blocks) if b in chosen) for s in self.stacks}
        return {stack: members for stack, members in found.items() if members}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.backend.rank
