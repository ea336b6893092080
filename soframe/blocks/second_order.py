"""The second-order data of a block on this rank: what solvers have made of its factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Solved:
    """What a block preconditions with on this rank; see `soframe.Preconditioner.snapshot`.

    Attributes:
        data: Factor name -> tensor name -> tensor.
        damping: The block's own damping; None for the preconditioner's.
        failed: Whether a factor could not be solved since the last snapshot.
    """

    data: Mapping[str, Mapping[str, Tensor]]
    damping: float | None
    failed: bool


class SecondOrderData(Mapping[str, Mapping[str, Tensor]]):
    """Factor name -> tensor name -> tensor; empty where this rank has none.

    Tensors never change in place: what others keep of former data stays what it was.

    Attributes:
        solved: The factors whose data gradient workers have: the same on every rank.
        failed: Those that could not be solved since the last snapshot: likewise.
        failures: How often each factor could not be solved so far: likewise.
        damping: In place of the preconditioner's; None for that. The same on every rank.
    """

    def __init__(self) -> None:
        self._data: dict[str, Mapping[str, Tensor]] = {}
        self.solved: set[str] = set()
        self.failed: set[str] = set()
        self.failures: Counter[str] = Counter()
        self.damping: float | None = None

    def __getitem__(self, factor: str) -> Mapping[str, Tensor]:
        return self._data[factor]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def put(self, data: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Let factors have new data; others keep theirs.

        Args:
            data: Factor name -> tensor name -> tensor.
        """
        self._data.update(data)

    def change(self, factor: str, tensors: Mapping[str, Tensor]) -> None:
        """Let some tensors of a factor's data be others.

        Args:
            factor: The factor, which has data.
            tensors: Those that change, by name.
        """
        self._data[factor] = {**self._data[factor], **tensors}

    def replace(self, data: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Have these data and no others.

        Args:
            data: Factor name -> tensor name -> tensor.
        """
        self._data = dict(data)

    def take(self, factor: str) -> Mapping[str, Tensor] | None:
        """Return the data of a factor, which this rank has no longer; None where it had none.

        Args:
            factor: The factor.
        """
        return self._data.pop(factor, None)

    def succeed(self, factor: str) -> None:
        """Note that gradient workers have the data of a factor.

        Args:
            factor: The factor.
        """
        self.solved.add(factor)

    def fail(self, factor: str) -> None:
        """Note that a factor could not be solved.

        Args:
            factor: The factor.
        """
        self.failed.add(factor)
        self.failures[factor] += 1

    def snapshot(self) -> Solved:
        """Return what this is, and begin to note failures anew."""
        failed = bool(self.failed)
        self.failed.clear()
        return Solved(dict(self), self.damping, failed)

    def restore(self, solved: Solved) -> None:
        """Have the data and the damping of a snapshot."""
        self.replace(solved.data)
        self.damping = solved.damping

    def damp(self, damping: float | None) -> None:
        """Damp the block with a damping of its own from now on.

        Args:
            damping: The damping, the same on every rank; None for the preconditioner's.
        """
        self.damping = damping

    def load(self, data: Mapping[str, Mapping[str, Tensor]], solved: set[str]) -> None:
        """Begin with what a state says.

        Args:
            data: What this rank is to have.
            solved: The factors whose data gradient workers have.
        """
        self.replace(data)
        self.solved = set(solved)

    def continue_from(self, before: SecondOrderData, *, same: bool) -> None:
        """Go on with the data of a former block of the same parameters.

        Args:
            before: Its data.
            same: Whether the block has the shape that it had; otherwise it is solved anew.
        """
        self.failures = before.failures
        if same:
            self.load(before, before.solved)
