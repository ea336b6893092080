"""Damping policies: how much the quadratic model is distrusted, and how that changes.

A policy is a registered component. It is asked for the damping at every step, and told the
reduction ratio ``rho``, the measured over the predicted change of the loss, at steps where that was
measured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from soframe.registry import register
from soframe.schedules import Schedule, Scheduled


class DampingPolicy(ABC):
    """The damping over time.

    Attributes:
        interval: Steps between measurements of the reduction ratio; 0 for never.
    """

    interval: int = 0

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the damping of a step.

        Args:
            step: Completed steps.

        Returns:
            A positive number.
        """

    def observe(self, ratio: float) -> None:  # noqa: B027 (optional)
        """Take note of a reduction ratio.

        Args:
            ratio: Measured over predicted reduction of the loss; minus infinity if the loss is not
                finite.
        """

    def state(self) -> dict[str, float]:
        """Return what `load` needs."""
        return {}

    def load(self, state: Mapping[str, float]) -> None:  # noqa: B027 (optional)
        """Continue from a state.

        Args:
            state: What `state` returned.
        """


@register("damping", "constant")
@dataclass
class ConstantDamping(DampingPolicy):
    """A constant, or a callable of the step.

    Attributes:
        value: The damping.
    """

    value: Schedule = 1e-2

    def __post_init__(self) -> None:
        self._scheduled = Scheduled("damping", self.value)

    def at(self, step: int) -> float:
        """See `DampingPolicy.at`."""
        return self._scheduled.at(step)


@register("damping", "levenberg-marquardt")
@dataclass
class LevenbergMarquardt(DampingPolicy):
    """Less damping where the model predicts well, more where it does not.

    Every ``interval`` steps the damping is multiplied by ``omega^interval`` if ``rho > 3/4`` and
    divided by it if ``rho < 1/4`` (Martens and Grosse, 2015, section 6.5).

    Attributes:
        initial: The damping to begin with.
        omega: The factor per step, below one.
        interval: Steps between measurements.
        low: The least damping.
        high: The largest damping.
    """

    initial: float = 10.0
    omega: float = 0.9
    interval: int = 5
    low: float = 1e-8
    high: float = 1e8

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 < self.low <= self.initial <= self.high < math.inf:
            raise ValueError(
                f"{name}: needs 0 < low <= initial <= high, not {self.low}, {self.initial}, "
                f"{self.high}"
            )
        if not 0 < self.omega < 1:
            raise ValueError(f"{name}: omega must be in (0, 1), not {self.omega}")
        if self.interval < 1:
            raise ValueError(f"{name}: interval must be at least 1, not {self.interval}")
        self._now = float(self.initial)

    def at(self, step: int) -> float:
        """See `DampingPolicy.at`."""
        return self._now

    def observe(self, ratio: float) -> None:
        """See `DampingPolicy.observe`."""
        factor = self.omega**self.interval
        if ratio > 0.75:
            self._now = max(self.low, self._now * factor)
        elif not ratio >= 0.25:  # written so that a NaN raises the damping
            self._now = min(self.high, self._now / factor)

    def state(self) -> dict[str, float]:
        """See `DampingPolicy.state`."""
        return {"now": self._now}

    def load(self, state: Mapping[str, float]) -> None:
        """See `DampingPolicy.load`."""
        self._now = float(state["now"])
