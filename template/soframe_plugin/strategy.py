"""A strategy under which one rank solves and preconditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import soframe
from soframe.strategies import BlockPlacement, BlockWork, Placement


@dataclass(frozen=True)
class FirstRank(soframe.Strategy):
    """The first rank does everything, and sends updates to the others."""

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        """Return who owns, holds and sends each block's data."""
        blocks = tuple(
            BlockPlacement(
                block=block.name,
                owners=(0,) * len(block.factors),
                gradient_workers=(0,),
                sources=(0,) * ranks,
            )
            for block in work
        )
        return Placement("first-rank", ranks, tuple(work), blocks)
