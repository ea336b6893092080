"""Hyper-parameters as constants or callables of the step, and the intervals of the step.

Every schedule is called with the number of completed ``step()`` calls: 0 for the first. Values are
checked when they are used, so that a schedule that runs out of its range is named at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Generic, Literal, TypeVar

from soframe.checks.values import is_integer

Schedule = float | Callable[[int], float]
Interval = int | Callable[[int], int]
SolveInterval = Interval | Literal["demand"]

NEVER = 2**53
"""The interval of ``solve_every="demand"``, longer than any training."""


N = TypeVar("N", int, float)


@dataclass(frozen=True)
class _Setting(Generic[N]):
    """A number that is constant or a callable of the step."""

    name: str  # of the setting, for errors
    value: N | Callable[[int], N]

    def __post_init__(self) -> None:
        if not callable(self.value):
            object.__setattr__(self, "value", self._number(self.value))

    def _number(self, value: object) -> N:
        """Return a value as a number; raise a ValueError if it is out of range."""
        raise NotImplementedError

    def at(self, step: int) -> N:
        """Return the value after a number of completed steps; an error if it is out of range."""
        if not callable(self.value):  # checked before
            return self.value
        try:
            value = self.value(step)
        except TypeError as error:
            # Errors of the callable itself pass through.
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise
            raise TypeError(
                f"{self.name} must be a number or a callable of the step, and {self.value!r} "
                f"cannot be called with one: {error}"
            ) from error
        return self._number(value)


@dataclass(frozen=True)
class Scheduled(_Setting[float]):
    """A setting in ``[0, high)``, or ``(0, high)``: constant or a callable of the step."""

    high: float = math.inf
    open_low: bool = False

    def _number(self, value: object) -> float:
        number = math.nan
        if not isinstance(value, bool) and isinstance(value, Real):
            with suppress(OverflowError):  # an integer that no float can hold
                number = float(value)
        if not 0 <= number < self.high or (self.open_low and number == 0):
            bracket = "(" if self.open_low else "["
            raise ValueError(
                f"{self.name} must be a number in {bracket}0.0, {self.high}) "
                f"or a callable of the step that returns one, not {value!r}"
            )
        return number


@dataclass(frozen=True)
class Every(_Setting[int]):
    """An interval in steps, constant or a callable of the step."""

    def _number(self, value: object) -> int:
        if not is_integer(value, 1):
            raise ValueError(
                f"{self.name} must be a positive integer or a callable of the step that returns "
                f"one, not {value!r}"
            )
        return int(value)

    def due(self, step: int) -> bool:
        """Return whether a step is due: step 0 and every multiple of the interval."""
        return step % self.at(step) == 0


@dataclass(frozen=True)
class WarmInterval:
    """An interval that is shorter at first: for ``statistics_every`` and ``solve_every``.

    Attributes:
        interval: The interval from ``steps`` on.
        steps: How long it is ``first``.
        first: The interval until then.
    """

    interval: int
    steps: int
    first: int = 1

    def __post_init__(self) -> None:
        _require_positive(self, "interval", "first")

    def __call__(self, step: int) -> int:
        """Return the interval after a number of completed steps."""
        return self.first if step < self.steps else self.interval


@dataclass(frozen=True)
class GrowingInterval:
    """An interval that doubles as training goes on, up to a last one.

    The curvature changes fast at first and slowly later, roughly in proportion to the steps taken:
    with this interval it is never older than ``age`` times the step. Powers of two divide each
    other, so that every doubling leaves out every other turn and delays none.

    Attributes:
        last: The largest interval, a power of two.
        age: The largest age, as a share of the completed steps.
    """

    last: int = 64
    age: float = 0.1

    def __post_init__(self) -> None:
        _require_positive(self, "last")
        if self.last & (self.last - 1):
            raise ValueError(f"GrowingInterval: last must be a power of two, not {self.last}")
        if not 0 < self.age <= 1:
            raise ValueError(f"GrowingInterval: age must be in (0, 1], not {self.age!r}")

    def __call__(self, step: int) -> int:
        """Return the interval after a number of completed steps."""
        longest = max(1, math.floor(self.age * step))
        return int(min(self.last, 2 ** (longest.bit_length() - 1)))


@dataclass(frozen=True)
class Falling:
    """A number that falls by a factor at every step, down to a last one.

    ``max(last, first * factor^step)``, such as the default damping.

    Attributes:
        first: The number at the first step.
        last: The least.
        factor: The factor of a step, in (0, 1).
    """

    first: float
    last: float
    factor: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.last <= self.first < math.inf:
            raise ValueError(
                f"Falling: needs 0 < last <= first, finite, not {self.last!r} and {self.first!r}"
            )
        if not 0 < self.factor < 1:
            raise ValueError(f"Falling: factor must be in (0, 1), not {self.factor!r}")

    def __call__(self, step: int) -> float:
        """Return the number after so many completed steps."""
        return max(self.last, self.first * self.factor**step)


@dataclass(frozen=True)
class GrowingBatch:
    """A batch size that grows exponentially (Martens and Grosse, 2015, section 13).

    ``first * (full / first)^(step / steps)``, up to ``full``: small batches estimate the gradient
    well enough at first, when it is large. (There steps are counted from 1, ``m_1 = 1000``, and
    ``m_500`` is the whole training set.) Use it wherever batches are drawn::

        size = batch_size(step)
        rows = torch.randperm(len(inputs))[:size]

    Attributes:
        first: The first batch.
        full: The last one, perhaps all examples.
        steps: The steps after which it is reached.
    """

    first: int
    full: int
    steps: int

    def __post_init__(self) -> None:
        _require_positive(self, "first", "full", "steps")
        if self.first > self.full:
            raise ValueError(
                f"GrowingBatch: first must not be above full, not {self.first} and {self.full}"
            )

    def __call__(self, step: int) -> int:
        """Return the batch size after a number of completed steps."""
        if step >= self.steps:
            return self.full
        growth: float = (self.full / self.first) ** (step / self.steps)
        return round(self.first * growth)


def decay_of(value: Schedule | Literal["mean"]) -> Schedule:
    """Return the decay of a setting: "mean" weighs all statistics steps alike, to 12 digits."""
    if value == "mean":
        return 1 - 2.0**-40
    return value


def interval_of(value: SolveInterval) -> Interval:
    """Return the interval of ``solve_every``: with "demand", no step is its turn."""
    if not isinstance(value, str):
        return value
    if value != "demand":
        raise ValueError(
            f"solve_every must be a positive integer, a callable of the step that returns one, or "
            f"'demand', not {value!r}"
        )
    return NEVER


def sample_decay(batch_size: Callable[[int], int]) -> Callable[[int], float]:
    """Return a decay under which all samples so far have the same weight, however batches grow.

    The running factors average the means of batches, one per statistics step, regardless of their
    sizes. With the decay ``1 - n_k / (n_0 + ... + n_k)`` of this schedule they are the
    mean over all samples instead, and forget nothing. It is meant for ``statistics_every=1``.

    Args:
        batch_size: The batch size of a step, for example a `GrowingBatch`.

    Returns:
        A callable of the step, for ``decay=``.
    """
    totals = [0]  # the samples before each step

    def decay(step: int) -> float:
        while len(totals) <= step + 1:
            totals.append(totals[-1] + batch_size(len(totals) - 1))
        return 1 - batch_size(step) / totals[step + 1]

    return decay


def _require_positive(schedule: object, *names: str) -> None:
    for name in names:
        value = getattr(schedule, name)
        if not is_integer(value, 1):
            raise ValueError(
                f"{type(schedule).__name__}: {name} must be a positive integer, not {value!r}"
            )
