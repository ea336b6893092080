"""The optimizer that owns the step: K-FAC with a trust region (Martens and Grosse, 2015).

Directions of other methods, alone or beside K-FAC's, are weighed in the same model.

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
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from soframe.blocks import home, registration
from soframe.capture.untraced import untraced
from soframe.damping.adaptive import AdaptiveDamping
from soframe.damping.policies import DampingChoice, adopted
from soframe.damping.saved import damping_at
from soframe.derivatives.denormals import flushed_denormals
from soframe.derivatives.forward import Closure, Forward, Outputs, evaluated
from soframe.derivatives.replay import Replay, Snapshot
from soframe.losses.base import Loss
from soframe.preconditioner import Preconditioner
from soframe.setup import building
from soframe.state import checksums
from soframe.state.saving import agree
from soframe.trust_region import agreeing, candidates, groups, settings
from soframe.trust_region.candidates import Beside, Candidates
from soframe.trust_region.declared import (
    Fit,
    fit,
    numbers,
    require_agreement,
)
from soframe.trust_region.directions import NamedDirections
from soframe.trust_region.exact import ExactModel, Objective
from soframe.trust_region.initial import best_damping
from soframe.trust_region.lengths import Lengths
from soframe.trust_region.memory import Memory
from soframe.trust_region.parts import Parts
from soframe.trust_region.passes import closures_of, first_pass, moved
from soframe.trust_region.proposals import Proposal, Proposer
from soframe.trust_region.quadratic import Quadratic, combine
from soframe.trust_region.readout import OnStep, Readout
from soframe.trust_region.reduction import Reduction
from soframe.trust_region.watch import LossWatch

MOST_DAMPINGS = 60
"""Raises of the damping in one step, until a promise can be believed."""

ROSE = "the objective rose"
"""Why most updates are undone."""

SILENCE = 20
"""Steps below the loss's rounding, one after the other, that are worth a warning."""


@dataclass(frozen=True)
class Batch:
    """What a step knows of its batch once the backward passes have run.

    Attributes:
        objective: The parameters, and the gradients of loss and weight decay before any method.
        forwards: The forward passes, one for each closure, where the step has a model.
        loss: The loss before the update, over all ranks.
        shares: What the direction of each parameter is scaled by; see `groups.shares`.
        lr: Multiplies the update.
        with_model: Whether the step has a quadratic model.
    """

    objective: Objective
    forwards: Sequence[Forward]
    loss: float
    shares: Sequence[float]
    lr: float
    with_model: bool

    @property
    def value(self) -> float:
        """The objective at the parameters of now: the loss and the penalty on weights."""
        parameters, decays = self.objective.parameters, self.objective.decays
        return self.loss + groups.penalty(zip(parameters, decays, strict=True))


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
            one), so that the next step's judges every step, and may undo the last; change no
            parameter in between. Else the closures run once more at some steps. See `settle`.
        max_increase: Undo the last update where a step's loss is more than so many times the
            largest of the ten before, or twice that while there are fewer; None for never. See
            `soframe.trust_region.watch`.
        model_every: Steps from one quadratic model to the next. Those in between go along the
            directions of their gradient, by the mean of the last models' coefficients, and cost
            little more than a first-order step: see `soframe.trust_region.lengths`.
        burn_in: Batches that only give statistics, each of them, before the first update.
        reuse_activations: Whether derivatives follow a tape of the forward pass where they can;
            else the gradient is differentiated. See `soframe.derivatives`.
        flush_denormals: Treat denormal numbers as zero within the preconditioner and the quadratic
            model's own arithmetic (CPU). The user's forward and backward passes keep their mode.
        on_step: Is called with a `soframe.trust_region.Readout` after each step, as is
            `soframe.trust_region.History`.
        **preconditioner: Further settings of `soframe.Preconditioner`, in place of
            `PRECONDITIONER`. ``method`` may be a list: the model weighs the directions of each, see
            `soframe.trust_region.candidates`. ``auxiliary``, the method of what the first leaves
            out, is ``"adamw"`` by default where a method remembers gradients, and else none.

    Attributes:
        preconditioner: What makes the directions of the first method.
        damping: The damping policy, in a copy.
        counters: How many steps were ``"rejected_steps"``, since the objective rose, and how many
            ``"skipped_steps"``, since something was not finite or the loss far above the last ones.
        last: Of the last step that was taken ``"loss"``, ``"damping"`` and, if it had a model,
            ``"predicted"``; ``"change"`` and ``"ratio"`` of the last one that was judged.
        readout: What the last step saw and did; None before the first.

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
        fisher: str = settings.FISHER,
        preconditioner_damping: AdaptiveDamping | float | None = None,
        reject: bool = True,
        full_batch: bool = False,
        max_increase: float | None = 1.5,
        model_every: int = 1,
        burn_in: int = 0,
        reuse_activations: bool = True,
        flush_denormals: bool = True,
        on_step: OnStep | None = None,
        **preconditioner: Any,
    ) -> None:
        backend = preconditioner.get("backend")
        with building.starting(lambda: building.choose_backend(backend)):
            if on_step is not None and not callable(on_step):
                raise TypeError(f"on_step must be callable with a Readout, not {on_step!r}")
            built = settings.check(model, loss, params, {"fisher": fisher, **preconditioner})
            methods = candidates.methods_of(preconditioner)
            blocks_damping = settings.damping_within(preconditioner_damping, methods.damped)
            self._model = registration.unwrap(model)
            every = self._model.parameters() if params is None else params
            super().__init__(every, {"lr": lr, "weight_decay": weight_decay})
            groups.check_all(self._model, self.param_groups)
            self.damping = adopted(settings.whole_model_damping(damping))
            chosen = settings.OwnSettings(
                damping=self.damping,
                momentum=momentum,
                parts=parts,
                preconditioner_damping=blocks_damping,
                reject=reject,
                full_batch=full_batch,
                max_increase=max_increase,
                model_every=model_every,
                burn_in=burn_in,
                reuse_activations=reuse_activations,
                flush_denormals=flush_denormals,
                methods=methods,
            )
            self._parts = Parts(self._model, parts, groups.trainable(self.param_groups))
            self._watch = LossWatch(max_increase)
            self._steps, self._damping_within, self._loss = 0, blocks_damping, built
            self._mean_damping()  # what it raises it raises here
            self._momentum, self._full_batch, self._burn_in = momentum, full_batch, burn_in
            self._flush, self._reuse = flush_denormals, reuse_activations
            # Of unequal batches, whether the statistics of the preconditioner are told already.
            self._alike = preconditioner.get("loss_average") == "global"
            self._checked = False
            self._rare = model_every > 1
            self._lengths = Lengths(model_every)
            self._reduction = Reduction(self.damping, reject, full_batch or self._rare)
            self._on_step, self._eps, self._below_rounding, self._warned = on_step, 0.0, 0, False
            self._undone: str | None = None
            self._notes: list[str] = []
            of_preconditioner = settings.of_preconditioner(preconditioner, burn_in)
        self._candidates = self._build_preconditioners(
            chosen, fisher=fisher, backend=backend, given=preconditioner, merged=of_preconditioner
        )
        self._memory = Memory(self._candidates.every)
        adaptive = blocks_damping if isinstance(blocks_damping, AdaptiveDamping) else None
        self._proposer = Proposer(adaptive, self.preconditioner, self._parts)
        self._outputs = Outputs(self._model)
        self._exact = ExactModel(self.preconditioner.backend, isotropic=built.isotropic)
        self.counters = dict.fromkeys(settings.COUNTERS, 0)
        self.last: dict[str, float] = {}
        self.readout: Readout | None = None

    def _build_preconditioners(
        self,
        chosen: settings.OwnSettings,
        *,
        fisher: str,
        backend: Any,
        given: Mapping[str, Any],
        merged: Mapping[str, Any],
    ) -> Candidates:
        """Build the preconditioner of each method, each on the same model.

        Args:
            chosen: The settings of this trust region.
            fisher: Of methods that read calls.
            backend: How tensors travel.
            given: The settings of preconditioners that the user gave.
            merged: These, and defaults.

        Returns:
            All of them; none has a hook left if one cannot be built.
        """
        methods = chosen.methods
        fishers = methods.fishers(fisher, self._loss, usual=settings.FISHER)
        self.preconditioner = candidates.OneOfSeveral(
            self._model,
            method=methods.first,
            auxiliary=methods.auxiliary,
            backend=backend,
            damping=settings.PreconditionersDamping(
                self._preconditioner_damping, chosen, groups.numbers(self.param_groups)
            ),
            kl_clip=None,
            **fishers[0],
            **merged,
        )
        others: list[Beside] = []
        try:
            for number, method in enumerate(methods.others, start=1):
                damping = settings.PreconditionersDamping(self._tied_damping, chosen, number)
                others.append(
                    Beside(
                        self.preconditioner,
                        method=method,
                        damping=damping,
                        kl_clip=None,
                        **fishers[number],
                        **merged,
                    )
                )
            for preconditioner in (self.preconditioner, *others):
                candidates.require_recallable(preconditioner.blocks)
            candidates.require_read((self.preconditioner, *others), given)
        except Exception:
            for preconditioner in (*others, self.preconditioner):
                preconditioner.close()
            raise
        return Candidates(self.preconditioner, others)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model: ``params``, and ``lr`` and ``weight_decay`` if they differ.

        Raises:
            ValueError: If a setting is unknown or out of range, or a parameter not the model's.
        """
        super().add_param_group(param_group)
        groups.check_last(self._model, self.param_groups)

    def _preconditioner_damping(self, step: int) -> float:
        del step  # it counts burn-in too
        damping, chosen = self._mean_damping(), self._damping_within
        if isinstance(chosen, AdaptiveDamping):
            return max(chosen.at(damping))
        return chosen * damping

    def _tied_damping(self, step: int) -> float:
        """Return the damping of further methods: nobody tries others for them."""
        del step
        multiple = self._damping_within
        return self._mean_damping() * (1.0 if isinstance(multiple, AdaptiveDamping) else multiple)

    @property
    def candidates(self) -> tuple[Preconditioner, ...]:
        """What makes the directions of each method, `preconditioner` first: see its ``report``."""
        return self._candidates.every

    # -- the step -----------------------------------------------------------------------------

    @untraced
    def step(self, closure: Closure | Sequence[Closure]) -> Tensor:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Runs the model on a batch, in one call or in several that are independent of
                each other, and returns the loss, a scalar that depends on the parameters through
                the model's outputs alone; it does not call ``backward``. For
                micro-batches a list of closures whose losses add up to the batch's
                (``loss / len(closures)`` for means; ``loss * n / N`` for n of N samples).

        Returns:
            The loss before the update, averaged over ranks, in float64.

        Raises:
            ValueError: If the closure's loss is not the declared one; see also `groups.check_all`.
            TypeError: If there is no closure, or it does not return a scalar tensor.
            RuntimeError: If a closure does not run the model, or its loss has terms that do not
                go through the model's output, or the model has no derivatives along directions;
                or if another rank raises.
        """
        groups.check_all(self._model, self.param_groups)
        closures = closures_of(closure)
        parameters = groups.trainable(self.param_groups)
        self._undone, self._notes, before = None, [], self._steps
        if self._parts.follow(parameters):
            self._lengths.forget()
        due = self._lengths.due(self._steps)
        forwards, loss = self._first_passes(closures, due)
        moved_by = self._propose_and_move(parameters, forwards, loss, due=due)
        if not self._reduction.waits:
            self._memory.forget()
        self._tell({"step": before, **moved_by, "loss": loss})
        return torch.tensor(loss, dtype=torch.float64, device="cpu")

    def _propose_and_move(
        self,
        parameters: Sequence[nn.Parameter],
        forwards: Sequence[Forward],
        loss: float,
        *,
        due: bool,
    ) -> dict[str, Any]:
        """Make directions of the gradients, and move along them unless the batch ruins the step.

        Args:
            parameters: The parameters, whose backward passes have run.
            forwards: The passes, where there is a model.
            loss: The loss.
            due: Whether the step has a model.

        Returns:
            What a readout says of it.
        """
        decays = groups.setting(self.param_groups, "weight_decay")
        gradients = groups.add_decay(parameters, decays, self.preconditioner.home)
        skipped = self.preconditioner.counters["skipped_updates"]
        shares, lr = groups.shares(self.param_groups)
        self._proposer.begin(self._mean_damping())
        self._memory.note()
        with flushed_denormals(self._flush):
            self.preconditioner.step()
            further = self._candidates.propose(parameters, gradients, shares, self._parts.numbers)
        if self.preconditioner.updated:
            self._notes += [f"{name} made no finite direction" for name in self._candidates.lost]
        undoable = any("update" in state for state in self.state.values())
        if self._burn_in > 0:
            self._burn_in -= 1
            self._notes.append("this batch only gives statistics")
        elif not math.isfinite(loss):
            self._step_back("the loss is not finite")
        elif self.preconditioner.counters["skipped_updates"] > skipped:
            self._step_back("a gradient is not finite")
        elif self._watch.rises(loss, undoable=undoable):
            self._step_back("the loss is far above the last ones")
        else:
            objective = Objective(parameters, gradients, decays)
            batch = Batch(objective, forwards, loss, shares=shares, lr=lr, with_model=due)
            return self._along(batch, further)
        return {}

    def _along(self, batch: Batch, further: NamedDirections) -> dict[str, Any]:
        """Move along all directions: to the minimum of the model, or without one.

        Args:
            batch: The batch of this step.
            further: What `Candidates.propose` returned.

        Returns:
            What a readout says of it.
        """
        parameters, gradients = batch.objective.parameters, batch.objective.gradients
        shares, proposer = batch.shares, self._proposer
        with flushed_denormals(self._flush):
            covered = self._candidates.covered()
            if self._steps == 0 and self.damping.to_be_measured():
                descent = proposer.rest(parameters, gradients, [], shares, covered)
                self._measure_damping(batch, further + descent)
            proposals = proposer.propose(
                parameters, gradients, shares, self._steps, trials=batch.with_model
            )
            last = [self.state[p].get("update") for p in parameters] if self._momentum else []
            others = further + proposer.rest(parameters, gradients, last, shares, covered)
            usual = proposals[0].directions
            if batch.with_model:
                quadratic = self._exact.along(
                    batch.objective,
                    batch.forwards,
                    [*chain(*(proposal.parts for proposal in proposals)), *others.tensors],
                    damping=self.damping.at(self._steps),
                )
        if not batch.with_model:
            return self._go_on(batch, (usual + others).without_last())
        chosen, quadratic = proposer.choose(proposals, quadratic, self._steps)
        if not quadratic.finite():
            self._step_back("the model of the loss is not finite")
            return {}
        return self._move(batch, NamedDirections(chosen, usual.names) + others, quadratic)

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

    def _first_passes(self, closures: Sequence[Closure], due: bool) -> tuple[list[Forward], float]:
        """Run closures; if their loss undoes the step that waits, run them again.

        Args:
            closures: The closures.
            due: Whether the step has a model.

        Returns:
            The passes, and the loss.
        """
        if not self._reduction.waits:
            return self._forward_backward(closures) if due else self._gradients_alone(closures)
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
        for one in self.candidates:
            one.reset_batch()  # a step whose closure raised has left its statistics
        parameters = groups.trainable(self.param_groups)
        taking = any(one.takes_statistics for one in self.candidates)
        compared = not self._checked or taking
        forwards: list[Forward] = []
        fits: list[Fit] = []
        total = 0.0
        for closure in closures:
            with torch.enable_grad():
                forward, loss = first_pass(
                    self._model,
                    self._outputs,
                    closure,
                    parameters,
                    reuse=self._reuse,
                    loss=self._loss,
                )
                if compared:
                    fits.append(fit(self._loss, forward, len(closures), alike=self._alike))
                    # The Fisher's passes go through checkpoints.
                    with forward.tape.in_same_kernels():
                        self._observe(forward, fits[-1], len(closures))
                forward.backward()
            forwards.append(forward)
            total += float(loss.detach())
            self._eps = torch.finfo(loss.dtype).eps
        problems = [one.problem for one in fits if one.problem is not None]
        error = ValueError(problems[0]) if problems and math.isfinite(total) else None
        mean, sums = self._agree(total, error, further=numbers(fits), parameters=parameters)
        if compared and math.isfinite(mean):
            backend = self.preconditioner.backend
            ranks = 1 if backend.on_paper else backend.world_size
            require_agreement(self._loss, fits, sums, ranks, alike=self._alike)
            self._checked = True
        return forwards, mean

    def _gradients_alone(self, closures: Sequence[Closure]) -> tuple[list[Forward], float]:
        """Run the closures and their backward passes for a step without a model.

        With statistics of calls it takes what a step with a model does: the outputs are needed.

        Returns:
            The passes where there are any, and the loss.
        """
        if any(one.takes_statistics for one in self.candidates):
            return self._forward_backward(closures)
        self.zero_grad()
        for one in self.candidates:
            one.reset_batch()
        total = 0.0
        for closure in closures:
            with torch.enable_grad():
                loss = closure()
                loss.backward()
            total += float(loss.detach())
        return [], self._agree(total, None)[0]

    def _observe(self, forward: Forward, terms: Fit, closures: int) -> None:
        """Take the statistics of a forward pass, with what its terms and its batch count."""
        if terms.problem is not None:
            return
        outputs = forward.joined(forward.outputs)
        heads = outputs if len(outputs) > 1 else outputs[0]
        for one in self.candidates:
            fisher = one._fisher
            if fisher.kind == "empirical":  # no method of it reads calls
                continue
            fisher = replace(fisher, roots=terms.roots(closures, alike=self._alike))
            one._statistics.weigh(terms.share(closures, alike=self._alike))
            fisher.observe(heads, one._capture)

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

    def _measure_damping(self, batch: Batch, others: NamedDirections) -> None:
        """Begin with the damping, of the model and of the preconditioner, whose step brings most.

        Downwards as long as steps bring more; upwards where the first is already too low. What a
        step brings is measured, since with too little damping any model promises much.

        Args:
            batch: The batch of the first step.
            others: The directions beside the preconditioned gradient.
        """
        objective, forwards = batch.objective, batch.forwards
        parameters, policy = objective.parameters, self._damping_within
        decay = groups.mean_decay(self.param_groups)

        def proposal(damping: float) -> Proposal:
            multiple = 1.0 if isinstance(policy, AdaptiveDamping) else policy
            return self._proposer.restart(
                parameters, objective.gradients, batch.shares, multiple * (damping + decay)
            )

        def after(damping: float) -> float:
            directions = [*proposal(damping).parts, *others.tensors]
            model = self._exact.along(objective, forwards, directions, damping=damping)
            if not model.finite():
                return math.inf
            update = combine(parameters, directions, model.minimise() * batch.lr)
            with moved(parameters, update):
                loss = self._evaluate((forward.closure, forward.replay) for forward in forwards)
                objective_after = replace(batch, loss=loss).value
            return objective_after if math.isfinite(loss) else math.inf

        best = best_damping(self.damping.at(0), batch.value, after)
        self.damping.begin(best)
        proposal(self.damping.at(0))

    def _move(
        self, batch: Batch, directions: NamedDirections, quadratic: Quadratic
    ) -> dict[str, Any]:
        """Take the step that minimises the model, and measure what it brought if that is due.

        Args:
            batch: The batch of this step.
            directions: The directions.
            quadratic: The model along them.

        Returns:
            What a readout says of it.
        """
        parameters, decays = batch.objective.parameters, batch.objective.decays
        objective = batch.value
        start = self.damping.at(self._steps)
        coefficients, predicted, damping = self._believable(quadratic, batch.lr, objective)
        if self._rare:
            model = quadratic.damped(damping - start)
            kept_names = directions.without_last().names
            self._lengths.learn(kept_names, model.along([*range(len(kept_names))]).minimise())
        measure = self._reduction.due(self._steps)
        if not measure and not (coefficients.isfinite().all() and math.isfinite(predicted)):
            self._step_back("the step is not finite")  # nobody would reject it
            return {}
        update = combine(parameters, directions.tensors, coefficients)
        states = [self.state[p] for p in parameters]
        before = [p.detach().clone() for p in parameters] if measure else []
        self._forget_frozen(parameters)
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        if not measure:
            self._reduction.keep(states, update)
        else:
            again = [] if self._full_batch else [(f.closure, f.replay) for f in batch.forwards]
            after = self._evaluate(again) if again else None
            told = self._rare or self._reduction.told(self._steps)
            self._reduction.wait(states, update, before, decays, objective, predicted, told=told)
            if after is not None:
                self._judge(after)
        numbers_of_step = {"damping": damping, "predicted": predicted, **self._reduction.tell()}
        self.last = {"loss": batch.loss, **numbers_of_step}
        self._steps += 1
        return {
            **numbers_of_step,
            "coefficients": tuple(coefficients.tolist()),
            "directions": tuple(directions.names),
        }

    def _forget_frozen(self, parameters: Sequence[nn.Parameter]) -> None:
        for frozen in set(self.state) - set(parameters):
            self.state[frozen].pop("update", None)  # of long ago, once it is thawed

    def _go_on(self, batch: Batch, directions: NamedDirections) -> dict[str, Any]:
        """Take a step without a model, along all directions but the last update.

        Returns:
            What a readout says of it.
        """
        parameters = batch.objective.parameters
        coefficients = self._lengths.take(directions.names)
        if coefficients is None:
            self._lengths.renew()
            self._notes.append("directions are others than the last model's: none was taken")
            return {}
        coefficients = coefficients * batch.lr
        update = combine(parameters, directions.tensors, coefficients)
        if not all(bool(tensor.isfinite().all()) for tensor in update):
            self._step_back("the step is not finite")
            return {}
        self._forget_frozen(parameters)
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        self._reduction.keep([self.state[p] for p in parameters], update)
        damping = self.damping.at(self._steps)
        self.last = {"loss": batch.loss, "damping": damping, **self._reduction.tell()}
        self._steps += 1
        self._notes.append("without a model")
        return {
            "damping": damping,
            "coefficients": tuple(coefficients.tolist()),
            "directions": tuple(directions.names),
        }

    def _believable(
        self, quadratic: Quadratic, lr: float, objective: float
    ) -> tuple[Tensor, float, float]:
        """Minimise the model; with more damping, or part of the way, if it promises too much.

        No loss falls by more than it is above its floor, so what promises that is no model of it at
        such a length: curvature that vanishes, as that of saturated outputs, makes it.

        Returns:
            The coefficients, what they promise, and the damping with which they do.
        """
        start = self.damping.at(self._steps)
        coefficients = quadratic.minimise() * lr
        predicted, damping = quadratic.change(coefficients), start
        floor = self._loss.floor
        # Below its floor the closure's loss is another one, by a constant at least.
        if floor is None or not objective > floor or not -predicted > objective - floor:
            return coefficients, predicted, damping
        self._notes.append("the model promised more than the loss can fall")
        model = quadratic
        for _ in range(MOST_DAMPINGS):
            self.damping.observe(-math.inf)
            now = self.damping.at(self._steps)
            if now == damping:
                break
            model, damping = quadratic.damped(now - start), now
            coefficients = model.minimise() * lr
            predicted = model.change(coefficients)
            if not -predicted > objective - floor:
                return coefficients, predicted, damping
        coefficients = model.shortened(coefficients, objective - floor)
        return coefficients, model.change(coefficients), damping

    def _judge(self, loss: float) -> bool:
        """Keep the step that waits for this loss, or undo it."""
        penalty = groups.penalty(self._reduction.decayed(self.state))
        accepted = self._reduction.judge(self.state, loss + penalty, self._eps)
        self.counters["rejected_steps"] += not accepted
        if accepted:
            self._memory.forget()
        else:
            self._memory.recall()
            self._lengths.renew()
            self._undone = ROSE if math.isfinite(loss) else "it was not finite"
        self._below_rounding = self._below_rounding + 1 if self._reduction.silent else 0
        if self._reduction.silent:
            self._notes.append("the change was below the loss's rounding")
        return accepted

    def _tell(self, seen: dict[str, Any]) -> None:
        """Make the readout of a step, and warn once of a run that stands still."""
        policy = self._damping_within
        adaptive = isinstance(policy, AdaptiveDamping)
        dampings = policy.at(self._mean_damping()) if isinstance(policy, AdaptiveDamping) else []
        if self.damping.at_cap() and self._undone == ROSE:
            self._notes.append("the damping is at its cap")
            self._warn_once(
                "the damping of TrustRegion is at its cap, and steps are still undone: the loss "
                "does not fall along what is its gradient. Does the closure return the same loss "
                "each time that it runs (no data drawn within; no full_batch=True with dropout)?"
            )
        if self._below_rounding == SILENCE:
            self._warn_once(
                f"the last {SILENCE} steps of TrustRegion that were judged changed the loss by "
                f"less than its rounding: training has converged in this floating type, or stands "
                f"still"
            )
        self.readout = Readout(
            **{"damping": self.damping.at(self._steps), **seen},
            preconditioner_dampings=tuple(dampings) if adaptive else (),
            undone=self._undone,
            notes=tuple(self._notes),
        )
        if self._on_step is not None:
            self._on_step(self.readout)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            warnings.warn(text, stacklevel=6)
        self._warned = True

    def _step_back(self, why: str) -> None:
        """Undo the last update: it, or this batch, made something that is large or not finite."""
        self.counters["skipped_steps"] += 1
        self._undone = why
        self._memory.recall()
        self._lengths.renew()
        self.damping.observe(-math.inf)
        for parameter, state in self.state.items():  # what has been frozen since is among them
            last = state.pop("update", None)
            if last is not None:
                with torch.no_grad():
                    parameter.sub_(last)

    # -- pieces -------------------------------------------------------------------------------

    def _evaluate(self, passes: Iterable[tuple[Closure, Replay]]) -> float:
        """Return the loss at the parameters of now."""
        on_this_rank, error = math.nan, None
        try:
            on_this_rank = sum(
                evaluated(closure, replay, differentiates=self._outputs.differentiates)
                for closure, replay in passes
            )
        except Exception as raised:  # whatever it is: the other ranks wait, and must be told
            error = raised
        return self._agree(on_this_rank, error)[0]

    def _mean_damping(self) -> float:
        return self.damping.at(self._steps) + groups.mean_decay(self.param_groups)

    def _agree(
        self,
        loss: float,
        error: Exception | None,
        *,
        further: Sequence[float] = (),
        parameters: Sequence[nn.Parameter] = (),
    ) -> tuple[float, list[float]]:
        """Agree with all ranks on a loss, on who raises, and on what must be the same.

        Returns:
            The mean over ranks, and the sums of further numbers.
        """
        backend = self.preconditioner.backend

        def common() -> dict[str, object]:
            return {
                "step": self._steps,
                "lr and weight_decay of the param groups": groups.numbers(self.param_groups),
                "damping": damping_at(self.damping, self._steps),
                "burn_in": self._burn_in,
                "whether a step waits for its verdict": self._reduction.waits,
                "rounding of the loss": self._eps,
                **agreeing.gradients_in_common(backend, self.preconditioner.home, parameters),
            }

        return agreeing.agree(backend, loss, error, common=common, further=further)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self, *, curvature: bool = True) -> dict[str, Any]:
        """Return the optimizer's state, the preconditioner's and the damping's.

        Args:
            curvature: Whether the preconditioner's is in it, gathered from all ranks; without it
                save `soframe.checkpoint.part` of ``preconditioner`` beside.

        Returns:
            For ``torch.save``; see `soframe.Preconditioner.state_dict` for when to call it. With
            several methods the state of each; while a step waits for its verdict also what methods
            that remember gradients had before it.

        Raises:
            ValueError: If methods remember gradients, and ``curvature`` is false.
        """
        policy = self._damping_within
        if not curvature and (self._memory.any or self._candidates.others):
            raise ValueError(
                "curvature=False leaves the state of one preconditioner to soframe.checkpoint, and "
                "here several methods, or one that remembers gradients, have theirs, as it is and "
                "as it was before a step that may be undone: save state_dict() whole"
            )
        methods: dict[str, Any] = {}
        if self._candidates.others:
            methods[settings.FURTHER] = [one.state_dict() for one in self._candidates.others]
        if self._reduction.waits and self._memory.noted:
            with self._memory.as_before():
                methods[settings.BEFORE] = [one.state_dict() for one in self.candidates]
        of_torch = super().state_dict()
        # In copies of the dicts, into which the next steps write; no tensor in them changes.
        of_torch["state"] = {number: dict(kept) for number, kept in of_torch["state"].items()}
        state = {
            **of_torch,
            **methods,
            "curvature": self.preconditioner.state_dict() if curvature else None,
            "trust_region": {
                "version": settings.VERSION,
                "steps": self._steps,
                "burn_in": self._burn_in,
                "damping": self.damping.state(),
                "preconditioner_damping": policy.state()
                if isinstance(policy, AdaptiveDamping)
                else {},
                "counters": dict(self.counters),
                "losses": self._watch.state(),
                "reduction": self._reduction.state(),
                "eps": self._eps,
                **({"lengths": self._lengths.state()} if self._rare else {}),
            },
        }
        sealed = checksums.seal(settings.sealed_part(state))
        state["trust_region"][checksums.KEY] = sealed[checksums.KEY]
        return state

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
        checks = [one._check for one in self.candidates]

        def check() -> None:
            damping = self._damping_within
            adaptive = damping if isinstance(damping, AdaptiveDamping) else None
            settings.check_state(state_dict, self.damping, adaptive, self.param_groups)
            settings.check_methods(
                state_dict, len(self.candidates), remembers=self._memory.any, checks=checks
            )

        def common() -> str:
            saved_region = settings.sealed_part(state_dict)["trust_region"]
            return checksums.text([state_dict["curvature"] is None, saved_region])

        agree(self.preconditioner.backend, check, common)
        saved_region = state_dict["trust_region"]
        self._memory.forget()
        if settings.BEFORE in state_dict:
            for one, saved in zip(self.candidates, state_dict[settings.BEFORE], strict=True):
                one.load_state_dict(saved)
            self._memory.note()
        for one, saved in zip(self.candidates, settings.of_methods(state_dict), strict=True):
            if saved is not None:
                one.load_state_dict(saved)
        keys = {*settings.KEYS, settings.FURTHER, settings.BEFORE}
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in keys})
        self._steps, self._burn_in = saved_region["steps"], saved_region["burn_in"]
        self.damping.load(saved_region["damping"])
        if isinstance(self._damping_within, AdaptiveDamping):
            self._damping_within.load(saved_region["preconditioner_damping"])
        self.counters = dict(saved_region["counters"])
        self._watch.load(saved_region.get("losses", []))
        self._reduction.load(saved_region.get("reduction", {}))
        self._eps = float(saved_region.get("eps", 0.0))
        self._lengths.load(saved_region.get("lengths", {}))

    def close(self) -> None:
        """Remove every hook."""
        for one in self.candidates:
            one.close()
        self._outputs.close()
