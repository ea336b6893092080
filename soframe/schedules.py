"""Hyper-parameters as constants or callables of the step, and the intervals of the step.

Every schedule is called with the number of completed ``step()`` calls: 0 for the first. Values are
checked when they are used, so that a schedule that runs out of its range is named at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

Schedule = float | Callable[[int], float]
Interval = int | Callable[[int], int]


@dataclass(frozen=True)
class Scheduled:
    """A hyper-parameter with the range that it must stay in.

    Attributes:
        name: The setting's name, for errors.
        value: A constant, or a callable of the step.
        low: Lower bound.
        high: Upper bound (exclusive).
        open_low: Whether the lower bound itself is excluded.
    """

    name: str
    value: Schedule
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False

    def __post_init__(self) -> None:
        if not callable(self.value):
            self._check(self.value)

    def _check(self, value: object) -> float:
        real = isinstance(value, Real) and not isinstance(value, bool)
        number = float(value) if real else math.nan  # type: ignore[arg-type]
        if not self.low <= number < self.high or (self.open_low and number == self.low):
            bracket = "(" if self.open_low else "["
            raise ValueError(
                f"{self.name} must be a number in {bracket}{self.low}, {self.high}) "
                f"or a callable of the step that returns one, not {value!r}"
            )
        return number

    def at(self, step: int) -> float:
        """Return the value at a step.

        Args:
            step: The number of completed steps.

        Returns:
            The value.

        Raises:
            ValueError: If a callable returns a value out of range.
        """
        return self._check(self.value(step) if callable(self.value) else self.value)


@dataclass(frozen=True)
class Every:
    """An interval in steps: due when the step is a multiple of it.

    Attributes:
        name: The setting's name, for errors.
        value: A positive integer, or a callable of the step that returns one.
    """

    name: str
    value: Interval

    def __post_init__(self) -> None:
        if not callable(self.value):
            self._check(self.value)

    def _check(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(
                f"{self.name} must be a positive integer or a callable of the step that returns "
                f"one, not {value!r}"
            )
        return int(value)

    def due(self, step: int) -> bool:
        """Return whether the step is due.

        Args:
            step: The number of completed steps.

        Returns:
            True at step 0 and at every multiple of the interval.
        """
        return step % self._check(self.value(step) if callable(self.value) else self.value) == 0
