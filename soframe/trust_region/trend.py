"""Whether the average of the iterates gets better, and what that leaves of a length.

A batch that can be fitted by itself, as by its own rows of embeddings, gives a good verdict on
every step that was made from it, however much is lost on the others. And where gradients are noise
for the most part, steps of one length get no further than that length allows. Both show on batches
that no step has seen: on the next one, the average of now is held against the average of some steps
before. The two losses are of the same samples, so that what is noise in these cancels.

Steps become shorter where several such differences say that the average got worse, or where more
of them do not say that it got better; they become longer again, up to the model's own length, where
it did. Differences and their noise shrink with the steps, so that a fall of shorter steps shows as
well. Where batches come again within few epochs, the last steps have forgotten what earlier ones
fitted of a batch, so that the earlier average looks better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

APART = 30
"""Steps from one average to the next, at least."""

LEAST, MOST = 4, 10
"""Differences for a verdict, and for the verdict that the average did not get better."""

ERRORS = 1.0
"""Standard errors of their mean that show."""

SHORTER, LONGER = 0.5, 1.25
"""What multiplies the share after a rise, and after a fall: it stays where three falls follow each
rise, since ``1.25^3`` is about two."""

STALLED = 0.7
"""What multiplies it where neither shows."""

SAID = "the average got no better on fresh batches: lengths are shorter"

NUMBERS = ("share", "count", "mean", "squares", "at")


class Trend:
    """Collects by how much the loss of the average changes on batches that no step has seen.

    Attributes:
        share: Of the length that the model has, what steps take.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._at = -1.0
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        self._mean = self._squares = 0.0

    def due(self, step: int) -> bool:
        """Return whether it is time for the next average.

        Args:
            step: Completed steps.
        """
        return self._at < 0 or step - self._at >= APART

    def begin(self, step: int) -> bool:
        """Take note that the next difference is from the average of now.

        Args:
            step: Completed steps.

        Returns:
            Whether there was one before, so that there is a difference.
        """
        first, self._at = self._at < 0, float(step)
        return not first

    def learn(self, now: float, earlier: float, eps: float) -> bool:
        """Take note of a difference, and judge once there are enough.

        Args:
            now: The objective of the average, on a batch before its step.
            earlier: That of the earlier average, on the same batch.
            eps: The rounding of the loss: what differs by less says nothing.

        Returns:
            Whether steps are to be shorter.
        """
        change = now - earlier
        if math.isfinite(earlier) and not math.isfinite(now):
            return self._judge(SHORTER)
        if not abs(change) > eps * abs(earlier):  # nor for one that is not finite
            return False
        self._count += 1
        off = change - self._mean
        self._mean += off / self._count
        self._squares += off * (change - self._mean)  # Welford's
        if self._count < LEAST:
            return False
        error = ERRORS * math.sqrt(self._squares / (self._count * (self._count - 1)))
        if abs(self._mean) > error:
            return self._judge(SHORTER if self._mean > 0 else LONGER)
        return self._judge(STALLED) if self._count == MOST else False

    def _judge(self, factor: float) -> bool:
        self.share = min(1.0, self.share * factor)
        self._forget()
        return factor < 1

    def state(self) -> dict[str, float]:
        """Return what `load` needs."""
        return {
            "share": self.share,
            "count": float(self._count),
            "mean": self._mean,
            "squares": self._squares,
            "at": self._at,
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a state.

        Args:
            state: What `state` returned.
        """
        self.share, self._count, self._at = state["share"], int(state["count"]), state["at"]
        self._mean, self._squares = state["mean"], state["squares"]


def check(state: Any) -> None:
    """Check that `Trend.load` can take a state.

    Args:
        state: What `Trend.state` returned, perhaps in another run.

    Raises:
        ValueError: If it is damaged.
    """
    good = isinstance(state, Mapping) and set(state) == set(NUMBERS)
    if not good or not all(isinstance(n, float) and math.isfinite(n) for n in state.values()):
        raise ValueError(f"the state is damaged: the trend of the losses is {state!r}")
