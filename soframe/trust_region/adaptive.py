"""The preconditioner's own damping, chosen by the quadratic model.

The damping of the quadratic model measures the trust in that model; the preconditioner's damping
compensates its approximations, and may be larger or smaller by orders of magnitude, differently for
each layer group. Every few steps neighbours are tried too, and the step with the best prediction of
the exact model is kept (after Martens and Grosse, 2015, section 6.6, with one damping for all
layers). `soframe.trust_region.proposals` runs a trial.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soframe.checks.numbers import require_integer, require_numbers


@dataclass
class AdaptiveDamping:
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
        name = type(self).__name__
        numbers = {each: getattr(self, each) for each in ("ratio", "spread", "low", "high")}
        require_numbers(name, **numbers)
        require_integer(f"{name}: interval", self.interval, 1)
        require_integer(f"{name}: longest", self.longest, 1)
        if not 1 < self.ratio < math.inf:
            raise ValueError(f"{name}: ratio must be above 1, not {self.ratio}")
        if self.longest < self.interval:
            raise ValueError(
                f"{name}: longest must be at least interval ({self.interval}), not {self.longest}"
            )
        if not 1 <= self.spread < math.inf:
            raise ValueError(f"{name}: spread must be at least 1, not {self.spread}")
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"{name}: needs 0 < low < high, not {self.low}, {self.high}")
        self.restart()

    def restart(self) -> None:
        """Reset all trials, for the start of an optimizer with its copy."""
        self._now: list[float] = []
        self._ways: list[int] = []  # up or down, the next direction of each
        self._wait = self.interval  # between the last trial and the next
        self._due = 0  # the step of the next

    def at(self, start: float, count: int | None = None) -> list[float]:
        """Return the dampings."""
        if len(self._now) != (count or len(self._now) or 1):
            first = self._middle() if self._now else self._within(start)
            self._now = [first] * (count or 1)
            self._ways = [-1] * len(self._now)
        return list(self._now)

    def trial(self, step: int) -> list[float]:
        """Return a neighbour of each damping if a trial is due, or an empty list."""
        return self._neighbours() if step >= self._due else []

    def retreat(self, unsolved: Sequence[bool]) -> None:
        """Raise all dampings if some factor cannot be solved with its own."""
        if any(unsolved):
            self._now = [self._within(damping * self.ratio) for damping in self._now]
            self._ways = [1 if bad else way for bad, way in zip(unsolved, self._ways, strict=True)]

    def choose(self, taken: Sequence[bool], step: int) -> None:
        """Keep the tried dampings that were taken."""
        tried = self._neighbours()
        self._ways = [
            (1 if new > old else -1) * (1 if take else -1)
            for take, old, new in zip(taken, self._now, tried, strict=True)
        ]
        rows = zip(taken, self._now, tried, strict=True)
        self._now = [new if take else old for take, old, new in rows]
        low, high = self._middle() / self.spread, self._middle() * self.spread
        self._now = [self._within(min(high, max(low, damping))) for damping in self._now]
        longer = min(self.longest, self._wait * 2)
        self._wait = max(self.interval, self._wait // 2) if any(taken) else longer
        self._due = step + self._wait

    def _neighbours(self) -> list[float]:
        neighbours = []
        for damping, way in zip(self._now, self._ways, strict=True):
            ahead, back = (self._within(damping * self.ratio**w) for w in (way, -way))
            neighbours.append(back if ahead == damping else ahead)
        return neighbours

    def _middle(self) -> float:
        return math.exp(statistics.median(map(math.log, self._now)))

    def _within(self, damping: float) -> float:
        return min(self.high, max(self.low, damping))

    def state(self) -> dict[str, Any]:
        """Return the state for `load`."""
        return {
            "now": list(self._now),
            "ways": list(self._ways),
            "wait": self._wait,
            "due": self._due,
        }

    def check_state(self, state: Any) -> None:
        """Check that `load` can take a state."""
        if not isinstance(state, Mapping):
            raise ValueError(f"the state is damaged: preconditioner_damping is {state!r}")
        now, ways = state.get("now", []), state.get("ways", [])
        lists = isinstance(now, list | tuple) and isinstance(ways, list | tuple)
        if not lists or len(now) != len(ways):
            raise ValueError(f"the state is damaged: its dampings are {now!r}, their ways {ways!r}")
        for damping in now:
            if not isinstance(damping, int | float) or not 0 < damping < math.inf:
                raise ValueError(f"the state is damaged: one of its dampings is {damping!r}")
        if not all(way in (-1, 1) for way in ways):
            raise ValueError(f"the state is damaged: its dampings move {ways!r}")
        for key, least in (("wait", 1), ("due", 0)):
            count = state.get(key, least)
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise ValueError(f"the state is damaged: {key} of its dampings is {count!r}")

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._now, self._ways = list(state.get("now", ())), list(state.get("ways", ()))
        self._wait = int(state.get("wait", self.interval))
        self._due = int(state.get("due", 0))
