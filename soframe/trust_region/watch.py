"""Losses that show that the last update was too long.

On a few samples the quadratic model is exact at every single batch, so the damping falls, and a
step that suits one batch may ruin the next. The reduction ratio, measured on the batch of the step,
does not detect that; the next loss does, at no cost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

WINDOW = 10
"""The number of remembered losses."""

EARLY = 2.0
"""The factor of the limit with fewer losses: the largest of a few may be small."""


class LossWatch:
    """Compares each loss with the last ones; ``limit`` times their largest is too much."""

    def __init__(self, limit: float | None) -> None:
        self._limit = math.inf if limit is None else limit
        if not self._limit > 1:
            raise ValueError(f"max_increase must be above 1, or None, not {limit!r}")
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def load(self, losses: Iterable[float]) -> None:
        """Remember these losses instead."""
        self.losses = deque(losses, maxlen=WINDOW)

    def rises(self, loss: float, *, undoable: bool) -> bool:
        """Return whether to undo the last update, if any; if not, remember the loss."""
        # Negative losses have no scale. Data that have changed for good are no reason to undo more
        # than one update.
        most = max(self.losses, default=0.0) * self._limit
        if len(self.losses) < WINDOW:
            most *= EARLY
        if undoable and 0 < most < loss:
            return True
        self.losses.append(loss)
        return False
