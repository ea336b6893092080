"""The optimizer that owns the step: K-FAC with a trust region (Martens and Grosse, 2015).

The preconditioned gradient and the last update are the directions; the minimum of the exact
quadratic model is the length along each. Levenberg-Marquardt damping measures the trust in that
model. So it has no learning rate to tune::

    optimizer = soframe.TrustRegion(model, loss="cross-entropy")
    ...
    def closure():
        return criterion(model(inputs), targets)  # no backward

    loss = optimizer.step(closure)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from soframe.checks.warning import warn
from soframe.damping.policies import DampingChoice
from soframe.losses.base import Loss
from soframe.preconditioner import Preconditioner
from soframe.settings import Distribution, group_of
from soframe.setup.choosing import choose_backend, starting
from soframe.state.saving import agree
from soframe.step.engine import untraced
from soframe.trust_region import param_groups, settings
from soframe.trust_region.adaptive import AdaptiveDamping
from soframe.trust_region.base import ClosureOptimizer
from soframe.trust_region.declared import Fit, error_of, fit, numbers, require_agreement
from soframe.trust_region.exact import Batch, exact_model
from soframe.trust_region.forward import Closure, Forward, closures_of
from soframe.trust_region.layer_groups import LayerGroups
from soframe.trust_region.proposals import Proposer
from soframe.trust_region.quadratic import Quadratic, combine
from soframe.trust_region.readout import LAST, PRECONDITIONED, STEEPEST, OnStep, Readout
from soframe.trust_region.reduction import Reduction
from soframe.trust_region.replay import Replay
from soframe.trust_region.twice import Direction
from soframe.trust_region.watch import LossWatch

MOST_DAMPINGS = 60
"""The most raises of the damping in one step, until the predicted reduction is possible."""

ROSE = "the objective rose"
"""The most common reason for undoing an update."""

SILENCE = 20
"""Consecutive steps below the loss's rounding, until a warning."""


class TrustRegion(ClosureOptimizer):
    """K-FAC with damping, step length and momentum from the exact quadratic model.

    Args:
        model: The model; it returns a tensor, or several as a tuple or list: then the loss is a
            `soframe.losses.SumLoss` with a term for each. Wrapped in DistributedDataParallel on
            several ranks: the closure calls the wrapper. Parameters may be frozen and thawed.
        loss: The loss of the Fisher: a name (``"mse"``, ``"cross-entropy"``, ...), class or
            instance. It must be the loss of the closure, without weights of classes or samples;
            steps that take statistics check it.
        damping: The damping policy: a name, class or instance; or a number, or a callable of the
            step.
        params: Param groups, each optionally with its own ``lr`` and ``weight_decay``; or
            parameters. By default all of the model's. See `soframe.trust_region.param_groups`.
        weight_decay: Coefficient of ``1/2 ||parameters||^2`` in the objective.
        momentum: Whether the last update is a direction of the model.
        layer_groups: The number of layer groups with coefficients of their own in the step; see
            `soframe.trust_region.layer_groups`.
        lr: Multiplies the update; 1 is the minimum of the model. Groups move in proportion to
            theirs.
        preconditioner_damping: The damping within the preconditioner: an `AdaptiveDamping`, which
            begins with the policy's, or a multiple of the policy's.
        reject: Undo a step, at steps that measure the reduction ratio, if the objective rose.
        full_batch: Whether every step has the same data and the same loss (not with dropout). Then
            the next step's loss measures every step, and may undo the last: change no parameter in
            between. Else the closures run once more at some steps. See `settle`.
        max_increase: Undo the last update if a step's loss is more than this many times the largest
            of the ten before, or twice that with fewer; None for never.
        burn_in: Batches before the first update that only give statistics.
        on_step: Called with a `soframe.trust_region.Readout` after each step, such as
            `soframe.trust_region.History`.
        **preconditioner: Further settings of `soframe.Preconditioner`, in place of
            `soframe.trust_region.settings.PRECONDITIONER`. The Fisher is ``"monte-carlo"`` by
            default (``"forward-only"`` for methods that read no output gradients), or
            ``statistics=soframe.Statistics(fisher="type-2")``.

    Attributes:
        preconditioner: The preconditioner.
        damping: A copy of the damping policy.
        counters: The number of ``"rejected_steps"`` (the objective rose), and of
            ``"skipped_steps"`` (a value was not finite, or the loss far above the last ones).
        last: Of the last step that was taken ``"loss"``, ``"damping"`` and ``"predicted"``;
            ``"change"`` and ``"ratio"`` of the last one that was measured.
        readout: The `Readout` of the last step; None before the first.

    Raises:
        ValueError: If a setting is out of range, a combination is refused
            (`soframe.trust_region.settings.REFUSED`), or a parameter that needs a gradient is in no
            group.
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
        layer_groups: int = 3,
        lr: float = 1.0,
        preconditioner_damping: AdaptiveDamping | float | None = None,
        reject: bool = True,
        full_batch: bool = False,
        max_increase: float | None = 1.5,
        burn_in: int = 0,
        on_step: OnStep | None = None,
        **preconditioner: Any,
    ) -> None:
        ranks: Distribution = group_of("distribution", preconditioner)
        with starting(lambda: choose_backend(ranks.backend, model)):
            self._loss = settings.check(loss, preconditioner)
            self._damping_within = settings.damping_within(preconditioner_damping)
            super().__init__(
                model, damping, params, lr=lr, weight_decay=weight_decay, on_step=on_step
            )
            trained = param_groups.trainable(self.param_groups)
            self._layer_groups = LayerGroups(self._model, layer_groups, trained)
            self._watch = LossWatch(max_increase)
            self._mean_damping()  # raises here if a callable damping raises
        # No loss falls below its floor.
        self._floor = -math.inf if self._loss.floor is None else self._loss.floor
        self._momentum, self._full_batch, self._burn_in = momentum, full_batch, burn_in
        self._settings = {
            "damping": self.damping,
            "momentum": momentum,
            "layer_groups": layer_groups,
            "preconditioner_damping": self._damping_within,
            "reject": reject,
            "full_batch": full_batch,
            "max_increase": max_increase,
        }
        self._alike = group_of("statistics", preconditioner).loss_average == "global"
        self._reduction = Reduction(self.damping, reject, full_batch)
        self._checked = self._warned = False
        self._below_rounding = 0
        self._undone: str | None = None
        self._notes: list[str] = []
        self.last: dict[str, float] = {}
        self.preconditioner = Preconditioner(
            model,
            damping=self._preconditioner_damping,
            **settings.of_preconditioner(preconditioner, self._loss, burn_in),
        )
        self._backend = self.preconditioner.backend
        self._proposer = Proposer(self.preconditioner, self._damping_within, self._layer_groups)

    def _preconditioner_damping(self, step: int) -> float:
        del step  # it counts burn-in too
        return max(self._damping_within.at(self._mean_damping()))

    def _mean_damping(self) -> float:
        return self.damping.at(self._steps) + param_groups.mean_decay(self.param_groups)

    @untraced
    def step(self, closure: Closure | Sequence[Closure]) -> Tensor:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Runs the model on a batch, once, and returns the loss, a scalar that depends on
                the parameters through the model's outputs alone; it does not call ``backward``. For
                micro-batches a list of closures whose losses add up to the batch's (``loss /
                len(closures)`` for means; ``loss * n / N`` for n of N samples).

        Returns:
            The loss before the update, averaged over ranks, in float64.

        Raises:
            ValueError: If the closure's loss is not the declared one, or param groups and model no
                longer agree.
            TypeError: If the closure does not return a scalar tensor.
            RuntimeError: If a closure does not run the model, or its loss has terms that do not go
                through the model's output, or the model has no derivatives along directions; or if
                another rank raises.
        """
        param_groups.check_all(self._model, self.param_groups)
        closures = closures_of(closure)
        parameters = param_groups.trainable(self.param_groups)
        self._undone, self._notes, before = None, [], self._steps
        self._layer_groups.follow(parameters)
        forwards, loss = self._first_passes(closures)
        decays = param_groups.setting(self.param_groups, "weight_decay")
        # In copies: the preconditioner overwrites them.
        gradients = [g.clone() for g in param_groups.with_decay(parameters, decays)]
        taken = self._propose_and_move(Batch(parameters, gradients, decays, forwards, loss))
        self._tell({"step": before, **taken, "loss": loss})
        return torch.tensor(loss, dtype=torch.float64, device="cpu")

    def settle(self, closure: Closure | Sequence[Closure]) -> bool:
        """Measure the last step if its verdict is pending, as with ``full_batch``.

        Args:
            closure: As for `step`; it has no side effects here.

        Returns:
            False if that step has been undone.
        """
        if not self._reduction.waits:
            return True
        return self._judge(self._evaluate((c, Replay(self._model)) for c in closures_of(closure)))

    def _first_passes(self, closures: Sequence[Closure]) -> tuple[list[Forward], float]:
        """Run the closures; once more if their loss undoes the pending step."""
        if not self._reduction.waits:
            return self._forward_backward(closures)
        before = Replay(self._model)
        forwards, loss = self._forward_backward(closures)
        if self._judge(loss):
            return forwards, loss
        del forwards  # and its graph
        before.restore()
        return self._forward_backward(closures)

    def _forward_backward(self, closures: Sequence[Closure]) -> tuple[list[Forward], float]:
        """Run the closures and their backward passes, and the Fisher's at statistics steps."""
        self.zero_grad()
        self.preconditioner.reset_batch()  # a step whose closure raised has left its statistics
        parameters = param_groups.trainable(self.param_groups)
        compared = not self._checked or self.preconditioner.takes_statistics
        fits: list[Fit] = []

        def compare(forward: Forward) -> None:
            if compared:
                fits.append(self._compare(forward, len(closures)))

        forwards, total = self._passes(closures, self._loss, compare)
        gradients = param_groups.gradients(parameters)
        mean, sums = self._agree(
            total, error_of(fits, total), further=numbers(fits), gradients=gradients
        )
        if compared and math.isfinite(mean):
            ranks = 1 if self._backend.on_paper else self._backend.world_size
            require_agreement(self._loss, fits, sums, ranks, alike=self._alike)
            self._checked = True
        return forwards, mean

    def _compare(self, forward: Forward, closures: int) -> Fit:
        """Compare a closure's loss with the declared one, and take statistics if they agree."""
        compared = fit(self._loss, forward, closures)
        if compared.problem is None:
            weight = compared.weight(closures, alike=self._alike)
            heads = forward.outputs if len(forward.outputs) > 1 else forward.outputs[0]
            with forward.kernels.again():  # the Fisher's passes go through checkpoints
                self.preconditioner.observe(heads, weight=weight)
        return compared

    def _propose_and_move(self, batch: Batch) -> dict[str, Any]:
        """Precondition, and move unless the batch prevents it; return the readout's numbers."""
        self._proposer.begin(self._mean_damping())
        self.preconditioner.step()
        undoable = any("update" in state for state in self.state.values())
        if self._burn_in > 0:
            self._burn_in -= 1
            self._notes.append("this batch only gives statistics")
        elif not math.isfinite(batch.loss):
            self._step_back("the loss is not finite")
        elif not self.preconditioner.updated:
            self._step_back("a gradient is not finite")
        elif self._watch.rises(batch.loss, undoable=undoable):
            self._step_back("the loss is far above the last ones")
        else:
            return self._along(batch)
        return {}

    def _along(self, batch: Batch) -> dict[str, Any]:
        """Move to the minimum of the model along all directions; return the readout's numbers."""
        proposer = self._proposer
        shares, lr = param_groups.shares(self.param_groups)
        steepest = self._steepest(batch, shares)
        if self._steps == 0 and self.damping.to_be_measured():
            self._begin_damping(batch, steepest, shares, lr)
        directions: list[Direction] = []
        proposals = proposer.propose(batch, shares, self._steps)
        for proposal in proposals:
            directions += proposal.parts
        last = self._last_updates(batch.parameters, shares)
        damping = self.damping.at(self._steps)
        quadratic = exact_model(self._backend, batch, directions + steepest + last, damping)
        chosen, quadratic = proposer.choose(proposals, quadratic, self._steps)
        if not quadratic.finite():
            self._step_back("the model of the loss is not finite")
            return {}
        taken = self._move(batch, chosen + steepest + last, quadratic, lr)
        if taken:
            counts = {PRECONDITIONED: len(chosen), STEEPEST: len(steepest), LAST: len(last)}
            taken["directions"] = tuple(Counter(counts).elements())
        return taken

    def _steepest(self, batch: Batch, shares: Sequence[float]) -> list[Direction]:
        """Return the direction of the parameters without a block, or none if all have one."""
        covered = self._proposer.covered()
        if covered.issuperset(batch.parameters):
            return []
        direction: list[Tensor | None] = []
        for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
            direction.append(None if parameter in covered else -gradient)
        return [param_groups.scaled(direction, shares)]

    def _last_updates(
        self, parameters: Sequence[nn.Parameter], shares: Sequence[float]
    ) -> list[Direction]:
        """Return the last update of each layer group; none without momentum."""
        if not self._momentum:
            return []
        last: list[Tensor | None] = []
        for parameter, share in zip(parameters, shares, strict=True):
            update = self.state[parameter].get("update")
            if update is not None and share == 0:
                update = update * 0.0  # otherwise it keeps its length
            last.append(update)
        return self._layer_groups.split(parameters, last)

    def _begin_damping(
        self, batch: Batch, steepest: list[Direction], shares: Sequence[float], lr: float
    ) -> None:
        """Begin with the damping, of model and preconditioner, whose step reduces the loss most."""
        restart = self._proposer.restart
        decay = param_groups.mean_decay(self.param_groups)

        def update_with(damping: float) -> list[Tensor] | None:
            directions = restart(batch, shares, damping + decay).parts + steepest
            model = exact_model(self._backend, batch, directions, damping)
            if not model.finite():
                return None
            return combine(batch.parameters, directions, model.minimise() * lr)

        self._measure_damping(batch, update_with)
        restart(batch, shares, self.damping.at(0) + decay)

    def _move(
        self, batch: Batch, directions: Sequence[Direction], quadratic: Quadratic, lr: float
    ) -> dict[str, Any]:
        """Take the step that minimises the model, and measure its effect if that is due."""
        parameters, objective = batch.parameters, batch.loss + batch.penalty
        coefficients, predicted, damping = self._believable(quadratic, lr, objective)
        measure = self._reduction.due(self._steps)
        # A coefficient that is not finite has no finite prediction either.
        if not measure and not math.isfinite(predicted):
            self._step_back("the step is not finite")  # it would not be rejected
            return {}
        update = combine(parameters, directions, coefficients)
        before = param_groups.copies(parameters) if measure else []
        for frozen in set(self.state) - set(parameters):
            self.state[frozen].pop("update", None)  # outdated once it is thawed
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        if measure:
            # With all data the loss of the next step is the verdict.
            after = None if self._full_batch else self._evaluate(batch.passes)
            observes = self._reduction.told(self._steps)
            self._reduction.wait(
                self.state, batch, update, before, objective, predicted, observes=observes
            )
            if after is not None:
                self._judge(after)
        else:
            for parameter, last in zip(parameters, update, strict=True):
                self.state[parameter]["update"] = last
        taken = {"damping": damping, "predicted": predicted, **self._reduction.take_last()}
        self.last = {"loss": batch.loss, **taken}
        self._steps += 1
        return {**taken, "coefficients": tuple(coefficients.tolist())}

    def _believable(
        self, quadratic: Quadratic, lr: float, objective: float
    ) -> tuple[Tensor, float, float]:
        """Return the model's minimum, its predicted change, and the (raised) damping."""
        # A prediction below the floor, as for saturated outputs, is invalid at such a length: raise
        # the damping, or go part of the way.
        start = self.damping.at(self._steps)
        coefficients = quadratic.minimise() * lr
        predicted, damping = quadratic.change(coefficients), start
        most = objective - self._floor  # the largest possible reduction
        # Below its floor the closure's loss differs from the declared one, by a constant at least.
        if not 0 < most < -predicted:
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
            if not -predicted > most:
                return coefficients, predicted, damping
        coefficients = model.shortened(coefficients, most)
        return coefficients, model.change(coefficients), damping

    def _judge(self, loss: float) -> bool:
        """Keep the pending step for this loss, or undo it."""
        penalty = param_groups.penalty(self._reduction.decayed(self.state))
        accepted = self._reduction.judge(self.state, loss + penalty, self._eps)
        if not accepted:
            self.counters["rejected_steps"] += 1
            self._undone = ROSE if math.isfinite(loss) else "it was not finite"
        if self._reduction.silent:
            self._below_rounding += 1
            self._notes.append("the change was below the loss's rounding")
        else:
            self._below_rounding = 0
        return accepted

    def _step_back(self, why: str) -> None:
        """Undo the last update: it, or this batch, made a large or non-finite value."""
        self.counters["skipped_steps"] += 1
        self._undone = why
        self.damping.observe(-math.inf)
        for parameter, state in self.state.items():  # also of parameters that are frozen since
            last = state.pop("update", None)
            if last is not None:
                with torch.no_grad():
                    parameter.sub_(last)

    def _tell(self, seen: dict[str, Any]) -> None:
        """Make the readout of a step, and warn once of a run without progress."""
        dampings = self._damping_within.readout(self._mean_damping())
        if self.damping.at_cap() and self._undone == ROSE:
            self._notes.append("the damping is at its cap")
            self._warn_once(
                "the damping of TrustRegion is at its cap, and steps are still undone: the loss "
                "does not fall along its gradient. Does the closure return the same loss "
                "each time that it runs (no data drawn within; no full_batch=True with dropout)?"
            )
        if self._below_rounding == SILENCE:
            self._warn_once(
                f"the last {SILENCE} steps of TrustRegion that were judged changed the loss by "
                f"less than its rounding: training has converged in this floating type, or stands "
                f"still"
            )
        self._publish(
            Readout(
                **{"damping": self.damping.at(self._steps), **seen},
                preconditioner_dampings=tuple(dampings),
                undone=self._undone,
                notes=tuple(self._notes),
            )
        )

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            warn(text)
        self._warned = True

    def _common(self) -> dict[str, object]:
        return {
            **super()._common(),
            "burn_in": self._burn_in,
            "whether a step waits for its verdict": self._reduction.waits,
            "rounding of the loss": self._eps,
        }

    def state_dict(self, *, curvature: bool = True) -> dict[str, Any]:
        """Return the optimizer's state, the preconditioner's and the damping's, for ``torch.save``.

        Args:
            curvature: Whether it includes the preconditioner's state, gathered from all ranks;
                without it save `soframe.checkpoint.part` of ``preconditioner`` too.

        Returns:
            The state; see `soframe.Preconditioner.state_dict` for when to call it.
        """
        curvature_state = self.preconditioner.state_dict() if curvature else None
        return {**super().state_dict(), "curvature": curvature_state}

    def _own_state(self) -> dict[str, Any]:
        return {
            **super()._own_state(),
            "burn_in": self._burn_in,
            "preconditioner_damping": self._damping_within.state(),
            "losses": list(self._watch.losses),
            "reduction": self._reduction.state(),
            "eps": self._eps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; call it on every rank.

        Args:
            state_dict: The result of `state_dict`. If it is without curvature, the preconditioner
                stays as it is: see `soframe.checkpoint.load`.

        Raises:
            ValueError: If, on any rank, it is not the state of a TrustRegion on such a model, or
                truncated, or the ranks' states differ; then no rank changes.
        """

        def common() -> str:
            return repr((state_dict["curvature"] is None, state_dict["trust_region"]))

        agree(self._backend, lambda: self._check_state(state_dict), common)
        if state_dict["curvature"] is not None:
            self.preconditioner.load_state_dict(state_dict["curvature"])
        self._load(state_dict)
        saved = state_dict["trust_region"]
        self._burn_in, self._eps = saved["burn_in"], saved["eps"]
        self._damping_within.load(saved["preconditioner_damping"])
        self._watch.load(saved["losses"])
        self._reduction.load(saved["reduction"])

    def close(self) -> None:
        self.preconditioner.close()
