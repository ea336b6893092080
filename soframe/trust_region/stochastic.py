"""A trust region for mini-batches: Adam's direction, and its length from an averaged exact model.

::

    optimizer = soframe.StochasticTrustRegion(model)
    for batch in loader:
        optimizer.step(lambda: criterion(model(batch.x), batch.y))  # no backward
    with optimizer.averaged():
        evaluate(model)

Every thirtieth step takes the exact quadratic model of its batch along Adam's direction, and lets
it enter a mean over batches (`soframe.trust_region.averaged`), which has the length of this step
and of those up to the next model. These run the closure and its backward pass once, and one fused
kernel of Adam, so that they cost what a step of AdamW does. Each model is judged on its batch: the
damping hears of it, and a step after which the loss has risen is undone. All steps together are
judged by the average of the iterates, on batches that they have not seen
(`soframe.trust_region.trend`): steps become shorter where it gets no better on those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from soframe.blocks.home import PlainGrad
from soframe.blocks.registration import unwrap
from soframe.capture.untraced import untraced
from soframe.checks.arguments import check_model
from soframe.checks.numbers import is_number, require_flag, require_integer
from soframe.comm import Backend
from soframe.damping.policies import DampingChoice, adopted
from soframe.damping.saved import check_damping, damping_at
from soframe.derivatives.forward import Closure, Forward, Outputs, evaluated
from soframe.methods.momentum import require_beta
from soframe.setup.building import choose_backend
from soframe.state import checksums
from soframe.state.saving import agree
from soframe.trust_region import agreeing, averaged, groups, settings, trend
from soframe.trust_region.averaged import AveragedModel
from soframe.trust_region.exact import ExactModel, Objective
from soframe.trust_region.initial import best_damping
from soframe.trust_region.passes import closures_of, first_pass, moved, placed
from soframe.trust_region.quadratic import Quadratic
from soframe.trust_region.readout import OnStep, Readout
from soframe.trust_region.reduction import Reduction

FIRST = 5
"""Steps that have a model in any case: averages only begin in them."""

MOMENTS = ("mean", "square")
"""What Adam keeps of each parameter, beside the number of updates: torch casts all that it loads to
the parameter's type, unless its name is ``"step"``."""

EARLIER = "earlier"
"""The average that the next one is held against: see `soframe.trust_region.trend`."""

VERSION = 2
"""Of the state."""

OWN = "trust_region"
"""Where the state has what is not one parameter's."""

KEYS = ("version", "steps", "since", "model", "trend", "damping", "counters")


class StochasticTrustRegion(torch.optim.Optimizer):
    """Adam without a learning rate: lengths from the exact quadratic model, averaged over batches.

    The parameters are iterates, and noisy ones; evaluate and save the model within `averaged`.

    Args:
        model: The model; it returns a tensor, or several. Wrapped in DistributedDataParallel on
            several ranks: the closure calls the wrapper. Its loss may be any, and need not be
            declared.
        damping: The damping policy of the quadratic model: a name, class or instance; or a number,
            or a callable of the step.
        params: Param groups, each with ``lr`` and ``weight_decay`` of its own if it likes; or
            parameters. By default all of the model's. See `soframe.trust_region.groups`.
        weight_decay: Coefficient of ``1/2 ||parameters||^2`` in the objective.
        lr: Multiplies the update; 1 is the minimum of the averaged model. 0.7 keeps nine tenths of
            what the model promises, and half of the noise that the step adds. Groups move in their
            ratio.
        betas: What Adam's averages of gradients and of their squares keep of their past.
        eps: Is added to the root of the latter, which may be zero: positive in the parameters'
            types.
        model_every: Steps from one quadratic model to the next.
        averaging: The average has about the last ``1 / averaging`` of all iterates:
            see `soframe.trust_region.averaged`, where it is eta.
        reject: Undo a step with a model if the objective rose on its batch.
        shorten: Take shorter steps where the average of the iterates gets no better on batches that
            no step has seen, for which it is evaluated twice in thirty steps, and kept once more:
            see `soframe.trust_region.trend`.
        reuse_activations: Whether derivatives follow a tape of the forward pass where they can;
            else the gradient is differentiated. See `soframe.derivatives`.
        on_step: Is called with a `soframe.trust_region.Readout` after each step.
        backend: The communication backend: see `soframe.Preconditioner`.

    Attributes:
        damping: The policy, in a copy.
        counters: How many steps were ``"rejected_steps"``, and how many ``"skipped_steps"``, since
            something was not finite.
        readout: What the last step saw and did; None before the first.

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
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        model_every: int = 30,
        averaging: float = 20.0,
        reject: bool = True,
        shorten: bool = True,
        reuse_activations: bool = True,
        on_step: OnStep | None = None,
        backend: str | type[Backend] | Backend | None = None,
    ) -> None:
        check_model(model)
        if on_step is not None and not callable(on_step):
            raise TypeError(f"on_step must be callable with a Readout, not {on_step!r}")
        require_integer("model_every", model_every, 1)
        flags = {"reject": reject, "shorten": shorten, "reuse_activations": reuse_activations}
        for name, flag in flags.items():
            require_flag(name, flag)
        pair: object = betas
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"betas must be two numbers, as (0.9, 0.99), not {betas!r}")
        for beta in betas:
            require_beta(type(self).__name__, "betas", beta)
        for name, value, least in (("eps", eps, 0.0), ("averaging", averaging, 0.0)):
            if not is_number(value) or not least <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {value!r}")
        self._model = unwrap(model)
        super().__init__(
            self._model.parameters() if params is None else params,
            {"lr": lr, "weight_decay": weight_decay},
        )
        groups.check_all(self._model, self.param_groups)
        _require_precise(self._model)
        _require_positive(float(eps), self.param_groups)
        self.damping = adopted(settings.whole_model_damping(damping))
        self._backend = choose_backend(backend)
        self._betas, self._eps_of_root = (float(betas[0]), float(betas[1])), float(eps)
        self._every, self._eta, self._reuse = model_every, float(averaging), reuse_activations
        self._home, self._on_step = PlainGrad(), on_step
        self._settings = (self.damping, betas, eps, model_every, averaging, reject, shorten)
        self._outputs = Outputs(self._model)
        self._exact = ExactModel(self._backend)
        self._mean = AveragedModel()
        self._trend = trend.Trend() if shorten else None
        self._reduction = Reduction(self.damping, reject, every=True)
        self._steps = self._since = 0
        self._swapped = False
        self.counters = dict.fromkeys(settings.COUNTERS, 0)
        self.readout: Readout | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model: ``params``, and ``lr`` and ``weight_decay`` if they differ.

        Raises:
            ValueError: If a setting is unknown or out of range, or a parameter not the model's.
        """
        super().add_param_group(param_group)
        groups.check_last(self._model, self.param_groups)

    # -- the step -----------------------------------------------------------------------------

    @untraced
    def step(self, closure: Closure | Sequence[Closure]) -> Tensor:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Runs the model on a batch, in one call or in several that are independent of
                each other, and returns the loss, a scalar that depends on the parameters through
                the model's outputs alone; it does not call ``backward``. For
                micro-batches a list of closures whose losses add up to the batch's.

        Returns:
            The loss before the update, averaged over ranks, in float64.

        Raises:
            TypeError: If there is no closure, or it does not return a scalar tensor.
            ValueError: If the param groups are no longer right: see `groups.check_all`.
            RuntimeError: If it is called within `averaged`; if a closure does not run the model,
                or its loss has terms that do not go through the model's output, or the model
                has no derivatives along directions; or if another rank raises.
        """
        if self._swapped:
            raise RuntimeError("leave averaged() before the next step: it has other parameters")
        closures = closures_of(closure)
        due = self._steps < FIRST or self._since + 1 >= self._every
        if due:
            groups.check_all(self._model, self.param_groups)
        self.zero_grad()
        parameters = groups.trainable(self.param_groups)
        forwards, loss, eps = self._passes(closures, parameters, due=due)
        gradients = self._gradients(parameters)
        seen: dict[str, Any] = {"step": self._steps, "loss": loss}
        if not math.isfinite(loss) or not _are_finite(gradients):
            self._go_back(parameters)
            undone = "the loss or its gradient is not finite"
            self._tell(Readout(**seen, damping=self.damping.at(self._steps), undone=undone))
            return torch.tensor(loss, dtype=torch.float64, device="cpu")
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter].update(_begun(parameter, earlier=self._trend is not None))
        said: tuple[str, ...] = ()
        if due:
            objective = Objective(
                parameters, gradients, groups.setting(self.param_groups, "weight_decay")
            )
            said = self._compare(objective, forwards, eps)
            made = self._with_model(objective, forwards, loss, eps)
        else:
            damping = self.damping.at(self._steps)
            length = self._length(damping)
            self._adam(length)
            self._since += 1
            largest = groups.shares(self.param_groups)[1]
            made = {"coefficients": (length * largest,), "damping": damping}
            said = ("without a model", *said)
        self._steps += 1
        self._average(parameters)
        self._tell(Readout(**seen, **made, notes=said, directions=("AdamW",)))
        return torch.tensor(loss, dtype=torch.float64, device="cpu")

    def _passes(
        self, closures: Sequence[Closure], parameters: Sequence[nn.Parameter], *, due: bool
    ) -> tuple[list[Forward], float, float]:
        """Run closures and their backward passes.

        Returns:
            The passes, where there is a model; the loss over all ranks, and its type's rounding.
        """
        forwards: list[Forward] = []
        total = eps = 0.0
        for closure in closures:
            with torch.enable_grad():
                if due:
                    forward, loss = first_pass(
                        self._model, self._outputs, closure, parameters, reuse=self._reuse
                    )
                    forward.backward()
                    forwards.append(forward)
                else:
                    loss = closure()
                    loss.backward()
            total += float(loss.detach())
            eps = torch.finfo(loss.dtype).eps
        # To compare gradients takes time, and who has others has them when there is a model, too.
        return forwards, self._agree(total, None, parameters if due else ()), eps

    def _gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of the objective, which are in ``.grad``."""
        gradients = [self._home.fill(parameter) for parameter in parameters]
        decays = groups.setting(self.param_groups, "weight_decay")
        for parameter, gradient, decay in zip(parameters, gradients, decays, strict=True):
            if decay:
                gradient.add_(parameter.detach(), alpha=decay)
        return gradients

    def _compare(
        self, objective: Objective, forwards: Sequence[Forward], eps: float
    ) -> tuple[str, ...]:
        """Hold the average against an earlier one, on a batch that no step has seen.

        Returns:
            What a readout says of it.
        """
        if self._trend is None or self._steps < FIRST or not self._trend.due(self._steps):
            return ()
        states = [self.state[p] for p in objective.parameters]
        said: tuple[str, ...] = ()
        if self._trend.begin(self._steps):
            at_average = []
            for name in ("average", EARLIER):
                with placed(objective.parameters, [state[name] for state in states]):
                    at_average.append(self._evaluate(objective, forwards))
            now, earlier = at_average
            said = (trend.SAID,) if self._trend.learn(now, earlier, eps) else ()
        for state in states:
            state[EARLIER].copy_(state["average"])
        return said

    @property
    def _share(self) -> float:
        return 1.0 if self._trend is None else self._trend.share

    def _length(self, damping: float) -> float:
        """Return how far a step goes along its direction, before the param groups' ``lr``."""
        return self._mean.minimum(damping) * self._share

    def _with_model(
        self, objective: Objective, forwards: Sequence[Forward], loss: float, eps: float
    ) -> dict[str, Any]:
        """Let the batch's model enter the mean, move to its minimum, and judge the step.

        Returns:
            What a readout says of it.
        """
        parameters = objective.parameters
        self._adam(0.0)  # its averages go on with this gradient
        shares, largest = groups.shares(self.param_groups)
        whole = [self._direction(parameter) for parameter in parameters]
        direction = groups.scaled(whole, shares)
        batch = self._exact.along(objective, forwards, [direction], damping=0.0)
        if not batch.finite():
            self.damping.observe(-math.inf)
            self._since = self._every
            self.counters["skipped_steps"] += 1
            undone = "the model of the loss is not finite"
            return {"damping": self.damping.at(self._steps), "undone": undone}
        self._mean.learn(batch)
        start = loss + groups.penalty(zip(parameters, objective.decays, strict=True))
        if self._steps == 0 and self.damping.to_be_measured():
            self._measure_damping(objective, forwards, direction, start)
        damping = self.damping.at(self._steps)
        length = self._length(damping) * largest
        update = [length * d for d in direction if d is not None]
        judged = self._reduction.due(self._steps)
        before = [p.detach().clone() for p in parameters] if judged else []
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        self._since = 0
        made: dict[str, Any] = {"coefficients": (length,), "damping": damping}
        if not judged:
            return made
        made["predicted"] = _change(batch, damping, length)
        states = [self.state[p] for p in parameters]
        self._reduction.wait(
            states,
            update,
            before=before,
            decays=objective.decays,
            objective=start,
            predicted=made["predicted"],
            told=True,
        )
        if not self._reduction.judge(self.state, self._evaluate(objective, forwards), eps):
            self.counters["rejected_steps"] += 1
            self._since = self._every  # the next step has a model
            made["undone"] = "the objective rose"
        for state in states:
            state.pop("update", None)  # nobody goes along it once more
        return {**made, **self._reduction.tell()}

    def _measure_damping(
        self,
        objective: Objective,
        forwards: Sequence[Forward],
        direction: Sequence[Tensor | None],
        start: float,
    ) -> None:
        """Begin with the damping whose step brings most."""
        largest = groups.shares(self.param_groups)[1]
        whole = [d for d in direction if d is not None]

        def after(damping: float) -> float:
            length = self._length(damping) * largest
            with moved(objective.parameters, [length * d for d in whole]):
                objective_after = self._evaluate(objective, forwards)
            return objective_after if math.isfinite(objective_after) else math.inf

        self.damping.begin(best_damping(self.damping.at(0), start, after))

    def _adam(self, length: float) -> None:
        """Let Adam's averages go on, and move along its direction by a length."""
        first, second = self._betas
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad]
            if not parameters:
                continue
            states = [self.state[p] for p in parameters]
            gradients = [self._home.fill(p) for p in parameters]
            with torch.no_grad():
                adam(
                    parameters,
                    gradients,
                    [state["mean"] for state in states],
                    [state["square"] for state in states],
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    amsgrad=False,
                    beta1=first,
                    beta2=second,
                    lr=length * float(group["lr"]),
                    weight_decay=0.0,
                    eps=self._eps_of_root,
                    maximize=False,
                )

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Return Adam's direction, as its averages have it now: what `_adam` goes along."""
        state, (first, second) = self.state[parameter], self._betas
        count = float(state["step"])
        root = (state["square"].sqrt() / math.sqrt(1 - second**count)).add_(self._eps_of_root)
        direction: Tensor = (state["mean"] / (first**count - 1)).div_(root)
        return direction

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the parameters of now enter the average."""
        averages = [self.state[p]["average"] for p in parameters]
        with torch.no_grad():
            torch._foreach_lerp_(
                averages, [p.detach() for p in parameters], averaged.share(self._steps, self._eta)
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model has the average of the iterates: for evaluation, and for saving it.

        Running statistics of batch norm stay those of the iterates. Parameters that have an average
        take part whether they are frozen meanwhile or not.

        Yields:
            Nothing.

        Raises:
            RuntimeError: If it is entered once more within itself.
        """
        if self._swapped:
            raise RuntimeError("averaged() is entered already")
        every = (p for group in self.param_groups for p in group["params"])
        kept = {p: p.detach().clone() for p in every if p in self.state}
        self._swapped = True
        try:
            self._put({p: self.state[p]["average"] for p in kept})
            yield
        finally:
            self._put(kept)
            self._swapped = False

    def _put(self, values: dict[nn.Parameter, Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in values.items():
                parameter.copy_(value)

    def _go_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Go back to the average: this batch, or the last steps, made something not finite."""
        self.counters["skipped_steps"] += 1
        self._put({p: self.state[p]["average"] for p in parameters if p in self.state})
        self._since = self._every
        self.damping.observe(-math.inf)

    def _tell(self, readout: Readout) -> None:
        self.readout = readout
        if self._on_step is not None:
            self._on_step(readout)

    # -- pieces -------------------------------------------------------------------------------

    def _evaluate(self, objective: Objective, forwards: Sequence[Forward]) -> float:
        """Return the objective of a batch at the parameters of now."""
        on_this_rank, error = math.nan, None
        try:
            on_this_rank = sum(
                evaluated(one.closure, one.replay, differentiates=self._outputs.differentiates)
                for one in forwards
            )
        except Exception as raised:  # whatever it is: the other ranks wait, and must be told
            error = raised
        penalty = groups.penalty(zip(objective.parameters, objective.decays, strict=True))
        return self._agree(on_this_rank, error) + penalty

    def _agree(
        self, loss: float, error: Exception | None, parameters: Sequence[nn.Parameter] = ()
    ) -> float:
        """Agree with all ranks on a loss, on who raises, and on what must be the same.

        Returns:
            The mean over ranks.
        """
        backend = self._backend
        if backend.world_size == 1 and error is None:
            damping_at(self.damping, self._steps)
            return loss

        def common() -> dict[str, object]:
            return {
                "settings": self._settings,
                "step": self._steps,
                "steps since the last model": self._since,
                "lr and weight_decay of the param groups": groups.numbers(self.param_groups),
                "damping": damping_at(self.damping, self._steps),
                "what steps take of their length": self._share,
                **agreeing.gradients_in_common(backend, self._home, parameters),
            }

        return agreeing.agree(backend, loss, error, common=common)[0]

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, for ``torch.save``; save the iterates, not the average.

        Raises:
            RuntimeError: If it is called within `averaged`.
        """
        if self._swapped:
            raise RuntimeError("save the state outside of averaged(), beside the iterates")
        of_torch = super().state_dict()
        # In copies: Adam's averages go on in place, in what has been saved otherwise.
        of_torch["state"] = {
            number: {name: tensor.clone() for name, tensor in kept.items()}
            for number, kept in of_torch["state"].items()
        }
        state = {
            **of_torch,
            OWN: {
                "version": VERSION,
                "steps": self._steps,
                "since": self._since,
                "model": self._mean.state(),
                "trend": (self._trend or trend.Trend()).state(),
                "damping": self.damping.state(),
                "counters": dict(self.counters),
            },
        }
        state[OWN][checksums.KEY] = checksums.seal(settings.sealed_part(state))[checksums.KEY]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; call it on every rank.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is not the state of a StochasticTrustRegion on such a model, or
                truncated or damaged, or another rank's is, or the ranks' states differ; nothing
                has changed then, on any rank.
        """

        def check() -> None:
            _check_state(state_dict, self)

        def common() -> str:
            return checksums.text(settings.sealed_part(state_dict)[OWN])

        agree(self._backend, check, common)
        saved = state_dict[OWN]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != OWN})
        for parameter, state in self.state.items():
            # In copies, since another optimizer may go on from the same state; the count is where
            # the fused kernel wants it.
            state.update({name: tensor.clone() for name, tensor in state.items()})
            state["step"] = state["step"].to(parameter.device)
            if self._trend is None:
                state.pop(EARLIER, None)
            else:  # a run without it has a trend that begins
                state.setdefault(EARLIER, state["average"].clone())
        self._steps, self._since = saved["steps"], saved["since"]
        self._mean.load(saved["model"])
        if self._trend is not None:
            self._trend.load(saved["trend"])
        self.damping.load(saved["damping"])
        self.counters = dict(saved["counters"])

    def close(self) -> None:
        """Remove the hook."""
        self._outputs.close()


def _require_precise(model: nn.Module) -> None:
    """Check that averages can be kept in the parameters' types.

    Raises:
        ValueError: If one has too few digits, so that a long average would no longer change.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"StochasticTrustRegion keeps averages in the types of the parameters, and "
                f"{name!r} has {parameter.dtype}, in which they would soon stand still: keep the "
                f"parameters in float32, and let the closure compute under torch.autocast"
            )


def _require_positive(eps: float, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that what is divided by is never zero, in the parameters' types.

    Raises:
        ValueError: If it may be, which would make parameters that have no gradient yet NaN.
    """
    for dtype in {p.dtype for group in groups for p in group["params"]}:
        if dtype.is_floating_point and not eps >= torch.finfo(dtype).tiny:
            raise ValueError(
                f"eps must be positive in {dtype}, not {eps!r}: an entry whose gradient is zero "
                f"is divided by it"
            )


def _begun(parameter: nn.Parameter, *, earlier: bool) -> dict[str, Tensor]:
    """Return what is kept of a parameter before its first update."""
    like = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    averages = ("average", EARLIER) if earlier else ("average",)
    return {
        **{name: like.clone() for name in MOMENTS},
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        **{name: parameter.detach().clone() for name in averages},
    }


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return math.isfinite(float(torch.nn.utils.get_total_norm(tensors)))


def _change(batch: Quadratic, damping: float, length: float) -> float:
    """Return by how much a batch's own damped model changes along its direction."""
    return batch.damped(damping).change(torch.tensor([length], dtype=torch.float64, device="cpu"))


def _check_state(state: Any, optimizer: StochasticTrustRegion) -> None:
    """Check that an optimizer can go on from a state; nothing has been loaded yet."""
    settings.check_keys(state, {"state", "param_groups", OWN}, "a StochasticTrustRegion")
    saved = state[OWN]
    settings.check_keys(saved, {*KEYS, checksums.KEY}, "a StochasticTrustRegion")
    if saved["version"] != VERSION:
        raise ValueError(
            f"the state of the StochasticTrustRegion has version {saved['version']!r}; this "
            f"soframe reads version {VERSION}: load it with the soframe that wrote it"
        )
    checksums.verify({**settings.sealed_part(state), checksums.KEY: saved[checksums.KEY]})
    settings.check_groups(state["param_groups"], optimizer.param_groups)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, kept in state["state"].items():
        shape = parameters[number].shape
        named = {*MOMENTS, "average", *({EARLIER} & set(kept))}
        if set(kept) != {*named, "step"} or any(kept[name].shape != shape for name in named):
            raise ValueError(
                f"the state is of another model: of parameter {number} it has "
                f"{ {name: list(tensor.shape) for name, tensor in kept.items()} }, and here it "
                f"has shape {list(shape)}"
            )
    averaged.check(saved["model"])
    trend.check(saved["trend"])
    check_damping(saved["damping"], optimizer.damping, saved["steps"])
