"""The outcome of steps: updates that are taken or skipped, and when the host knows it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from soframe.blocks.block import Block
from soframe.step.magnitude import MODERATE, Flags
from soframe.step.updates import take_back

COUNTERS = ("skipped_updates", "skipped_statistics", "retried_solves", "failed_solves")
MANY = 10
"""Number of skipped updates in a row after which a rank warns."""


class Outcome:
    """Whether the update of the last step was taken, and counts of skipped and failed work.

    The host may read the flags of a step later: then the device has selected the new tensors.

    Args:
        rank: This rank.

    Attributes:
        good: Whether the last step's update was taken, a bool scalar on the device; None if the
            host knows.
        moderate: Whether the last gradients whose flags the host has read were moderate.
        counts: Counts by name, which other parts of a step increase.
    """

    def __init__(self, rank: int) -> None:
        self.good: Tensor | None = None
        self.moderate = True
        self._rank, self._in_a_row, self._taken = rank, 0, False
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._unread: tuple[Flags, Sequence[Block]] | None = None

    @property
    def taken(self) -> bool:
        """Whether the update of the last step was taken."""
        self.settle()
        return self._taken

    @property
    def counters(self) -> dict[str, int]:
        """The counts, the last step included."""
        self.settle()
        return self.counts

    def begin(self, taken: bool) -> None:
        """Note the outcome of a step that the host knows, or assumes until it has read it."""
        self._taken = taken

    def leave(self, flags: Flags, blocks: Sequence[Block]) -> None:
        """Leave the flags of a step for later; ``blocks`` have an update."""
        self.good, self._unread = flags.moderate, (flags, blocks)

    def settle(self) -> None:
        """Read the flags that were left, and take a skipped update back."""
        if self._unread is None:
            return
        (flags, blocks), self._unread, self.good = self._unread, None, None
        own, total = flags.read()
        moderate = total < MODERATE  # not if it is NaN
        if not moderate:
            take_back(blocks)
            self._taken = False
        self.judge(skipped=not moderate, moderate=moderate, own=not own < MODERATE)

    def judge(self, *, skipped: bool, moderate: bool, own: bool) -> None:
        """Count an update that is skipped; ``own`` if gradients of this rank are a cause."""
        self.moderate = moderate
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        self.counts["skipped_updates"] += skipped
        # Only the ranks with such gradients warn: the cause is in their own data.
        if self._in_a_row == MANY and own:
            warnings.warn(
                f"soframe: rank {self._rank} had gradients that are not finite in {MANY} "
                f"steps in a row, whose updates were skipped on all ranks: look at the loss and "
                f"the data of this rank; counters['skipped_updates'] counts them",
                stacklevel=8,
            )

    def load(self, counters: dict[str, int]) -> None:
        """Continue from saved counts; flags that were left do not matter any more."""
        self.good = self._unread = None
        self.counts = {**dict.fromkeys(COUNTERS, 0), **counters}
