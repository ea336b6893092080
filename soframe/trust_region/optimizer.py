"""The optimizer that owns the step: K-FAC with a trust region (Martens and Grosse, 2015).

The preconditioned gradient says where to go; the exact quadratic model says how far, and how much
of the last update to add. Levenberg-Marquardt damping says how far that model is to be trusted. So
there is no learning rate to tune::

    optimizer = soframe.TrustRegion(model, loss="cross-entropy")
    ...
    def closure():
        return criterion(model(inputs), targets)  # no backward

    loss = optimizer.step(closure)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from soframe.blocks import home, registration
from soframe.comm.agreement import (
    add_over_ranks,
    fingerprint,
    require_common,
    require_no_failure,
)
from soframe.damping.adaptive import AdaptiveDamping
from soframe.damping.policies import DampingChoice
from soframe.derivatives.denormals import flushed_denormals
from soframe.derivatives.forward import Closure, Forward, Outputs, evaluated
from soframe.derivatives.replay import Replay, Snapshot
from soframe.derivatives.tape import Tape
from soframe.derivatives.twice import Direction
from soframe.losses.base import Loss
from soframe.preconditioner import Preconditioner
from soframe.setup import building
from soframe.state import checksums
from soframe.state.saving import agree
from soframe.trust_region import groups, settings
from soframe.trust_region.declared import (
    Fit,
    fit,
    numbers,
    require_agreement,
    require_graph,
    require_only_through,
)
from soframe.trust_region.exact import ExactModel, Objective
from soframe.trust_region.parts import Parts
from soframe.trust_region.proposals import Proposer
from soframe.trust_region.quadratic import Quadratic, combine
from soframe.trust_region.reduction import Reduction
from soframe.trust_region.watch import LossWatch

SAID = 4
"""Numbers that come first in what ranks agree on."""


class TrustRegion(torch.optim.Optimizer):
    """K-FAC with damping, step length and momentum from the exact quadratic model.

    Args:
        model: The model; it returns a tensor, or several as a tuple or list: then the loss is a
            `soframe.losses.SumLoss` with a term for each. Wrapped in DistributedDataParallel on
            several ranks: the closure calls the wrapper. Parameters may be frozen and thawed.
        loss: What the Fisher is of: a name (``"mse"``, ``"cross-entropy"``, ...), class or
            instance. It must be the loss of the closure, whose terms may have weights, as those of
            classes or of ignored targets; steps that take statistics check it.
        damping: The damping policy: a name, class or instance; or a number, or a callable of the
            step.
        params: Param groups, each with ``lr`` and ``weight_decay`` of its own if it likes; or
            parameters. By default all of the model's. See `soframe.trust_region.groups`.
        weight_decay: Coefficient of ``1/2 ||parameters||^2`` in the objective.
        momentum: Whether the last update is a direction of the model.
        parts: How many runs of layers have coefficients of their own in the step; see
            `soframe.trust_region.parts`.
        lr: Multiplies the update; 1 is the minimum of the model. Groups move in their ratio.
        fisher: ``"monte-carlo"``, ``"type-2"`` or ``"forward-only"``.
        preconditioner_damping: The damping within the preconditioner: an `AdaptiveDamping`, that
            begins with the policy's, or a multiple of the policy's.
        reject: Undo a step, at those steps that measure the reduction ratio, if the objective rose.
        full_batch: Whether every step has the same data and the same loss (dropout makes it another
            one), so that the next step's measures the ratio, and may undo the last; change no
            parameter in between. Else the closures run once more for it. See `settle`.
        max_increase: Undo the last update where a step's loss is more than so many times the
            largest of the ten before; None for never. See `soframe.trust_region.watch`.
        burn_in: Batches that only give statistics, each of them, before the first update.
        reuse_activations: Whether derivatives follow a tape of the forward pass where they can;
            else the gradient is differentiated. See `soframe.derivatives`.
        flush_denormals: Treat denormal numbers as zero within the preconditioner and the quadratic
            model's own arithmetic (CPU). The user's forward and backward passes keep their mode.
        **preconditioner: Further settings of `soframe.Preconditioner`, in place of
            `PRECONDITIONER`.

    Raises:
        ValueError: If a setting is out of range, or a parameter that needs a gradient in no group.
        TypeError: If a setting has the wrong type, or does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | type[Loss] | Loss,
        *,
        damping: DampingChoice = "levenberg-marquardt",
        params: ParamsT | None = None,
        weight_decay: float = 0.0,
        momentum: bool = True,
        parts: int = 3,
        lr: float = 1.0,
        fisher: str = "monte-carlo",
        preconditioner_damping: AdaptiveDamping | float | None = None,
        reject: bool = True,
        full_batch: bool = False,
        max_increase: float | None = 1.5,
        burn_in: int = 0,
        reuse_activations: bool = True,
        flush_denormals: bool = True,
        **preconditioner: Any,
    ) -> None:
        backend = preconditioner.get("backend")
        with building.starting(lambda: building.choose_backend(backend)):
            own = AdaptiveDamping() if preconditioner_damping is None else preconditioner_damping
            given = {"fisher": fisher, **preconditioner}
            built = settings.check(model, loss, params, given)
            self._model = registration.unwrap(model)
            every = self._model.parameters() if params is None else params
            super().__init__(every, {"lr": lr, "weight_decay": weight_decay})
            groups.check_all(self._model, self.param_groups)
            self.damping = settings.whole_model_damping(damping)
            chosen = settings.Own(
                damping=self.damping,
                momentum=momentum,
                parts=parts,
                preconditioner_damping=own,
                reject=reject,
                full_batch=full_batch,
                max_increase=max_increase,
                burn_in=burn_in,
                reuse_activations=reuse_activations,
                flush_denormals=flush_denormals,
            )
            self._parts = Parts(self._model, parts, groups.trainable(self.param_groups))
            self._watch = LossWatch(max_increase)
            self._steps, self._own_damping = 0, own
            self._mean_damping()  # what it raises it raises here
            self._momentum, self._full_batch, self._burn_in = momentum, full_batch, burn_in
            self._flush, self._reuse = flush_denormals, reuse_activations
            # Of unequal batches, whether the statistics of the preconditioner are told already.
            self._alike = preconditioner.get("loss_average") == "global"
            self._checked = False
            self._reduction = Reduction(self.damping, reject)
            told = settings.PreconditionersDamping(
                self._preconditioner_damping, chosen, groups.numbers(self.param_groups)
            )
            further = settings.of_preconditioner(preconditioner, burn_in)
        self.preconditioner = Preconditioner(
            self._model,
            fisher=fisher,
            loss=built,
            damping=told,
            kl_clip=None,
            **further,
        )
        try:
            settings.require_memoryless(self.preconditioner.blocks)
        except ValueError:
            self.preconditioner.close()
            raise
        adaptive = own if isinstance(own, AdaptiveDamping) else None
        self._proposer = Proposer(adaptive, self.preconditioner, self._parts)
        self._outputs = Outputs(self._model)
        self._exact = ExactModel(self.preconditioner)
        self.counters = dict.fromkeys(settings.COUNTERS, 0)
        self.last: dict[str, float] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model: ``params``, and ``lr`` and ``weight_decay`` if they differ.

        Raises:
            ValueError: If a setting is unknown or out of range, or a parameter not the model's.
        """
        super().add_param_group(param_group)
        try:
            groups.check(self._model, self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def _preconditioner_damping(self, step: int) -> float:
        del step  # it counts burn-in too
        damping, own = self._mean_damping(), self._own_damping
        return max(own.at(damping)) if isinstance(own, AdaptiveDamping) else own * damping

    # -- the step -----------------------------------------------------------------------------

    def step(self, closure: Closure | Sequence[Closure]) -> Tensor:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Runs the model on a batch and returns the loss, a scalar that depends on the
                parameters through the model's output alone; it does not call ``backward``. For
                micro-batches a list of closures whose losses add up to the batch's
                (``loss / len(closures)`` for means; ``loss * n / N`` for n of N samples).

        Returns:
            The loss before the update, averaged over ranks.

        Raises:
            ValueError: If the closure's loss is not the declared one; see also `groups.check_all`.
            TypeError: If there is no closure, or it does not return a scalar tensor.
            RuntimeError: If a closure does not run the model once, or its loss has terms that do
                not go through the model's output, or the model has no derivatives along directions;
                or if another rank raises.
        """
        groups.check_all(self._model, self.param_groups)
        closures = closures_of(closure)
        parameters = groups.trainable(self.param_groups)
        forwards, loss = self._first_passes(closures)
        self._parts.follow(parameters)
        gradients = groups.add_decay(
            parameters,
            groups.setting(self.param_groups, "weight_decay"),
            self.preconditioner.home,
        )
        skipped = self.preconditioner.counters["skipped_updates"]
        self._proposer.begin(self._mean_damping())
        with flushed_denormals(self._flush):
            self.preconditioner.step()
        if self._burn_in > 0:
            self._burn_in -= 1
        elif (
            not math.isfinite(loss)
            or self.preconditioner.counters["skipped_updates"] > skipped
            or self._watch.rises(loss, undoable=any("update" in s for s in self.state.values()))
        ):
            self._step_back()
        else:
            with flushed_denormals(self._flush):
                shares, lr = groups.shares(self.param_groups)
                proposals = self._proposer.propose(parameters, gradients, shares, self._steps)
                last = [self.state[p].get("update") for p in parameters] if self._momentum else []
                rest = self._proposer.rest(parameters, gradients, last, shares)
                directions = [*chain(*(proposal.parts for proposal in proposals)), *rest]
                decays = groups.setting(self.param_groups, "weight_decay")
                objective = Objective(parameters, gradients, decays)
                damping = self.damping.at(self._steps)
                quadratic = self._exact.along(objective, forwards, directions, damping=damping)
            chosen, quadratic = self._proposer.choose(proposals, quadratic, self._steps)
            if quadratic.finite():
                self._move(forwards, parameters, loss, lr, [*chosen, *rest], quadratic)
            else:
                self._step_back()
        return torch.tensor(loss)

    def settle(self, closure: Closure | Sequence[Closure]) -> bool:
        """Judge the last step where it still waits for the next, as with ``full_batch`` it may.

        Args:
            closure: As for `step`; it leaves no trace.

        Returns:
            False if that step has been undone.
        """
        if not self._reduction.waits:
            return True
        closures = closures_of(closure)
        return self._judge(self._evaluate((c, Replay(self._model)) for c in closures))

    def _first_passes(self, closures: Sequence[Closure]) -> tuple[list[Forward], float]:
        """Run closures; if their loss undoes the step that waits, run them again."""
        if not self._reduction.waits:
            return self._forward_backward(closures)
        before = Snapshot(self._model)
        forwards, loss = self._forward_backward(closures)
        if self._judge(loss):
            return forwards, loss
        del forwards  # and its graph
        before.restore()
        return self._forward_backward(closures)

    def _forward_backward(self, closures: Sequence[Closure]) -> tuple[list[Forward], float]:
        """Run the closures and their backward passes, and the Fisher's where it is due."""
        self.zero_grad()
        self.preconditioner.reset_batch()  # a step whose closure raised has left its statistics
        parameters = groups.trainable(self.param_groups)
        compared = not self._checked or self.preconditioner.takes_statistics
        forwards: list[Forward] = []
        fits: list[Fit] = []
        total = 0.0
        for closure in closures:
            replay = Replay(self._model)
            tape = Tape(replay.devices, reuse=self._reuse)
            with torch.enable_grad():
                outputs, loss = self._outputs.of(closure, tape)
                require_graph(outputs, loss)
                gradients = torch.autograd.grad(
                    loss, outputs, create_graph=True, materialize_grads=True
                )
                require_only_through(outputs, loss, parameters)
                forward = Forward(closure, replay, outputs, gradients, tape)
                if compared:
                    fits.append(fit(self.preconditioner.loss, forward, len(closures)))
                with tape.in_same_kernels():  # the Fisher's passes go through checkpoints too
                    self._observe(outputs, fits[-1] if compared else None, len(closures))
                forward.backward()
            forwards.append(forward)
            total += float(loss.detach())
        problems = [one.problem for one in fits if one.problem is not None]
        error = ValueError(problems[0]) if problems and math.isfinite(total) else None
        mean, sums = self._agree(total, error, numbers(fits))
        if compared and math.isfinite(mean):
            backend = self.preconditioner.backend
            ranks = 1 if backend.on_paper else backend.world_size
            require_agreement(self.preconditioner.loss, fits, sums, ranks, alike=self._alike)
            self._checked = True
        return forwards, mean

    def _observe(self, outputs: Sequence[Tensor], found: Fit | None, closures: int) -> None:
        """Take the statistics of a forward pass, with what its terms and its batch count."""
        fisher = self.preconditioner._fisher
        if found is not None:
            if found.problem is not None:
                return
            fisher = replace(fisher, roots=found.roots(closures, alike=self._alike))
            share = found.share(closures, alike=self._alike)
            self.preconditioner._statistics.weigh(share)
        heads = outputs if len(outputs) > 1 else outputs[0]
        fisher.observe(heads, self.preconditioner._capture)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, wherever they live.

        Args:
            set_to_none: Whether parameters have none afterwards.
        """
        super().zero_grad(set_to_none)
        home.empty(
            self.preconditioner.home,
            groups.trainable(self.param_groups),
            set_to_none=set_to_none,
        )

    def _move(
        self,
        forwards: Sequence[Forward],
        parameters: Sequence[nn.Parameter],
        loss: float,
        lr: float,
        directions: Sequence[Direction],
        quadratic: Quadratic,
    ) -> None:
        """Take the step that minimises the model, and measure what it brought if that is due."""
        coefficients = quadratic.minimise() * lr
        predicted, damping = quadratic.change(coefficients), self.damping.at(self._steps)
        measure = self._reduction.due(self._steps)
        if not measure and not (coefficients.isfinite().all() and math.isfinite(predicted)):
            self._step_back()  # nobody would reject it
            return
        update = combine(parameters, directions, coefficients)
        states = [self.state[p] for p in parameters]
        before = [p.detach().clone() for p in parameters] if measure else []
        decays = groups.setting(self.param_groups, "weight_decay")
        objective = loss + groups.penalty(zip(parameters, decays, strict=True))
        for frozen in set(self.state) - set(parameters):
            self.state[frozen].pop("update", None)  # of long ago, once it is thawed
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        if not measure:
            self._reduction.keep(states, update)
        else:
            again = [] if self._full_batch else [(one.closure, one.replay) for one in forwards]
            after = self._evaluate(again) if again else None
            self._reduction.wait(states, update, before, decays, objective, predicted)
            if after is not None:
                self._judge(after)
        told = self._reduction.tell()
        self.last = {"loss": loss, "damping": damping, "predicted": predicted, **told}
        self._steps += 1

    def _judge(self, loss: float) -> bool:
        """Keep the step that waits for this loss, or undo it."""
        penalty = groups.penalty(self._reduction.decayed(self.state))
        accepted = self._reduction.judge(self.state, loss + penalty)
        self.counters["rejected_steps"] += not accepted
        return accepted

    def _step_back(self) -> None:
        """Undo the last update: it, or this batch, made something that is large or not finite."""
        self.counters["skipped_steps"] += 1
        self.damping.observe(-math.inf)
        for parameter, state in self.state.items():  # what has been frozen since is among them
            last = state.pop("update", None)
            if last is not None:
                with torch.no_grad():
                    parameter.sub_(last)

    # -- pieces -------------------------------------------------------------------------------

    def _evaluate(self, passes: Iterable[tuple[Closure, Replay]]) -> float:
        """Return the loss at the parameters of now."""
        own, error = math.nan, None
        try:
            own = sum(evaluated(closure, replay) for closure, replay in passes)
        except Exception as raised:  # whatever it is: the other ranks wait, and must be told
            error = raised
        return self._agree(own, error)[0]

    def _mean_damping(self) -> float:
        return self.damping.at(self._steps) + groups.mean_decay(self.param_groups)

    def _agree(
        self, loss: float, error: Exception | None, further: Sequence[float] = ()
    ) -> tuple[float, list[float]]:
        """Agree with all ranks on a loss, on who raises, and on what must be the same.

        Returns:
            The mean over ranks, and the sums of further numbers.
        """
        backend, common = self.preconditioner.backend, {}
        try:
            common = {
                "step": self._steps,
                "lr and weight_decay of the param groups": groups.numbers(self.param_groups),
                "damping": self.damping.at(self._steps),
                "burn_in": self._burn_in,
                "whether a step waits for its verdict": self._reduction.waits,
            }
        except Exception as raised:  # likewise
            error = error or raised
        own = [loss, float(error is not None), *fingerprint(common), *further]
        sums = add_over_ranks(backend, own)
        require_no_failure(backend, error, sums[1])
        require_common(backend, common, sums[2:SAID])
        return sums[0] / backend.world_size, sums[SAID:]

    # -- state --------------------------------------------------------------------------------

    def state_dict(self, *, curvature: bool = True) -> dict[str, Any]:
        """Return the optimizer's state, the preconditioner's and the damping's.

        Args:
            curvature: Whether the preconditioner's is in it, gathered from all ranks; without it
                save `soframe.checkpoint.part` of ``preconditioner`` beside.

        Returns:
            For ``torch.save``; see `soframe.Preconditioner.state_dict` for when to call it.
        """
        own = self._own_damping
        found = {
            **super().state_dict(),
            "curvature": self.preconditioner.state_dict() if curvature else None,
            "trust_region": {
                "version": settings.VERSION,
                "steps": self._steps,
                "burn_in": self._burn_in,
                "damping": self.damping.state(),
                "preconditioner_damping": own.state() if isinstance(own, AdaptiveDamping) else {},
                "counters": dict(self.counters),
                "losses": self._watch.state(),
                "reduction": self._reduction.state(),
            },
        }
        sealed = checksums.seal(settings.sealed_part(found))
        found["trust_region"][checksums.KEY] = sealed[checksums.KEY]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; call it on every rank.

        Args:
            state_dict: What `state_dict` returned. If it is without curvature, the preconditioner
                stays as it is: see `soframe.checkpoint.load`.

        Raises:
            ValueError: If it is not the state of a TrustRegion on such a model, or truncated or
                damaged, or another rank's is, or the ranks' states differ; nothing has changed
                then, on any rank.
        """

        def check() -> None:
            damping = self._own_damping
            adaptive = damping if isinstance(damping, AdaptiveDamping) else None
            settings.check_state(state_dict, self.damping, adaptive, self.param_groups)
            if state_dict["curvature"] is not None:
                self.preconditioner._check(state_dict["curvature"])

        def common() -> str:
            own = settings.sealed_part(state_dict)["trust_region"]
            return checksums.text([state_dict["curvature"] is None, own])

        agree(self.preconditioner.backend, check, common)
        own = state_dict["trust_region"]
        if state_dict["curvature"] is not None:
            self.preconditioner._load(state_dict["curvature"], lambda: None)
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in settings.KEYS})
        self._steps, self._burn_in = own["steps"], own["burn_in"]
        self.damping.load(own["damping"])
        if isinstance(self._own_damping, AdaptiveDamping):
            self._own_damping.load(own["preconditioner_damping"])
        self.counters = dict(own["counters"])
        self._watch.load(own.get("losses", []))
        self._reduction.load(own.get("reduction", {}))

    def close(self) -> None:
        """Remove every hook."""
        self.preconditioner.close()
        self._outputs.close()


def closures_of(closure: Closure | Sequence[Closure]) -> list[Closure]:
    """Return what a step runs, as a list.

    Args:
        closure: A closure, or several.

    Returns:
        At least one.

    Raises:
        TypeError: If there is none, or one cannot be called.
    """
    closures = list(closure) if isinstance(closure, Sequence) else [closure]
    if not closures or not all(map(callable, closures)):
        raise TypeError(
            f"TrustRegion.step takes a closure that returns the loss, or a list of closures with "
            f"one for every micro-batch, not {closure!r}"
        )
    return closures
