"""The common part of both trust regions: closures and their losses, ranks, readouts, state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from soframe.blocks.registration import unwrap
from soframe.checks.arguments import check_model
from soframe.comm import Backend
from soframe.comm.agreement import add_over_ranks, fingerprint, require_common, require_no_failure
from soframe.damping.policies import DampingChoice, check_damping, damping_at
from soframe.losses.base import Loss
from soframe.state import checksums
from soframe.state.bound import OfModel
from soframe.trust_region import param_groups, settings
from soframe.trust_region.exact import Batch, best_damping
from soframe.trust_region.forward import Closure, Forward, evaluated, first_pass, moved
from soframe.trust_region.readout import OnStep, Readout
from soframe.trust_region.replay import Replay

VERSION = 3
"""The version of states."""

HINT = (
    ". If it is the gradients: every rank must have the mean of all ranks' gradients, so wrap the "
    "model in DistributedDataParallel, and let the closure call the wrapper; with "
    "find_unused_parameters=True if layers are frozen after that"
)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ClosureOptimizer(OfModel, torch.optim.Optimizer):
    """An optimizer whose step runs closures, at several points and on all ranks together."""

    _backend: Backend
    _settings: Mapping[str, object]  # the same on every rank

    def __init__(
        self,
        model: nn.Module,
        damping: DampingChoice,
        params: ParamsT | None,
        *,
        lr: float,
        weight_decay: float,
        on_step: OnStep | None,
    ) -> None:
        check_model(model)
        self._model = unwrap(model)
        chosen = self._model.parameters() if params is None else params
        super().__init__(chosen, {"lr": lr, "weight_decay": weight_decay})
        param_groups.check_all(self._model, self.param_groups)
        self.damping = settings.policy_of(damping)
        self._on_step = on_step
        self._steps = 0
        self._eps = 0.0  # the relative rounding of the loss
        self._differentiates = True  # whether closures compute gradients themselves
        self.counters = {"rejected_steps": 0, "skipped_steps": 0}
        self.readout: Readout | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model: ``params``, and ``lr`` and ``weight_decay`` if they differ.

        Raises:
            ValueError: If a setting is unknown or out of range, or a parameter not the model's.
        """
        super().add_param_group(param_group)
        try:
            param_groups.check(self._model, self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def close(self) -> None:
        """Remove every hook."""

    def _passes(
        self,
        closures: Sequence[Closure],
        loss: Loss | None = None,
        before_backward: Callable[[Forward], object] = lambda forward: None,
    ) -> tuple[list[Forward], float]:
        """Run closures, ``before_backward`` and backward passes; return also the sum of losses."""
        parameters = param_groups.trainable(self.param_groups)
        forwards: list[Forward] = []
        total = 0.0
        for closure in closures:
            with torch.enable_grad():
                forward, value = first_pass(self._model, closure, parameters, loss)
                before_backward(forward)
                forward.backward()
            forwards.append(forward)
            total += float(value.detach())
            self._eps = torch.finfo(value.dtype).eps
            self._differentiates = forward.kernels.differentiates
        return forwards, total

    def _evaluate(self, passes: Iterable[tuple[Closure, Replay]]) -> float:
        """Return the loss at the present parameters, over all ranks."""
        on_this_rank, error = math.nan, None
        try:
            on_this_rank = evaluated(passes, differentiates=self._differentiates)
        except Exception as raised:  # all ranks fail together, in `_agree`
            error = raised
        return self._agree(on_this_rank, error)[0]

    def _measure_damping(
        self, batch: Batch, update_with: Callable[[float], list[Tensor] | None]
    ) -> None:
        """Begin with the damping whose step reduces the objective of the batch most."""

        # It is measured: with too little damping any model predicts a large reduction.
        def after(damping: float) -> float:
            update = update_with(damping)
            if update is None:
                return math.inf
            with moved(batch.parameters, update):
                objective = self._evaluate(batch.passes) + batch.penalty
            return objective if math.isfinite(objective) else math.inf

        start = batch.loss + batch.penalty
        self.damping.begin(best_damping(self.damping.at(0), start, after))

    def _common(self) -> dict[str, object]:
        """Return by name the values that must be equal on every rank."""
        numbers = [(float(g["lr"]), float(g["weight_decay"])) for g in self.param_groups]
        return {
            "settings": self._settings,
            "step": self._steps,
            "lr and weight_decay of the param groups": numbers,
            "damping": damping_at(self.damping, self._steps),
        }

    def _agree(
        self,
        loss: float,
        error: Exception | None,
        *,
        further: Sequence[float] = (),
        gradients: Sequence[Tensor] = (),
    ) -> tuple[float, list[float]]:
        """Return the mean loss over ranks, and sums of further numbers; if one raises, all do.

        All ranks must have the same ``gradients``, whose bits are summed for that.
        """
        backend = self._backend
        common: dict[str, object] = {}
        try:
            common = self._common()
            if backend.world_size > 1 and not backend.on_paper:
                total = 0
                for gradient in gradients:
                    bits = gradient.to_dense().contiguous().view(_INTEGERS[gradient.itemsize])
                    total += int(bits.sum(dtype=torch.int64))
                common["the sum of the bits of all gradients"] = total
        except Exception as raised:  # the other ranks wait in the all-reduce below
            error = error or raised
        if backend.world_size == 1 and error is None:
            return loss, list(further)
        status = [loss, float(error is not None), *fingerprint(common)]
        sums = add_over_ranks(backend, status + list(further))
        require_no_failure(backend, error, sums[1])
        require_common(backend, common, sums[2 : len(status)], HINT)
        return sums[0] / backend.world_size, sums[len(status) :]

    def _publish(self, readout: Readout) -> None:
        self.readout = readout
        torch.clear_autocast_cache()  # within a context of the caller it has former parameters
        if self._on_step is not None:
            self._on_step(readout)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, for ``torch.save``."""
        of_torch = super().state_dict()
        # In copies of the dicts, into which the next steps write.
        of_torch["state"] = {number: dict(kept) for number, kept in of_torch["state"].items()}
        return {**of_torch, "trust_region": self._own_state()}

    def _own_state(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "steps": self._steps,
            "damping": self.damping.state(),
            "counters": dict(self.counters),
        }

    @checksums.reading()
    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless a state is one of such an optimizer of such a model."""
        checksums.seal(state)
        what = type(self).__name__
        saved = state.get("trust_region", {})
        if saved.get("version") != VERSION:
            raise ValueError(
                f"not the state of a {what} of version {VERSION}: it has {saved.get('version')!r}"
            )
        if missing := sorted(set(self._own_state()) - set(saved)):
            raise ValueError(f"the state is truncated: trust_region lacks {missing}")
        sizes = [len(group["params"]) for group in state["param_groups"]]
        now = [len(group["params"]) for group in self.param_groups]
        if sizes != now:
            raise ValueError(f"the state has param groups of {sizes} parameters, {what} of {now}")
        check_damping(saved["damping"], self.damping, saved["steps"])

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checked state."""
        of_torch = {"state": state["state"], "param_groups": state["param_groups"]}
        super().load_state_dict(of_torch)
        saved = state["trust_region"]
        self._steps, self.counters = saved["steps"], dict(saved["counters"])
        self.damping.load(saved["damping"])
