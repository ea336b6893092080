"""A trust region for mini-batches: Adam's direction, and its length from an averaged exact model.

::

    optimizer = soframe.StochasticTrustRegion(model)
    for batch in loader:
        optimizer.step(lambda: criterion(model(batch.x), batch.y))  # no backward
    with optimizer.averaged():
        evaluate(model)

Every thirtieth step computes the exact quadratic model of its batch along Adam's direction, and
adds it to a mean over batches, whose minimum is the length of this step and of the next ones up to
the next model. These run the closure and its backward pass once, and one fused kernel of Adam, so
that they cost a step of AdamW. Each model is judged on its batch: the damping policy receives the
reduction ratio, and a step after which the objective has risen is undone. All steps together are
judged by the average of the iterates, on batches that they have not seen
(`soframe.trust_region.trend`).

A falling learning rate takes noise out of the last iterate, but requires the length of training.
The mean of the last iterates is rid of the same noise at any time. It has polynomial decay (Shamir
and Zhang, 2013, section 4), so that the weight of the beginning falls::

    average_t = average_{t-1} + (eta + 1) / (t + eta) (parameters_t - average_{t-1})
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from soframe.damping.policies import DampingChoice
from soframe.setup.choosing import choose_backend
from soframe.state.saving import agree
from soframe.step.engine import untraced
from soframe.trust_region import param_groups
from soframe.trust_region.base import ClosureOptimizer
from soframe.trust_region.exact import Batch, exact_model
from soframe.trust_region.forward import Closure, Forward, closures_of, placed
from soframe.trust_region.readout import OnStep, Readout
from soframe.trust_region.reduction import Reduction
from soframe.trust_region.trend import SAID, AveragedModel, Trend

FIRST = 5
"""Steps that always have a model: averages only begin in them."""

BETAS = (0.9, 0.99)
"""The decays of Adam's averages of gradients and of their squares."""

EPS = 1e-8
"""Added to the root of the latter, which may be zero."""

MOMENTS = ("mean", "square")
"""Adam's averages of each parameter; its count is ``"step"``, which torch does not cast."""

EARLIER = "earlier"
"""The key of the average that the next one is compared with."""


class StochasticTrustRegion(ClosureOptimizer):
    """Adam without a learning rate: lengths from the exact quadratic model, averaged over batches.

    The parameters are iterates, and noisy ones; evaluate and save the model within `averaged`.

    Args:
        model: The model; it returns a tensor, or tuples, lists and dicts with tensors, as a
            recurrent net its states. Wrapped in DistributedDataParallel on several ranks: the
            closure calls the wrapper. Its loss may be any, and need not be declared.
        damping: The damping policy of the quadratic model: a name, class or instance; or a number,
            or a callable of the step.
        params: Param groups, each optionally with its own ``lr`` and ``weight_decay``; or
            parameters. By default all of the model's. See `soframe.trust_region.param_groups`.
        weight_decay: Coefficient of ``1/2 ||parameters||^2`` in the objective.
        lr: Multiplies the update; 1 is the minimum of the averaged model. 0.7 keeps nine tenths of
            the predicted reduction, and half of the noise that the step adds. Groups move in
            proportion to theirs.
        model_every: Steps from one quadratic model to the next.
        averaging: The average has about the last ``1 / averaging`` of all iterates; eta in
            `soframe.trust_region.stochastic`.
        reject: Undo a step with a model if the objective rose on its batch.
        shorten: Take shorter steps if the average of the iterates stops improving on unseen
            batches, on which it is evaluated twice in thirty steps; costs one more copy of the
            average: see `soframe.trust_region.trend`.
        on_step: Called with a `soframe.trust_region.Readout` after each step.

    Attributes:
        damping: A copy of the policy.
        counters: The number of ``"rejected_steps"``, and of ``"skipped_steps"``, in which a value
            was not finite.
        readout: The `Readout` of the last step; None before the first.

    Raises:
        ValueError: If a setting is out of range, or a parameter that needs a gradient is in no
            group, or sharded, or of another dtype than float32 and float64.
        TypeError: If a setting has the wrong type.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: DampingChoice = "levenberg-marquardt",
        params: ParamsT | None = None,
        weight_decay: float = 0.0,
        lr: float = 0.7,
        model_every: int = 30,
        averaging: float = 20.0,
        reject: bool = True,
        shorten: bool = True,
        on_step: OnStep | None = None,
    ) -> None:
        if not averaging >= 0:
            raise ValueError(f"averaging must not be negative, not {averaging!r}")
        super().__init__(model, damping, params, lr=lr, weight_decay=weight_decay, on_step=on_step)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"StochasticTrustRegion keeps averages in the dtypes of the parameters, and "
                    f"{name!r} has {parameter.dtype}, in which they would soon stand still: keep "
                    f"the parameters in float32, and let the closure compute under torch.autocast"
                )
        self._backend = choose_backend(None, model)
        self._every, self._eta = model_every, averaging
        self._settings = {
            "damping": self.damping,
            "model_every": model_every,
            "averaging": averaging,
            "reject": reject,
            "shorten": shorten,
        }
        self._mean = AveragedModel()
        self._shorten, self._trend = shorten, Trend()
        self._reduction = Reduction(self.damping, reject, every=True)
        self._since = 0
        self._swapped = False

    @untraced
    def step(self, closure: Closure | Sequence[Closure]) -> Tensor:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Runs the model on a batch, in one call or in several that are independent of
                each other, and returns the loss, a scalar that depends on the parameters through
                the model's outputs alone; it does not call ``backward``. For micro-batches a list
                of closures whose losses add up to the batch's.

        Returns:
            The loss before the update, averaged over ranks, in float64.

        Raises:
            TypeError: If the closure does not return a scalar tensor.
            ValueError: If param groups and model no longer agree.
            RuntimeError: If it is called within `averaged`; if a closure does not run the model, or
                its loss has terms that do not go through the model's output, or the model has no
                derivatives along directions; or if another rank raises.
        """
        if self._swapped:
            raise RuntimeError("leave averaged() before the next step: it has other parameters")
        closures = closures_of(closure)
        due = self._steps < FIRST or self._since + 1 >= self._every
        if due:
            param_groups.check_all(self._model, self.param_groups)
        self.zero_grad()
        parameters = param_groups.trainable(self.param_groups)
        forwards, compared = list[Forward](), list[Tensor]()
        if due:
            forwards, total = self._passes(closures)
            # Comparing gradients takes time, and differing ranks differ at steps with a model, too.
            compared = param_groups.gradients(parameters)
        else:
            total = self._backward(closures)
        loss = self._agree(total, None, gradients=compared)[0]
        decays = param_groups.setting(self.param_groups, "weight_decay")
        gradients = param_groups.with_decay(parameters, decays)
        seen: dict[str, Any] = {"step": self._steps, "loss": loss}
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(loss + norm):
            batch = Batch(parameters, gradients, decays, forwards, loss)
            seen |= self._move(batch, with_model=due)
        else:
            seen |= self._go_back(parameters)
        self._publish(Readout(**seen))
        return torch.tensor(loss, dtype=torch.float64, device="cpu")

    def _move(self, batch: Batch, *, with_model: bool) -> dict[str, Any]:
        """Update the parameters and their average; return the readout's numbers."""
        for parameter in batch.parameters:
            if parameter not in self.state:
                self.state[parameter].update(_begun(parameter, earlier=self._shorten))
        if with_model:
            notes = self._compare(batch)
            numbers = self._with_model(batch)
        else:
            notes = ("without a model",)
            damping = self.damping.at(self._steps)
            length = self._length(damping)
            self._adam(length)
            self._since += 1
            largest = param_groups.shares(self.param_groups)[1]
            numbers = {"coefficients": (length * largest,), "damping": damping}
        self._steps += 1
        averages = [self.state[p]["average"] for p in batch.parameters]
        with torch.no_grad():
            share = (self._eta + 1) / (self._steps + self._eta)
            torch._foreach_lerp_(averages, list(map(Tensor.detach, batch.parameters)), share)
        return {**numbers, "notes": notes, "directions": ("AdamW",)}

    def _backward(self, closures: Sequence[Closure]) -> float:
        """Run closures and their backward passes; return the loss."""
        total = 0.0
        for closure in closures:
            torch.clear_autocast_cache()
            with torch.enable_grad():
                loss = closure()
                loss.backward()
            total += float(loss.detach())
        return total

    def _compare(self, batch: Batch) -> tuple[str, ...]:
        """Compare the average with an earlier one, on an unseen batch."""
        if not self._shorten or self._steps < FIRST or not self._trend.due(self._steps):
            return ()
        states = [self.state[p] for p in batch.parameters]
        notes: tuple[str, ...] = ()
        if self._trend.begin(self._steps):
            objectives: dict[str, float] = {}
            for name in ("average", EARLIER):
                with placed(batch.parameters, [state[name] for state in states]):
                    objectives[name] = self._objective(batch)
            if self._trend.learn(objectives["average"], objectives[EARLIER], self._eps):
                notes = (SAID,)
        for state in states:
            state[EARLIER].copy_(state["average"])
        return notes

    def _length(self, damping: float) -> float:
        """Return the step along the direction, before the param groups' ``lr``."""
        return self._mean.minimum(damping) * self._trend.share

    def _with_model(self, batch: Batch) -> dict[str, Any]:
        """Add the batch's model to the mean, move to its minimum, and judge the step."""
        parameters = batch.parameters
        self._adam(0.0)  # its averages include this gradient
        shares, largest = param_groups.shares(self.param_groups)
        direction: list[Tensor] = []
        for parameter, share in zip(parameters, shares, strict=True):
            direction.append(self._direction(parameter) * share)

        def update_with(damping: float) -> list[Tensor]:
            length = self._length(damping) * largest
            return [length * tensor for tensor in direction]

        model = exact_model(self._backend, batch, [direction], 0.0)
        if not model.finite():
            return self._skip("the model of the loss is not finite")
        self._mean.learn(model)
        if self._steps == 0 and self.damping.to_be_measured():
            self._measure_damping(batch, update_with)
        damping = self.damping.at(self._steps)
        length = self._length(damping) * largest
        update = update_with(damping)
        start = batch.loss + batch.penalty
        numbers: dict[str, Any] = {"coefficients": (length,), "damping": damping}
        judged = self._reduction.due(self._steps)
        if judged:
            coefficient = torch.tensor([length], dtype=torch.float64, device="cpu")
            predicted = numbers["predicted"] = model.damped(damping).change(coefficient)
            before = param_groups.copies(parameters)
            self._reduction.wait(self.state, batch, update, before, start, predicted)
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        self._since = 0
        if judged:
            numbers |= self._judge(batch)
        return numbers

    def _judge(self, batch: Batch) -> dict[str, Any]:
        """Keep or undo the pending step by its batch's objective; return the readout's numbers."""
        numbers: dict[str, Any] = {}
        if not self._reduction.judge(self.state, self._objective(batch), self._eps):
            self.counters["rejected_steps"] += 1
            self._since = self._every  # the next step has a model
            numbers["undone"] = "the objective rose"
        for parameter in batch.parameters:
            # This optimizer has no direction of the last update.
            self.state[parameter].pop("update", None)
        return {**numbers, **self._reduction.take_last()}

    def _adam(self, length: float) -> None:
        """Update Adam's averages, and move along its direction by a length."""
        for group in self.param_groups:
            parameters: list[Tensor] = list(param_groups.trainable([group]))
            if not parameters:
                continue
            states = [self.state[p] for p in parameters]
            with torch.no_grad():
                adam(
                    parameters,
                    param_groups.gradients(parameters),
                    [state["mean"] for state in states],
                    [state["square"] for state in states],
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    amsgrad=False,
                    beta1=BETAS[0],
                    beta2=BETAS[1],
                    lr=length * float(group["lr"]),
                    weight_decay=0.0,
                    eps=EPS,
                    maximize=False,
                )

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Return the direction of `_adam`, from its present averages."""
        state = self.state[parameter]
        count = float(state["step"])
        root = (state["square"].sqrt() / math.sqrt(1 - BETAS[1] ** count)).add_(EPS)
        direction: Tensor = (state["mean"] / (BETAS[0] ** count - 1)).div_(root)
        return direction

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the average of the iterates, for evaluation and saving.

        Running statistics of batch norm stay the iterates'. Parameters with an average take part,
        frozen meanwhile or not.

        Yields:
            Nothing.

        Raises:
            RuntimeError: If contexts are nested.
        """
        if self._swapped:
            raise RuntimeError("averaged() is entered already")
        kept: dict[Tensor, Tensor] = {p: p.detach().clone() for p in self.state}
        self._swapped = True
        try:
            self._put({p: self.state[p]["average"] for p in kept})
            yield
        finally:
            self._put(kept)
            self._swapped = False

    def _put(self, values: dict[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in values.items():
                parameter.copy_(value)
        torch.clear_autocast_cache()  # within a context of the caller it has the former values

    def _go_back(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """Go back to the average: this batch, or the last steps, made a non-finite value."""
        with torch.no_grad():
            for parameter in parameters:
                if parameter in self.state:
                    parameter.copy_(self.state[parameter]["average"])
        return self._skip("the loss or its gradient is not finite")

    def _skip(self, why: str) -> dict[str, Any]:
        """Leave a step without an update, so that the next has a model; return its numbers."""
        self.counters["skipped_steps"] += 1
        self._since = self._every
        self.damping.observe(-math.inf)
        return {"damping": self.damping.at(self._steps), "undone": why}

    def _objective(self, batch: Batch) -> float:
        """Return the objective of a batch at the present parameters."""
        return self._evaluate(batch.passes) + batch.penalty

    def _common(self) -> dict[str, object]:
        return {
            **super()._common(),
            "steps since the last model": self._since,
            "share of the length": self._trend.share,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, for ``torch.save``; save the iterates, not the average.

        Raises:
            RuntimeError: If it is called within `averaged`.
        """
        if self._swapped:
            raise RuntimeError("save the state outside of averaged(), beside the iterates")
        state = super().state_dict()
        for kept in state["state"].values():  # Adam's averages change in place
            kept.update({name: tensor.clone() for name, tensor in kept.items()})
        return state

    def _own_state(self) -> dict[str, Any]:
        return {
            **super()._own_state(),
            "since": self._since,
            "model": asdict(self._mean),
            "trend": asdict(self._trend),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; call it on every rank.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            ValueError: If, on any rank, it is not the state of a StochasticTrustRegion on such a
                model, or truncated, or the ranks' states differ; then no rank changes.
        """

        def check() -> None:
            self._check_state(state_dict)
            parameters: list[nn.Parameter] = []
            for group in self.param_groups:
                parameters += group["params"]
            for number, kept in state_dict["state"].items():
                shape = parameters[number].shape
                if {kept[name].shape for name in (*MOMENTS, "average")} != {shape}:
                    raise ValueError(
                        f"the state is of another model: parameter {number} has shape {list(shape)}"
                    )

        agree(self._backend, check, lambda: repr(state_dict["trust_region"]))
        self._load(state_dict)
        for parameter, state in self.state.items():
            # In copies, since another optimizer may load the same state; the count is on the device
            # that the fused kernel requires.
            state.update({name: tensor.clone() for name, tensor in state.items()})
            state["step"] = state["step"].to(parameter.device)
            if self._shorten:  # without the earlier average, a fresh trend begins
                state.setdefault(EARLIER, state["average"].clone())
            else:
                state.pop(EARLIER, None)
        saved = state_dict["trust_region"]
        self._since = saved["since"]
        self._mean = AveragedModel(**saved["model"])
        if self._shorten:
            self._trend = Trend(**saved["trend"])


def _begun(parameter: nn.Parameter, *, earlier: bool) -> dict[str, Tensor]:
    """Return the state of a parameter before its first update."""
    state = {name: torch.zeros_like(parameter) for name in MOMENTS}
    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    state["average"] = parameter.detach().clone()
    if earlier:
        state[EARLIER] = parameter.detach().clone()
    return state
