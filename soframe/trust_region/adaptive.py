"""The preconditioner's own damping, chosen by the quadratic model.

The damping of the quadratic model says how far the model is trusted; what the preconditioner needs
besides makes up for its approximations, and may be larger or smaller by orders of magnitude. Every
few steps the gradient is preconditioned with neighbouring dampings too, and the one whose step the
exact model predicts to bring most is kept (Martens and Grosse, 2015, section 6.6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from soframe.preconditioner import Preconditioner
from soframe.trust_region.jacobian import Direction


@dataclass
class AdaptiveDamping:
    """A damping that moves among neighbours.

    Trials pay while the damping is on its way. So the steps between two of them double where one
    keeps the damping, and halve where it moves on; then only the neighbour ahead is tried, and both
    again once the damping stays.

    Attributes:
        ratio: Neighbours are a factor of this apart.
        interval: The fewest steps between trials.
        longest: The most steps between trials.
        low: The least damping.
        high: The largest damping.
    """

    ratio: float = 2.0
    interval: int = 3
    longest: int = 12
    low: float = 1e-12
    high: float = 1e8

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not self.ratio > 1:
            raise ValueError(f"{name}: ratio must be above 1, not {self.ratio}")
        if self.interval < 1:
            raise ValueError(f"{name}: interval must be at least 1, not {self.interval}")
        if self.longest < self.interval:
            raise ValueError(
                f"{name}: longest must be at least interval ({self.interval}), not {self.longest}"
            )
        if not 0 < self.low < self.high:
            raise ValueError(f"{name}: needs 0 < low < high, not {self.low}, {self.high}")
        self._now: float | None = None
        self._wait = self.interval  # between the last trial and the next
        self._due = 0  # the step of the next
        self._moved = 0.0  # where the last one went: -1, 0 or 1

    def at(self, start: float) -> float:
        """Return the damping.

        Args:
            start: The damping to begin with; later calls ignore it.
        """
        if self._now is None:
            self._now = self._within(start)
        return self._now

    def neighbours(self, step: int) -> list[float]:
        """Return the other dampings to try.

        Args:
            step: Completed steps.

        Returns:
            An empty list where no trial is due.
        """
        if self._now is None or step < self._due:
            return []
        lower, upper = (self._within(self._now * self.ratio**way) for way in (-1, 1))
        ahead = upper if self._moved > 0 else lower
        if self._moved and ahead != self._now:
            return [ahead]
        return [damping for damping in (lower, upper) if damping != self._now]

    def choose(self, damping: float, step: int) -> None:
        """Go on with a damping, after a trial.

        Args:
            damping: One that was tried.
            step: Completed steps.
        """
        assert self._now is not None
        moved = float((damping > self._now) - (damping < self._now))
        if moved:
            self._wait = max(self.interval, self._wait // 2)
        else:
            self._wait = min(self.longest, self._wait * 2)
        self._now, self._moved, self._due = damping, moved, step + self._wait

    def _within(self, damping: float) -> float:
        return min(self.high, max(self.low, damping))

    def state(self) -> dict[str, float]:
        """Return what `load` needs."""
        if self._now is None:
            return {}
        return {"now": self._now, "wait": self._wait, "due": self._due, "moved": self._moved}

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a state.

        Args:
            state: What `state` returned.
        """
        self._now = state.get("now")
        self._wait = int(state.get("wait", self.interval))
        self._due = int(state.get("due", 0))
        self._moved = state.get("moved", 0.0)


@dataclass(frozen=True)
class Proposal:
    """A preconditioned gradient.

    Attributes:
        damping: What it was damped with.
        direction: Its negative, None where a parameter has no block.
        second_order: What it was preconditioned with; see `soframe.Preconditioner.second_order`.
    """

    damping: float
    direction: Direction
    second_order: list[dict[str, Any]]


def propose(
    preconditioner: Preconditioner,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
    damping: float,
    others: Sequence[float],
) -> list[Proposal]:
    """Return the preconditioned gradient, and the same with other dampings.

    Args:
        preconditioner: The preconditioner, after its step: ``.grad`` is preconditioned.
        parameters: The parameters.
        gradients: Their gradients as they were before.
        damping: The damping of that step.
        others: The other dampings.

    Returns:
        One for the damping and one for each other.
    """
    covered = preconditioner.covered()

    def proposal(damping: float) -> Proposal:
        direction = [-p.grad if p in covered and p.grad is not None else None for p in parameters]
        return Proposal(damping, direction, preconditioner.second_order)

    made = [proposal(damping)]
    for other in others:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        preconditioner.precondition_again(other)
        made.append(proposal(other))
    return made
