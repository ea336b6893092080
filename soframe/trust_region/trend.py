"""Whether the objective falls on batches that no step has seen, and what that leaves of a length.

A batch that can be fitted by itself, as by its own rows of embeddings, gives a good verdict on
every step that was made from it, however much is lost on the others. The next batches tell: their
losses before their own steps are samples of the mean loss, and are there anyway. So the mean of
some losses is held against that of earlier ones, in units of the standard error. Where it has risen
the share of the length that steps take is halved; where it has fallen that share grows again, up to
one.

The earlier losses are those of the last time that a difference showed. So progress that is slow
against the noise adds up until it shows, and where nothing shows nothing changes: a plateau is no
evidence against a length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WINDOW = 20
"""Losses in a mean."""

ERRORS = 2.0
"""Standard errors of a difference that shows."""

SHORTER, LONGER = 0.5, 1.25
"""What multiplies the share after a rise, and after a fall: it stays where three falls follow each
rise, since ``1.25^3`` is about two."""

SAID = "the loss rose on fresh batches: lengths are halved"

NUMBERS = ("share", "count", "mean", "squares")


class Trend:
    """Compares the mean of the last losses with an earlier one.

    Attributes:
        share: Of the length that the model has, what steps take.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._count = 0
        self._mean = self._squares = 0.0
        self._earlier: tuple[float, float] | None = None

    def learn(self, loss: float) -> bool:
        """Take note of a loss.

        Args:
            loss: Finite; of a batch before the step that is made from it.

        Returns:
            Whether there are enough for a verdict.
        """
        self._count += 1
        off = loss - self._mean
        self._mean += off / self._count
        self._squares += off * (loss - self._mean)  # Welford's: losses may differ by little
        return self._count == WINDOW

    def judge(self, penalty: float) -> bool:
        """Compare the mean of the last losses with the earlier one, and begin anew.

        Args:
            penalty: What the objective has besides the loss.

        Returns:
            Whether it rose, so that steps are to be shorter.
        """
        now = self._mean + penalty, self._squares / (WINDOW * (WINDOW - 1))
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        if self._earlier is None:
            self._earlier = now
            return False
        change = now[0] - self._earlier[0]
        if not abs(change) > ERRORS * math.sqrt(now[1] + self._earlier[1]):
            return False
        self._earlier = now
        self.share = min(1.0, self.share * (SHORTER if change > 0 else LONGER))
        return change > 0

    def state(self) -> dict[str, Any]:
        """Return what `load` needs."""
        return {
            "share": self.share,
            "count": float(self._count),
            "mean": self._mean,
            "squares": self._squares,
            "earlier": None if self._earlier is None else [*self._earlier],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state: What `state` returned.
        """
        self.share, self._count = state["share"], int(state["count"])
        self._mean, self._squares = state["mean"], state["squares"]
        earlier = state["earlier"]
        self._earlier = None if earlier is None else (earlier[0], earlier[1])


def check(state: Any) -> None:
    """Check that `Trend.load` can take a state.

    Args:
        state: What `Trend.state` returned, perhaps in another run.

    Raises:
        ValueError: If it is damaged.
    """
    good = isinstance(state, Mapping) and set(state) == {*NUMBERS, "earlier"}
    if good:
        earlier = state["earlier"]
        good = earlier is None or (isinstance(earlier, list) and len(earlier) == 2)
        numbers = [*(state[name] for name in NUMBERS), *(earlier or [])]
        good = good and all(isinstance(n, float) and math.isfinite(n) for n in numbers)
    if not good:
        raise ValueError(f"the state is damaged: the trend of the losses is {state!r}")
