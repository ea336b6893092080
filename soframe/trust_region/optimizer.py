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

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from soframe.blocks import home, registration
from soframe.checks.copies import Uncopied
from soframe.checks.savers import refuse_saver_of_parameters
from soframe.damping.adaptive import AdaptiveDamping
from soframe.damping.policies import DampingChoice, adopted
from soframe.derivatives.denormals import flushed_denormals
from soframe.derivatives.forward import Closure, Forward, Outputs, evaluated
from soframe.derivatives.replay import Replay, Snapshot
from soframe.derivatives.twice import Direction
from soframe.losses.base import Loss
from soframe.preconditioner import Preconditioner
from soframe.setup import building
from soframe.state import checksums
from soframe.state.saving import agree
from soframe.state.stateful import unpacked, whole_for_dcp
from soframe.trust_region import agreeing, candidates, groups, settings
from soframe.trust_region.candidates import Beside, Candidates
from soframe.trust_region.declared import (
    Fit,
    fit,
    numbers,
    require_agreement,
)
from soframe.trust_region.exact import ExactModel, Objective
from soframe.trust_region.initial import best_damping
from soframe.trust_region.lengths import Lengths
from soframe.trust_region.memory import Memory
from soframe.trust_region.parts import Parts
from soframe.trust_region.passes import closures_of, first_pass, moved
from soframe.trust_region.proposals import LAST, Proposal, Proposer
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


class TrustRegion(Uncopied, torch.optim.Optimizer):
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
            blocks_damping = preconditioner_damping
            if blocks_damping is None:
                blocks_damping = AdaptiveDamping()
            if isinstance(blocks_damping, AdaptiveDamping):
                blocks_damping = copy.copy(blocks_damping)  # an instance may serve many optimizers
                blocks_damping.restart()
            if on_step is not None and not callable(on_step):
                raise TypeError(f"on_step must be callable with a Readout, not {on_step!r}")
            given = {"fisher": fisher, **preconditioner}
            built = settings.check(model, loss, params, given)
            methods = candidates.methods_of(preconditioner)
            if preconditioner_damping is None and not methods.damped:
                blocks_damping = 1.0  # no trial finds a damping for what is not damped
            settings.require_damped(blocks_damping, methods.damped)
            self._model = registration.unwrap(model)
            every = self._model.parameters() if params is None else params
            super().__init__(every, {"lr": lr, "weight_decay": weight_decay})
            groups.check_all(self._model, self.param_groups)
            self.damping = adopted(settings.whole_model_damping(damping))
            chosen = settings.Own(
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
            self._steps, self._own_damping, self._loss = 0, blocks_damping, built
            self._mean_damping()  # what it raises it raises here
            self._momentum, self._full_batch, self._burn_in = momentum, full_batch, burn_in
            self._flush, self._reuse = flush_denormals, reuse_activations
            # Of unequal batches, whether the statistics of the preconditioner are told already.
            self._alike = preconditioner.get("loss_average") == "global"
            self._checked = False
            self._rare = model_every > 1
            self._lengths = Lengths(model_every)
            self._reduction = Reduction(self.damping, reject, full_batch or self._rare)
            self._on_step, self._eps, self._silent, self._said = on_step, 0.0, 0, False
            self._undone: str | None = None
            self._notes: list[str] = []
            told = settings.PreconditionersDamping(
                self._preconditioner_damping, chosen, groups.numbers(self.param_groups)
            )
            further = settings.of_preconditioner(preconditioner, burn_in)
        # A method that reads no calls has no Fisher; one that nobody has, and was asked for, is
        # refused.
        reads = [methods.captures(which) for which in range(len(methods.others) + 1)]
        reads[0] = reads[0] or (not any(reads) and fisher != settings.FISHER)
        plain: dict[str, Any] = {"fisher": "empirical"}
        fishers = [{"fisher": fisher, "loss": built} if captures else plain for captures in reads]
        self.preconditioner = candidates.OneOfSeveral(
            self._model,
            method=methods.first,
            auxiliary=methods.auxiliary,
            backend=backend,
            damping=told,
            kl_clip=None,
            **fishers[0],
            **further,
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
                        **further,
                    )
                )
            for one in (self.preconditioner, *others):
                candidates.require_recallable(one.blocks)
            candidates.require_read((self.preconditioner, *others), preconditioner)
        except Exception:
            for one in (*others, self.preconditioner):
                one.close()
            raise
        self._candidates = Candidates(self.preconditioner, others)
        self._memory = Memory(self._candidates.every)
        adaptive = blocks_damping if isinstance(blocks_damping, AdaptiveDamping) else None
        self._proposer = Proposer(adaptive, self.preconditioner, self._parts)
        self._outputs = Outputs(self._model)
        self._exact = ExactModel(self.preconditioner.backend, isotropic=built.isotropic)
        self.counters = dict.fromkeys(settings.COUNTERS, 0)
        self.last: dict[str, float] = {}
        self.readout: Readout | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model: ``params``, and ``lr`` and ``weight_decay`` if they differ.

        Raises:
            ValueError: If a setting is unknown or out of range, or a parameter not the model's.
        """
        super().add_param_group(param_group)
        groups.check_last(self._model, self.param_groups)

    def _preconditioner_damping(self, step: int) -> float:
        del step  # it counts burn-in too
        damping, chosen = self._mean_damping(), self._own_damping
        if isinstance(chosen, AdaptiveDamping):
            return max(chosen.at(damping))
        return chosen * damping

    def _tied_damping(self, step: int) -> float:
        """Return the damping of further methods: nobody tries others for them."""
        del step
        multiple = self._own_damping
        return self._mean_damping() * (1.0 if isinstance(multiple, AdaptiveDamping) else multiple)

    @property
    def candidates(self) -> tuple[Preconditioner, ...]:
        """What makes the directions of each method, `preconditioner` first: see its ``report``."""
        return self._candidates.every

    # -- the step -----------------------------------------------------------------------------

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
        self._undone, self._notes, seen = None, [], {"step": self._steps}
        if self._parts.follow(parameters):
            self._lengths.forget()
        due = self._lengths.due(self._steps)
        forwards, loss = self._first_passes(closures, due)
        with self.preconditioner.not_unnoticed():
            made = self._propose_and_move(parameters, forwards, loss, due=due)
        if not self._reduction.waits:
            self._memory.forget()
        self._tell({**seen, **made, "loss": loss})
        return torch.tensor(loss, dtype=torch.float64)

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
        gradients = groups.add_decay(
            parameters,
            groups.setting(self.param_groups, "weight_decay"),
            self.preconditioner.home,
        )
        skipped = self.preconditioner.counters["skipped_updates"]
        shares, lr = groups.shares(self.param_groups)
        self._proposer.begin(self._mean_damping())
        self._memory.note()
        with flushed_denormals(self._flush):
            self.preconditioner.step()
            further = self._candidates.propose(parameters, gradients, shares, self._parts.numbers)
        if self.preconditioner.updated:
            self._notes += [f"{one} made no finite direction" for one in self._candidates.lost]
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
            objective = Objective(
                parameters, gradients, groups.setting(self.param_groups, "weight_decay")
            )
            return self._along(objective, forwards, further, (shares, lr), loss=loss, due=due)
        return {}

    def _along(
        self,
        objective: Objective,
        forwards: Sequence[Forward],
        further: Sequence[Direction],
        scale: tuple[Sequence[float], float],
        *,
        loss: float,
        due: bool,
    ) -> dict[str, Any]:
        """Move along all directions: to the minimum of the model, or without one.

        Args:
            objective: The objective.
            forwards: The passes, where there is a model.
            further: What `Candidates.propose` returned.
            scale: See `groups.shares`.
            loss: The loss.
            due: Whether the step has a model.

        Returns:
            What a readout says of it.
        """
        parameters, gradients = objective.parameters, objective.gradients
        shares, lr = scale
        with flushed_denormals(self._flush):
            covered = self._candidates.covered()
            if self._steps == 0 and self.damping.to_be_measured():
                also, _ = self._proposer.rest(parameters, gradients, [], shares, covered)
                also = [*further, *also]
                self._measure_damping(objective, forwards, shares, also, loss=loss, lr=lr)
            proposals = self._proposer.propose(
                parameters, gradients, shares, self._steps, trials=due
            )
            of_first = ["preconditioned"] * len(proposals[0].parts)
            last = [self.state[p].get("update") for p in parameters] if self._momentum else []
            others, names = self._proposer.rest(parameters, gradients, last, shares, covered)
            others, names = [*further, *others], [*of_first, *self._candidates.names, *names]
            if due:
                directions = [*chain(*(each.parts for each in proposals)), *others]
                damping = self.damping.at(self._steps)
                quadratic = self._exact.along(objective, forwards, directions, damping=damping)
        if not due:
            directions = [*proposals[0].parts, *others]
            return self._go_on(parameters, loss, lr, directions, names=without_last(names))
        chosen, quadratic = self._proposer.choose(proposals, quadratic, self._steps)
        if not quadratic.finite():
            self._step_back("the model of the loss is not finite")
            return {}
        directions = [*chosen, *others]
        return self._move(forwards, parameters, loss, lr, directions, quadratic, names=names)

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
                    self._model, self._outputs, closure, parameters, reuse=self._reuse
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

    def _measure_damping(
        self,
        objective: Objective,
        forwards: Sequence[Forward],
        shares: Sequence[float],
        also: Sequence[Direction],
        *,
        loss: float,
        lr: float,
    ) -> None:
        """Begin with the damping, of the model and of the preconditioner, whose step brings most.

        Downwards as long as steps bring more; upwards where the first is already too low. What a
        step brings is measured, since with too little damping any model promises much.
        """
        parameters, gradients = objective.parameters, objective.gradients
        policy = self._own_damping
        decay = groups.mean_decay(self.param_groups)

        def proposal(damping: float) -> Proposal:
            multiple = 1.0 if isinstance(policy, AdaptiveDamping) else policy
            return self._proposer.restart(
                parameters, gradients, shares, multiple * (damping + decay)
            )

        def after(damping: float) -> float:
            directions = [*proposal(damping).parts, *also]
            model = self._exact.along(objective, forwards, directions, damping=damping)
            if not model.finite():
                return math.inf
            update = combine(parameters, directions, model.minimise() * lr)
            with moved(parameters, update):
                loss_after = self._evaluate((one.closure, one.replay) for one in forwards)
                penalty = groups.penalty(zip(parameters, objective.decays, strict=True))
            return loss_after + penalty if math.isfinite(loss_after) else math.inf

        start = loss + groups.penalty(zip(parameters, objective.decays, strict=True))
        best = best_damping(self.damping.at(0), start, after)
        self.damping.begin(best)
        proposal(self.damping.at(0))

    def _move(
        self,
        forwards: Sequence[Forward],
        parameters: Sequence[nn.Parameter],
        loss: float,
        lr: float,
        directions: Sequence[Direction],
        quadratic: Quadratic,
        *,
        names: Sequence[str],
    ) -> dict[str, Any]:
        """Take the step that minimises the model, and measure what it brought if that is due.

        Returns:
            What a readout says of it.
        """
        decays = groups.setting(self.param_groups, "weight_decay")
        objective = loss + groups.penalty(zip(parameters, decays, strict=True))
        start = self.damping.at(self._steps)
        coefficients, predicted, damping = self._believable(quadratic, lr, objective)
        if self._rare:
            model = quadratic.damped(damping - start)
            kept_names = without_last(names)
            self._lengths.learn(kept_names, model.along([*range(len(kept_names))]).minimise())
        measure = self._reduction.due(self._steps)
        if not measure and not (coefficients.isfinite().all() and math.isfinite(predicted)):
            self._step_back("the step is not finite")  # nobody would reject it
            return {}
        update = combine(parameters, directions, coefficients)
        states = [self.state[p] for p in parameters]
        before = [p.detach().clone() for p in parameters] if measure else []
        self._forget_frozen(parameters)
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        if not measure:
            self._reduction.keep(states, update)
        else:
            again = [] if self._full_batch else [(one.closure, one.replay) for one in forwards]
            after = self._evaluate(again) if again else None
            told = self._rare or self._reduction.told(self._steps)
            self._reduction.wait(states, update, before, decays, objective, predicted, told=told)
            if after is not None:
                self._judge(after)
        told_last = self._reduction.tell()
        self.last = {"loss": loss, "damping": damping, "predicted": predicted, **told_last}
        self._steps += 1
        seen = {"damping": damping, "predicted": predicted, **told_last}
        told_of = {"coefficients": tuple(coefficients.tolist()), "directions": tuple(names)}
        return {**seen, **told_of}

    def _forget_frozen(self, parameters: Sequence[nn.Parameter]) -> None:
        for frozen in set(self.state) - set(parameters):
            self.state[frozen].pop("update", None)  # of long ago, once it is thawed

    def _go_on(
        self,
        parameters: Sequence[nn.Parameter],
        loss: float,
        lr: float,
        directions: Sequence[Direction],
        *,
        names: Sequence[str],
    ) -> dict[str, Any]:
        """Take a step without a model.

        Returns:
            What a readout says of it.
        """
        coefficients = self._lengths.take(names)
        if coefficients is None:
            self._lengths.renew()
            self._notes.append("directions are others than the last model's: none was taken")
            return {}
        coefficients = coefficients * lr
        update = combine(parameters, directions[: len(names)], coefficients)
        if not all(bool(tensor.isfinite().all()) for tensor in update):
            self._step_back("the step is not finite")
            return {}
        self._forget_frozen(parameters)
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        self._reduction.keep([self.state[p] for p in parameters], update)
        now = self.damping.at(self._steps)
        self.last = {"loss": loss, "damping": now, **self._reduction.tell()}
        self._steps += 1
        self._notes.append("without a model")
        seen = {"damping": now, "directions": tuple(names)}
        return {**seen, "coefficients": tuple(coefficients.tolist())}

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
        self._silent = self._silent + 1 if self._reduction.silent else 0
        if self._reduction.silent:
            self._notes.append("the change was below the loss's rounding")
        return accepted

    def _tell(self, seen: dict[str, Any]) -> None:
        """Make the readout of a step, and warn once of a run that stands still."""
        policy = self._own_damping
        adaptive = isinstance(policy, AdaptiveDamping)
        dampings = policy.at(self._mean_damping()) if isinstance(policy, AdaptiveDamping) else []
        if self.damping.at_cap() and self._undone == ROSE:
            self._notes.append("the damping is at its cap")
            self._warn_once(
                "the damping of TrustRegion is at its cap, and steps are still undone: the loss "
                "does not fall along what is its gradient. Does the closure return the same loss "
                "each time that it runs (no data drawn within; no full_batch=True with dropout)?"
            )
        if self._silent == SILENCE:
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
        if not self._said:
            warnings.warn(text, stacklevel=4)
        self._said = True

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
                "damping": self.damping.at(self._steps),
                "burn_in": self._burn_in,
                "whether a step waits for its verdict": self._reduction.waits,
                "rounding of the loss": self._eps,
                **agreeing.gradients_in_common(backend, self.preconditioner.home, parameters),
            }

        return agreeing.agree(backend, loss, error, common=common, further=further)

    # -- state --------------------------------------------------------------------------------

    @whole_for_dcp
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
            RuntimeError: If it is `torch.distributed.checkpoint.state_dict` that asks.
        """
        refuse_saver_of_parameters(self)
        policy = self._own_damping
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
            RuntimeError: If it is `torch.distributed.checkpoint.state_dict` that loads.
        """
        refuse_saver_of_parameters(self)
        state_dict = unpacked(state_dict)
        checks = [one._check for one in self.candidates]

        def check() -> None:
            damping = self._own_damping
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
                one._load(saved, lambda: None)
            self._memory.note()
        for one, saved in zip(self.candidates, settings.of_methods(state_dict), strict=True):
            if saved is not None:
                one._load(saved, lambda: None)
        keys = {*settings.KEYS, settings.FURTHER, settings.BEFORE}
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in keys})
        self._steps, self._burn_in = saved_region["steps"], saved_region["burn_in"]
        self.damping.load(saved_region["damping"])
        if isinstance(self._own_damping, AdaptiveDamping):
            self._own_damping.load(saved_region["preconditioner_damping"])
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


def without_last(names: Sequence[str]) -> list[str]:
    """Return the names of directions before the last update's, which come at the end."""
    return [name for name in names if name != LAST]
