"""What the method of a block keeps from step to step, on its gradient workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


class Kept(Mapping[str, Tensor]):
    """The state of a method for one block, by name.

    It is empty on ranks that do not precondition the block, and before its first update.

    Attributes:
        updates: How many updates the method has made: the same on every rank.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.updates = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Let some tensors be others.

        Args:
            tensors: Those that change, by name.
        """
        self._tensors.update(tensors)

    def count(self) -> None:
        """Count an update; every rank must call."""
        self.updates += 1

    def take(self) -> dict[str, Tensor]:
        """Return the tensors, which this rank keeps no longer."""
        tensors, self._tensors = self._tensors, {}
        return tensors

    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Begin with what a state, or a former block, says.

        Args:
            tensors: What this rank is to keep.
            updates: How many updates there were.
        """
        self._tensors, self.updates = dict(tensors), updates
