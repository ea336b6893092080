"""The strategy: a pure function from work and ranks to a placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockWork


class Strategy(ABC):
    """Maps blocks to ranks, from shapes and rank numbers only: no process group, no tensors.

    A strategy is a pure function, so the same placement is executed, priced and printed.
    """

    @abstractmethod
    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        """Return the placement: owners, gradient workers and receivers of every block.

        Args:
            work: The blocks, in the same order on every rank.
            ranks: The number of ranks.

        Returns:
            The placement; equal arguments must give equal placements, on every rank.
        """
