"""Damping policies: the damping over time.

A policy is a registered component; `at` is called at every step. `TrustRegion` passes it the
reduction ratio ``rho``, the measured over the predicted change of the loss, at steps where that was
measured; `Preconditioner` measures none, and takes policies that need none.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from soframe.checks.values import is_number, require_integer
from soframe.registry import KINDS, describe, register
from soframe.schedules import Schedule, Scheduled
from soframe.solvers.base import Solver
from soframe.solvers.scaled import Relative

START = 3.0
"""Where the search for a first damping begins."""

APART = 10.0
"""The factor between the dampings that the search tries."""


class DampingPolicy(ABC):
    """The damping over time.

    Attributes:
        interval: Steps between measurements of the reduction ratio; 0 for never. A step that did
            harm, or with full batches reduced the loss by more than twice the prediction, is
            reported at once.
        per_block: Whether blocks have dampings of their own, so that the quadratic model has no
            single damping.
    """

    interval: int = 0
    per_block: ClassVar[bool] = False

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the damping of a step.

        Args:
            step: Completed steps.

        Returns:
            A positive number.
        """

    def solver(self, solver: Solver) -> Solver:
        """Return the solver of a block, or one around it that interprets the damping."""
        return solver

    def observe(self, ratio: float) -> None:  # noqa: B027 (optional)
        """Update the damping.

        Args:
            ratio: Measured over predicted reduction of the loss; minus infinity if the loss is not
                finite.
        """

    def restart(self) -> None:  # noqa: B027 (optional)
        """Forget every ratio, as an optimizer starts with a copy of the policy."""

    def to_be_measured(self) -> bool:
        """Return whether the initial damping is found by a search on the first batch."""
        return False

    def begin(self, damping: float) -> None:  # noqa: B027 (optional)
        """Start from the damping that the search has found."""

    def at_cap(self) -> bool:
        """Return whether the damping is at its upper bound."""
        return False

    def state(self) -> dict[str, float]:
        """Return the numbers that `load` restores."""
        return {}

    def load(self, state: Mapping[str, float]) -> None:  # noqa: B027 (optional)
        """Continue from the result of `state`."""


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
        return self._scheduled.at(step)


@register("damping", "relative")
@dataclass
class RelativeDamping(ConstantDamping):
    """A multiple of the mean eigenvalue of each block: ``value * tr(A) / n_A * tr(G) / n_G``.

    The step then does not change with the scale of the loss, of a layer's inputs or of its output
    gradients. Influence functions are computed with ``value = 0.1`` (Grosse et al., 2023);
    as a damping for training it is less common, and the value has to be tried. For `Preconditioner`
    alone: see `soframe.solvers.Relative`.

    Attributes:
        value: The multiple; a constant, or a callable of the step.
    """

    value: Schedule = 1e-1
    per_block: ClassVar[bool] = True

    def solver(self, solver: Solver) -> Solver:
        return Relative(solver)


@register("damping", "levenberg-marquardt")
@dataclass
class LevenbergMarquardt(DampingPolicy):
    """Less damping where the model predicts well, more where it does not.

    Every ``interval`` steps the damping is multiplied by ``omega^interval`` if ``rho > 3/4`` and
    divided by it if ``rho < 1/4`` (Martens and Grosse, 2015, section 6.5).

    Attributes:
        initial: The damping to begin with; None, the default, for the one whose step brings most
            on the first batch, looked for from `START` on in factors of `APART`.
        omega: The factor per step, below one.
        interval: Steps between measurements.
        low: The least damping.
        high: The largest damping.
    """

    initial: float | None = None
    omega: float = 0.8
    interval: int = 5
    low: float = 1e-8
    high: float = 1e8

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_integer(f"{name}: interval", self.interval, 1)
        initial = min(max(START, self.low), self.high) if self.initial is None else self.initial
        if not 0 < self.low <= initial <= self.high < math.inf:
            raise ValueError(
                f"{name}: needs 0 < low <= initial <= high, not {self.low}, {initial}, {self.high}"
            )
        if not 0 < self.omega < 1:
            raise ValueError(f"{name}: omega must be in (0, 1), not {self.omega}")
        self.restart()

    def restart(self) -> None:
        initial = START if self.initial is None else self.initial
        self._now = min(self.high, max(self.low, float(initial)))

    def to_be_measured(self) -> bool:
        return self.initial is None

    def begin(self, damping: float) -> None:
        self._now = min(self.high, max(self.low, damping))

    def at_cap(self) -> bool:
        return self._now >= self.high

    def at(self, step: int) -> float:
        return self._now

    def observe(self, ratio: float) -> None:
        factor = self.omega**self.interval
        if ratio > 0.75:
            self._now = max(self.low, self._now * factor)
        elif not ratio >= 0.25:  # written so that a NaN raises the damping
            self._now = min(self.high, self._now / factor)

    def state(self) -> dict[str, float]:
        return {"now": self._now}

    def load(self, state: Mapping[str, float]) -> None:
        self._now = float(state["now"])


DampingChoice = Schedule | str | type[DampingPolicy] | DampingPolicy
"""A number, a callable of the step, or the name, class or instance of a policy."""


def adopted(policy: DampingPolicy) -> DampingPolicy:
    """Return a copy of a policy that starts anew, so that optimizers share no state."""
    fresh = copy.copy(policy)
    for name, value in vars(fresh).items():
        if isinstance(value, list | dict | set | deque):  # else both would write to one object
            vars(fresh)[name] = copy.copy(value)
    fresh.restart()
    return fresh


def damping_policy(choice: DampingChoice) -> DampingPolicy:
    """Return a policy; numbers and callables of the step become a `ConstantDamping`."""
    registry = KINDS["damping"]
    if isinstance(choice, str) and choice not in registry.available():
        names = ", ".join(map(repr, sorted(registry.available())))
        raise ValueError(
            f"damping must be a number, a callable of the step that returns one, a policy or the "
            f"name of one ({names}), not {choice!r}"
        )
    if isinstance(choice, str | type | DampingPolicy):
        policy: DampingPolicy = registry.build(choice, DampingPolicy)
        return policy
    return ConstantDamping(choice)


def damping_at(policy: DampingPolicy, step: int) -> float:
    """Return the damping after a number of completed steps; ValueError if it is out of range."""
    damping = policy.at(step)
    if not is_number(damping) or not 0 <= damping < math.inf:
        raise ValueError(
            f"{describe(policy)} gives the damping {damping!r} at step {step}: DampingPolicy.at() "
            f"returns a number that is finite and not negative"
        )
    return float(damping)


def check_damping(saved: Any, policy: DampingPolicy, steps: int) -> None:
    """Raise a ValueError unless a policy can continue from a state, which it does not keep."""
    before = policy.state()
    if set(saved) != set(before):
        raise ValueError(f"the state was saved by another damping policy than {describe(policy)}")
    policy.load(saved)
    damping = policy.at(steps)
    policy.load(before)
    if not 0 <= damping < math.inf:
        raise ValueError(f"the state is damaged: its damping is {damping!r}")
