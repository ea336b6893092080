"""The reduction ratio: the measured change of a step over the model's prediction.

At measured steps the closures run once more, after the update. If every step has all of the data,
the loss of the next step is that very number. So with ``full_batch=True`` every step is judged, its
verdict waits until then, and a rejected step costs the pass that measured it.

The policy receives ratios at its own interval; the ratio of a harmful step, and of one with an
unknown ratio, at once. With all of the data it also receives ratios above two at once. With a
curvature c along the step and a damping d, a quadratic loss falls by ``(c + 2 d) / (c + d)`` times
the prediction. So a ratio of two means that the damping dominates the model, and a larger one that
the loss curves less still.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from soframe.damping.policies import DampingPolicy
from soframe.trust_region.exact import Batch

State = dict[str, Any]

FIRST = 5
"""Steps that are always measured: the first damping is a guess."""

MORE = 2.0
"""The ratio above which the policy is updated at once, with all data. With less, CURVES took more
steps.
"""

ROUNDINGS = 8
"""The noise of the objective's sum, in units of its relative rounding."""


class Reduction:
    """Measures reductions of steps, and keeps or undoes them.

    A kept ``"update"`` is in the optimizer's state of each parameter; a pending one is ``"moved"``
    there, beside the values ``"before"`` and the ``"decay"``. With an ``lr`` above 2, or of 0, the
    model predicts no reduction: the step has no ratio, unless the objective rose.
    """

    def __init__(self, damping: DampingPolicy, reject: bool, every: bool = False) -> None:
        self._damping, self._every = damping, every
        # The largest rise of the objective in a step that is kept: any finite one, or none.
        self._largest_rise = 0.0 if reject else sys.float_info.max
        self._large = MORE if every else math.inf  # the ratio that the policy receives at once
        self._waiting: tuple[float, float] | None = None
        self._told = True
        self.last: dict[str, float] = {}  # change and ratio of the last one, until `take_last`
        self.silent = False  # whether that change was below the objective's rounding

    @property
    def waits(self) -> bool:
        """Whether a step's verdict is pending."""
        return self._waiting is not None

    def decayed(self, states: Mapping[Any, State]) -> list[tuple[Any, float]]:
        """Return the parameters of the pending step, and their weight decays in it."""
        return [(p, state["decay"]) for p, state in states.items() if "moved" in state]

    def due(self, step: int) -> bool:
        """Return whether a step is measured."""
        interval = self._damping.interval
        if interval <= 0:
            return False
        first = math.inf if self._every else min(interval, FIRST)
        return step < first or self.told(step)

    def told(self, step: int) -> bool:
        """Return whether the policy receives the ratio of a measured step."""
        return (step + 1) % self._damping.interval == 0

    def take_last(self) -> dict[str, float]:
        """Return ``"change"``, and perhaps ``"ratio"``, of the last measurement, once."""
        last, self.last = self.last, {}
        return last

    def wait(
        self,
        states: Mapping[Any, State],
        batch: Batch,
        update: Sequence[Tensor],
        before: Sequence[Tensor],
        objective: float,
        predicted: float,
        *,
        observes: bool = True,
    ) -> None:
        """Leave a step of a batch pending until `judge`."""
        self._waiting, self._told = (objective, predicted), observes
        pairs = zip(batch.parameters, update, before, batch.decays, strict=True)
        for parameter, moved, old, decay in pairs:
            states[parameter].update(moved=moved, before=old, decay=decay)

    def _observe(self, ratio: float, *, accepted: bool) -> None:
        """Keep a ratio for the readout, and for the damping if it is due, large or of a failure."""
        self.last["ratio"] = ratio
        if self._told or ratio > self._large or not accepted:
            self._damping.observe(ratio)

    def judge(self, states: Mapping[Any, State], objective: float, eps: float = 0.0) -> bool:
        """Keep the pending step, or undo it."""
        assert self._waiting is not None
        (before, predicted), self._waiting = self._waiting, None
        change = objective - before
        self.last = {"change": change}
        rounding = ROUNDINGS * eps * max(abs(before), abs(objective))
        # So short a step does not contradict the model. It may be short because of the damping,
        # which must be able to fall again, or the run would stop here.
        self.silent = -rounding <= predicted < 0 and abs(change) <= rounding
        accepted = self.silent or change <= self._largest_rise
        if self.silent:
            self._damping.observe(1.0)
        elif predicted < 0 and math.isfinite(change):
            self._observe(change / predicted, accepted=accepted)
        elif predicted < 0 or not change <= 0:
            self._observe(-math.inf, accepted=accepted)
        _conclude(states, accepted=accepted)
        return accepted

    def state(self) -> dict[str, Any]:
        """Return the state for `load`, beside the optimizer's own."""
        return {"waiting": self._waiting, "told": self._told, "last": dict(self.last)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._waiting = state.get("waiting")
        self._told = bool(state.get("told", True))
        self.last = dict(state.get("last", {}))


def _conclude(states: Mapping[Any, State], *, accepted: bool) -> None:
    """Keep a pending update, or put back the former values of its parameters."""
    for parameter, state in states.items():
        if "moved" not in state:
            continue
        moved, before, _ = state.pop("moved"), state.pop("before"), state.pop("decay")
        if accepted:
            state["update"] = moved
        else:
            with torch.no_grad():
                parameter.copy_(before)
