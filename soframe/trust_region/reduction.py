"""The reduction ratio: what a step brought, over what the model promised.

At the steps at which it is due the closures run once more, after the update. Where every step has
all of the data there is no need to: the loss of the next step is that very number. So with
``full_batch=True`` every step is judged, the verdict waits until then, and a step that is rejected
costs the pass that showed it.

The policy hears of ratios at its own interval; of a step that did harm, and of one that nothing can
be said of, it hears at once. Where every step has all of the data it also hears at once of one that
brought more than twice its promise. With a curvature c along the step and a damping d, a quadratic
loss falls by ``(c + 2 d) / (c + d)`` times the promise. So at two the damping is all that there is
in the model, and the loss curves less than that still.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from soframe.damping.policies import DampingPolicy

State = dict[str, Any]

FIRST = 5
"""Steps that are judged in any case: so early nothing is known of the damping."""

MORE = 2.0
"""The ratio above which a step of all data is told at once. With less, CURVES took more steps."""

ROUNDINGS = 8
"""Of the objective, relative to its type: smaller changes are noise of its sum."""


class Reduction:
    """Measures what steps brought, and keeps or undoes them.

    An ``"update"`` that is kept is in the optimizer's state of each parameter; one that waits for
    its measurement is ``"moved"`` there, beside the values ``"before"`` and the ``"decay"``. With
    an ``lr`` above 2, or of 0, a step is not predicted to bring anything: it has no ratio, unless
    the objective rose.

    Attributes:
        last: The change and the ratio of the last measured step, until `take_last`.
        silent: Whether that change was below the objective's rounding.
    """

    def __init__(self, damping: DampingPolicy, reject: bool, every: bool = False) -> None:
        self._damping, self._reject, self._every = damping, reject, every
        self._waiting: tuple[float, float] | None = None
        self._told = True
        self.last: dict[str, float] = {}
        self.silent = False

    @property
    def waits(self) -> bool:
        """Whether a step waits for its verdict."""
        return self._waiting is not None

    def decayed(self, states: Mapping[Any, State]) -> list[tuple[Any, float]]:
        """Return the parameters of the step that waits, and their weight decays in it."""
        return [(p, state["decay"]) for p, state in states.items() if "moved" in state]

    def due(self, step: int) -> bool:
        """Return whether a step is measured."""
        interval = self._damping.interval
        return self.told(step) or (interval > 0 and (self._every or step < min(interval, FIRST)))

    def told(self, step: int) -> bool:
        """Return whether the policy wants the ratio of a step."""
        interval = self._damping.interval
        return interval > 0 and (step + 1) % interval == 0

    def take_last(self) -> dict[str, float]:
        """Return ``"change"``, and perhaps ``"ratio"``, of the last measurement, once."""
        told, self.last = self.last, {}
        return told

    def keep(self, states: Sequence[State], update: Sequence[Tensor]) -> None:
        """Keep a step without a verdict."""
        for state, moved in zip(states, update, strict=True):
            state["update"] = moved

    def wait(
        self,
        states: Sequence[State],
        update: Sequence[Tensor],
        before: Sequence[Tensor],
        decays: Sequence[float],
        objective: float,
        predicted: float,
        *,
        told: bool = True,
    ) -> None:
        """Leave a step until `judge`."""
        self._waiting, self._told = (objective, predicted), told
        for state, moved, old, decay in zip(states, update, before, decays, strict=True):
            state.update(moved=moved, before=old, decay=decay)

    def judge(self, states: Mapping[Any, State], objective: float, eps: float = 0.0) -> bool:
        """Keep the step that waits, or undo it."""
        assert self._waiting is not None
        (before, predicted), self._waiting = self._waiting, None
        change = objective - before
        self.last = {"change": change}
        rounding = ROUNDINGS * eps * max(abs(before), abs(objective))
        # A step so short says nothing against the model, and may be as short because of the
        # damping: a damping that never falls again would hold the run where it is.
        self.silent = -rounding <= predicted < 0 and abs(change) <= rounding
        harmless = change <= 0 or self.silent
        accepted = harmless or not (self._reject or not math.isfinite(change))
        if self.silent:
            self._damping.observe(1.0)
        elif predicted < 0 or not change <= 0:
            kept = predicted < 0 and math.isfinite(change)
            self.last["ratio"] = change / predicted if kept else -math.inf
            more = self._every and self.last["ratio"] > MORE
            if self._told or more or not accepted:
                self._damping.observe(self.last["ratio"])
        for parameter, state in states.items():
            if "moved" not in state:
                continue
            moved, old, _ = state.pop("moved"), state.pop("before"), state.pop("decay")
            if accepted:
                state["update"] = moved
            else:
                with torch.no_grad():
                    parameter.copy_(old)
        return accepted

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, besides the optimizer's own state."""
        return {"waiting": self._waiting, "told": self._told, "last": dict(self.last)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        waiting = state.get("waiting")
        self._waiting = None if waiting is None else (waiting[0], waiting[1])
        self._told = bool(state.get("told", True))
        self.last = dict(state.get("last", {}))
