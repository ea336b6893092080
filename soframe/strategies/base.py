"""The strategy: a pure function from work and ranks to a placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockWork


class Strategy(ABC):
    """Decides who does what. No process group, no tensors: shapes and rank numbers only."""

    @abstractmethod
    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        """Return the placement.

        Args:
            work: The blocks, in the same order on every rank.
            ranks: The number of ranks.

        Returns:
            The placement; it must be the same whenever the arguments are.
        """
