"""The preconditioner's own damping, chosen by the quadratic model.

The damping of the quadratic model measures the trust in that model; the preconditioner's damping
compensates its approximations, and may be larger or smaller by orders of magnitude, differently for
each layer group. Every few steps neighbours are tried too, and the step with the best prediction of
the exact model is kept (after Martens and Grosse, 2015, section 6.6, with one damping for all
layers). `soframe.trust_region.proposals` runs a trial.
"""

from __future__ import annotations

import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class GroupDampings(ABC):
    """The damping of each layer group within the preconditioner; by default without trials."""

    @abstractmethod
    def at(self, start: float, count: int | None = None) -> list[float]:
        """Return the dampings of ``count`` groups; ``start`` is the policy's damping."""

    def readout(self, start: float) -> list[float]:
        """Return the dampings for a readout, unless they follow from the policy's."""
        return []

    def trial(self, step: int) -> list[float]:
        """Return a neighbour of each damping if a trial is due, or an empty list."""
        return []

    def retreat(self, unsolved: Sequence[bool]) -> None:  # noqa: B027 (optional)
        """Raise all dampings if some factor cannot be solved with its own."""

    def choose(self, taken: Sequence[bool], step: int) -> None:  # noqa: B027 (optional)
        """Keep the tried dampings that were taken."""

    def restart(self) -> None:  # noqa: B027 (optional)
        """Reset all trials, for the start of an optimizer with its copy."""

    def state(self) -> dict[str, Any]:
        """Return the state for `load`."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (optional)
        """Continue from a state; without entries, from the start."""


@dataclass(frozen=True)
class FixedMultiple(GroupDampings):
    """A multiple of the policy's damping, the same for all layer groups."""

    multiple: float

    def at(self, start: float, count: int | None = None) -> list[float]:
        return list(itertools.repeat(self.multiple * start, count or 1))


@dataclass
class AdaptiveDamping(GroupDampings):
    """A damping for each layer group, which moves among neighbours.

    At a trial each group has one neighbour: the next in the same direction if its damping moved
    last time, otherwise up and down in turn. Trials pay while dampings move, so the steps between
    two of them double if all stay, and halve if one moves.

    Attributes:
        ratio: The factor between neighbours.
        interval: The fewest steps between trials.
        longest: The most steps between trials.
        spread: The largest factor between a damping and the median of all. Without it the damping
            of a group with little effect would stay at its start.
        low: The least damping.
        high: The largest damping.
    """

    ratio: float = 3.0
    interval: int = 6
    longest: int = 24
    spread: float = 4.0
    low: float = 1e-16
    high: float = 1e8

    def __post_init__(self) -> None:
        if not (self.ratio > 1 and self.spread >= 1 and 0 < self.low < self.high):
            raise ValueError(f"needs ratio > 1, spread >= 1 and 0 < low < high: {self!r}")
        if not 1 <= self.interval <= self.longest:
            raise ValueError(f"needs 1 <= interval <= longest: {self!r}")
        self.restart()

    def restart(self) -> None:
        self._now: list[float] = []
        self._ways: list[int] = []  # up or down, the next direction of each
        self._wait = self.interval  # between the last trial and the next
        self._due = 0  # the step of the next

    def at(self, start: float, count: int | None = None) -> list[float]:
        if count is None:
            count = max(1, len(self._now))
        if len(self._now) != count:
            first = self._middle() if self._now else self._within(start)
            self._now, self._ways = list(itertools.repeat(first, count)), [-1] * count
        return list(self._now)

    def readout(self, start: float) -> list[float]:
        return self.at(start)

    def trial(self, step: int) -> list[float]:
        return self._neighbours() if step >= self._due else []

    def retreat(self, unsolved: Sequence[bool]) -> None:
        if any(unsolved):
            self._now = [self._within(damping * self.ratio) for damping in self._now]
            for number, bad in enumerate(unsolved):
                if bad:
                    self._ways[number] = 1

    def choose(self, taken: Sequence[bool], step: int) -> None:
        for number, (take, tried) in enumerate(zip(taken, self._neighbours(), strict=True)):
            is_larger = tried > self._now[number]
            self._ways[number] = 1 if is_larger == take else -1
            if take:
                self._now[number] = tried
        low, high = self._middle() / self.spread, self._middle() * self.spread
        self._now = [self._within(min(high, max(low, damping))) for damping in self._now]
        if any(taken):
            self._wait = max(self.interval, self._wait // 2)
        else:
            self._wait = min(self.longest, self._wait * 2)
        self._due = step + self._wait

    def _neighbours(self) -> list[float]:
        neighbours = []
        for damping, way in zip(self._now, self._ways, strict=True):
            neighbour = self._within(damping * self.ratio**way)
            if neighbour == damping:  # at an end
                neighbour = self._within(damping * self.ratio**-way)
            neighbours.append(neighbour)
        return neighbours

    def _middle(self) -> float:
        return math.exp(statistics.median(map(math.log, self._now)))

    def _within(self, damping: float) -> float:
        return min(self.high, max(self.low, damping))

    def state(self) -> dict[str, Any]:
        return {
            "now": list(self._now),
            "ways": list(self._ways),
            "wait": self._wait,
            "due": self._due,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.restart()
        self._now, self._ways = list(state.get("now", ())), list(state.get("ways", ()))
        self._wait, self._due = state.get("wait", self._wait), state.get("due", self._due)
