"""Losses that tell that the last update was too long.

On a few samples the quadratic model is exact at every single batch, so the damping falls, and a
step that suits one batch may ruin the next. The ratio of reductions, which is measured on the
batch of the step, does not see that; the next loss does, and costs nothing.
"""

from __future__ import annotations

from soframe.checks.numbers import is_number

WINDOW = 10
"""Losses that are remembered."""

EARLY = 2.0
"""By how much the limit is wider while there are fewer: the largest of a few is no large one."""


class LossWatch:
    """Compares each loss with those of the last steps.

    Args:
        limit: How many times as large as the largest of these a loss may be; None for no limit.

    Raises:
        ValueError: If it is not above 1.
    """

    def __init__(self, limit: float | None) -> None:
        if limit is not None and not (is_number(limit) and limit > 1):
            raise ValueError(f"max_increase must be above 1, or None, not {limit!r}")
        self._limit = limit
        self._losses: list[float] = []

    def rises(self, loss: float, *, undoable: bool) -> bool:
        """Return whether an update is to be undone; if it is not, remember the loss.

        Args:
            loss: Finite. Where all of the last were negative they have no scale, and no limit.
            undoable: Whether there is one. Data that have changed for good are no reason to undo
                more than one.
        """
        most = max(self._losses, default=0.0)
        wider = 1.0 if len(self._losses) == WINDOW else EARLY
        if undoable and self._limit is not None and 0 < most * self._limit * wider < loss:
            return True
        self._losses = [*self._losses, loss][-WINDOW:]
        return False

    def state(self) -> list[float]:
        """Return what `load` needs."""
        return list(self._losses)

    def load(self, state: list[float]) -> None:
        """Continue from a state.

        Args:
            state: What `state` returned.
        """
        self._losses = list(state)
