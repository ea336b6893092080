"""Blocks with their places: what the phases of a step hand on to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from soframe.blocks.block import Block
from soframe.blocks.history import History
from soframe.comm.base import Backend
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement


@dataclass(frozen=True, eq=False)
class PlacedBlocks:
    """The blocks of a model, who does what for each, and how tensors travel between them.

    Iterate for pairs of block and place.

    Attributes:
        blocks: The blocks, in the placement's order.
        placement: Who owns, preconditions and receives what.
        backend: How tensors travel.
        history: At which steps factors took statistics and were solved.
    """

    blocks: Sequence[Block]
    placement: Placement
    backend: Backend
    history: History = field(default_factory=History, repr=False)
    _places: dict[Block, BlockPlacement] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places = dict(zip(self.blocks, self.placement.blocks, strict=True))
        object.__setattr__(self, "_places", places)

    def __iter__(self) -> Iterator[tuple[Block, BlockPlacement]]:
        return iter(self._places.items())

    def place(self, block: Block) -> BlockPlacement:
        """Return who does what for a block.

        Args:
            block: The block.
        """
        return self._places[block]

    def of(self, blocks: Sequence[Block]) -> list[tuple[Block, BlockPlacement]]:
        """Return some blocks with their places.

        Args:
            blocks: The blocks.
        """
        return [(block, self._places[block]) for block in blocks]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.backend.rank
