"""What the public classes do with arguments and batches of any kind: strategies and the property.

A `Target` is a class under test: how it is built, and how one step is taken with it. Its settings
are given as values that work, and values that are nearly right or rubbish. `cases` draws some of
them and a few batches, and `check` holds the property: whatever is passed, the class either works
and leaves finite numbers, or says by name what is wrong. To put another class to the test, write
another `Target`.

Some cases run with all tests. ``SOFRAME_FUZZ=2000`` (``make fuzz``) runs that many.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.layers import LinearHelper
from soframe.losses import CrossEntropy, SquaredError
from soframe.methods import FOOF, KFAC
from soframe.schedules import GrowingInterval, WarmInterval
from soframe.settings import grouped
from soframe.solvers import Eigen, Inverse, Lazy, NewtonSchulz, OrthogonalIteration, Relative
from soframe.strategies import MemOpt, Sharded
from soframe.trust_region import ConstantDamping, LevenbergMarquardt, RelativeDamping
from tests.examples import examples

EXAMPLES = int(os.environ.get("SOFRAME_FUZZ", "0"))
NAN, INF = float("nan"), float("inf")


def fuzzed(few: int) -> settings:
    """The settings of a fuzz: a few examples, or as many as the environment asks for."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=EXAMPLES or examples(few),
        derandomize=not EXAMPLES,
        suppress_health_check=slow,
        print_blob=True,
        deadline=None,
    )


# -- models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A value that is made anew for each case, perhaps of its model."""

    name: str
    make: Callable[[Any], Any]

    def __repr__(self) -> str:
        return self.name


class Calls(nn.Module):
    """One layer called twice, one not at all, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.idle, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.again.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.head(self.tied(torch.tanh(self.again(self.first(x)))))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))
    model[3].bias.requires_grad_(False)
    return model


def convolutions() -> nn.Module:
    body = nn.Sequential(nn.Unflatten(1, (2, 2, 1)), nn.Conv2d(2, 4, (2, 1), groups=2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(4, 3))


def empty() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 0), nn.Linear(0, 3))


MODELS: dict[str, Callable[[], Any]] = {
    "plain": plain,
    "double": lambda: plain().double(),
    "frozen": frozen,
    "calls": Calls,
    "convolutions": convolutions,
    "linear": lambda: nn.Linear(4, 3),
    "empty": empty,
    "norm": lambda: nn.LayerNorm(4),
    "all frozen": lambda: plain().requires_grad_(False),
    "a class": lambda: nn.Linear,
    "None": lambda: None,
    "5": lambda: 5,
}
SOUND = ("plain", "double", "frozen", "calls", "convolutions", "linear")


# -- batches -------------------------------------------------------------------------------------

BATCHES: dict[str, tuple[int, float]] = {
    # rows, and what random inputs are multiplied by
    "good": (6, 1.0),
    "one row": (1, 1.0),
    "zero": (6, 0.0),
    "no rows": (0, 1.0),
    "tiny": (6, 1e-25),
    "large": (6, 1e8),
    "huge": (6, 1e17),
    "enormous": (6, 1e36),
    "infinite": (6, INF),
    "not a number": (6, NAN),
}
NO_BACKWARD, TWICE, NO_LOSS = "no backward", "two backward passes", "a loss times zero"
TINY_LOSS, HUGE_LOSS = "a tiny loss", "a huge loss"
LOSS_SCALES = {NO_LOSS: 0.0, TINY_LOSS: 1e-19, HUGE_LOSS: 1e19}
EVERY_BATCH = (*BATCHES, NO_BACKWARD, TWICE, *LOSS_SCALES)


def batch_of(kind: str, number: int, dtype: torch.dtype) -> Tensor:
    """The inputs of a batch, ``[rows, 4]``."""
    rows, scale = BATCHES.get(kind, (6, 1.0))
    generator = torch.Generator().manual_seed(number)
    return (scale * torch.randn(rows, 4, generator=generator, dtype=torch.float64)).to(dtype)


# -- values --------------------------------------------------------------------------------------

RUBBISH: tuple[Any, ...] = (
    None, True, "x", "", b"x", -1, 0, 5, 10**400, -1.0, 1e300, NAN, INF, 1j, (), [], {}, ["("],
    [5], {"(": "x"}, {5: 5}, {"": 5}, object, nn.Linear, np.float32(0.5), np.ones(2),
    Made("a tensor", lambda _: torch.ones(2)), Made("a module", lambda _: nn.Linear(2, 2)),
    Made("an object", lambda _: object()), Made("a callable of nothing", lambda _: lambda: 1.0),
    Made("a callable that raises", lambda _: lambda *_: {}["nothing"]),
)  # fmt: skip


def schedules(*values: Any) -> list[Any]:
    """Callables of the step that return a value, good at first for some."""
    found = []
    for value in values:
        found.append(Made(f"lambda step: {value!r}"[:60], lambda _, v=value: lambda step: v))
        later = f"lambda step: {value!r} from the second step on"
        found.append(
            Made(later[:80], lambda _, v=value: lambda step: v if step > 0 else (0.5, 1)[v == 1])
        )
    return found


ODD_NUMBERS = schedules(NAN, INF, -1.0, 10**400, 1j, None, True, "x", [1.0])
ODD_NUMBERS.append(Made("lambda step: a tensor", lambda _: lambda step: torch.ones(2)))
GOOD_NUMBERS = [1e-3, 0.5, *schedules(0.1)]
INTERVALS = [1, 2, 3, 10, WarmInterval(3, steps=2), GrowingInterval(4, age=0.5)]
PATTERN = {"0": "eigen", ".*": "inverse"}

OPTIMIZER = Made("SGD", lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
STALE = Made("SGD of another model", lambda _: torch.optim.SGD(plain().parameters(), lr=0.1))


@dataclass(frozen=True)
class Values:
    """The values of one setting: some that work with the defaults of all others, and the rest."""

    good: Sequence[Any]
    odd: Sequence[Any] = ()

    @property
    def strategy(self) -> st.SearchStrategy[Any]:
        good = st.sampled_from(list(self.good))
        odd = st.sampled_from([*self.odd, *RUBBISH])
        # Most settings are sound, or nearly all constructors would end at once.
        return st.integers(0, 9).flatmap(lambda n: odd if n == 0 else good)


def component(names: Sequence[Any], *odd: Any) -> Values:
    return Values(names, ("nope", *odd))


PRECONDITIONER: Mapping[str, Values] = {
    "method": component(
        [
            *("kfac", "kfac-reduce", "foof", KFAC, FOOF(), {"": "kfac"}, "ekfac", "tnt", "eva"),
            *("diagonal", "newton-muon", "shampoo", "kl-shampoo", "soap", "kfac-muon", "muon"),
        ],
        {"no": KFAC},
    ),
    "solver": component(
        [
            *("eigen", "inverse", "newton-schulz", "orthogonal-iteration", PATTERN),
            *(Inverse("full"), Inverse("sqrt"), Lazy(Inverse()), NewtonSchulz(iterations=1)),
            Eigen(follows=True),
            *(OrthogonalIteration(tolerance=1e-9), Relative(Eigen()), Lazy(Relative(Inverse()))),
        ],
        soframe.Solver,
        Relative,
    ),
    "strategy": component(
        ["comm-opt", "mem-opt", "hybrid-opt", "sharded", "owner-local", MemOpt],
        Sharded(deferred=True),
    ),
    "backend": component(["single", None], "torch"),
    "damping": Values([*GOOD_NUMBERS, 0.0, "relative", "constant", RelativeDamping(), 1e30, 1e-30],
                      [*ODD_NUMBERS, "levenberg-marquardt", LevenbergMarquardt, ConstantDamping]),
    "decay": Values([0.0, 0.5, 0.95, *schedules(0.1)], [1.0, *ODD_NUMBERS]),
    "kl_clip": Values([None, 1e-4, 1.0, 1e30, 1e-30, *schedules(0.1)], ODD_NUMBERS),
    "norm_clip": Values([None, 1.0, 1e30, 1e-30, *schedules(0.1)], ODD_NUMBERS),
    "optimizer": Values([OPTIMIZER], [STALE]),
    "lr": Values([0.1, 0.0, 1e30, *schedules(0.1)], ODD_NUMBERS),
    "statistics_every": Values(INTERVALS, [*schedules(0, 1.5, None), True]),
    "solve_every": Values(INTERVALS, [*schedules(0, 1.5, None), True]),
    "stagger": Values([False, True]),
    "background": Values([0, 1, 3, "ready"]),
    "skip": Values([(), ["0"], ["Conv2d"], ["nowhere"]], [[".*"], ["*"]]),
    "scaling": Values(["fisher", "kaisa"]),
    "loss_average": Values(["local", "global", "sum"]),
    "samples": Values(["batch", "positions", Made("lambda: 6", lambda _: lambda: 6)],
                      [Made("lambda: 0", lambda _: lambda: 0)]),
    "rows": Values([1.0, 0.5, 3, 1]),
    "layers": Values([{}, {"0": LinearHelper}, None], [{"0": "linear"}]),
    "grad_scaler": Values([None, Made("lambda: 1.0", lambda _: lambda: 1.0)],
                          [Made("GradScaler", lambda _: torch.amp.GradScaler("cpu"))]),
    "dtype": Values([None, torch.float32, torch.float64],
                    [torch.bfloat16, torch.int64, torch.complex64]),
    "fisher": Values(["empirical", "forward-only", "type-2", "monte-carlo"]),
    "loss": Values(["squared-error", "cross-entropy", SquaredError(), CrossEntropy, None]),
    "gradients": Values(["averaged", "local"]),
}  # fmt: skip


# -- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        model: A name among `MODELS`.
        options: The settings that are passed.
        batches: The steps, names among `EVERY_BATCH`.
    """

    model: str
    options: Mapping[str, Any]
    batches: Sequence[str] = field(default=("good", "good"))


def cases(values: Mapping[str, Values], most: int = 9) -> st.SearchStrategy[Case]:
    """Draw a model, some settings and a few batches."""
    names = st.lists(st.sampled_from(sorted(values)), unique=True, max_size=most)
    options = names.flatmap(lambda own: st.fixed_dictionaries({n: values[n].strategy for n in own}))
    rare = st.integers(0, 9).flatmap(lambda n: st.sampled_from(list(MODELS if n == 0 else SOUND)))
    batches = st.lists(st.sampled_from(EVERY_BATCH), min_size=1, max_size=4).map(tuple)
    return st.builds(Case, rare, options, batches)


@dataclass(frozen=True)
class Target:
    """A class under test.

    Attributes:
        build: Returns an instance for a model and settings.
        step: Takes one step: the instance, the model, the kind of batch and its inputs.
        settings: The values of its settings.
        checks: What must be finite after a step, given the instance and the model.
    """

    build: Callable[[Any, dict[str, Any]], Any]
    step: Callable[[Any, nn.Module, str, Tensor], None]
    settings: Mapping[str, Values]
    checks: Callable[[Any, nn.Module], Sequence[Tensor]]


def made(case: Case, model: Any) -> dict[str, Any]:
    """The settings of a case, with what has to be made of the model."""
    return {k: v.make(model) if isinstance(v, Made) else v for k, v in case.options.items()}


def check(target: Target, case: Case) -> str:
    """Hold the property for one case, and return how it ended."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODELS[case.model]()
        try:
            options = made(case, model if isinstance(model, nn.Module) else plain())
        except ValueError:
            return "no optimizer of this model"  # torch refuses it
        try:
            own = target.build(model, options)
        except (ValueError, TypeError) as error:
            return "refused" if str(error).strip() else "refused without a word"
        except RuntimeError as error:
            if "torch.distributed is not initialised" not in str(error):
                raise
            return "refused"  # since of the process, not of the argument
        except KeyError as error:  # what a user's own callable raises is passed on, here as well
            if error.args != ("nothing",):
                raise
            return "raised by the user's own"
        try:
            for number, kind in enumerate(case.batches):
                if (error := _step(target, own, model, kind, number)) is not None:
                    require_names(error, target.settings, model)
                    return "an error that names something"
                for tensor in target.checks(own, model):
                    assert bool(tensor.isfinite().all()), f"step {number}, {kind}: not finite"
        finally:
            getattr(own, "close", lambda: None)()
    return "works"


def _step(target: Target, own: Any, model: nn.Module, kind: str, number: int) -> Exception | None:
    dtype = next(model.parameters()).dtype
    try:
        target.step(own, model, kind, batch_of(kind, number, dtype))
    except (RuntimeError, ValueError, TypeError) as error:
        return error
    except KeyError as error:  # what a user's own callable raises is passed on
        if error.args != ("nothing",):
            raise
        return error
    return None


def require_names(error: Exception, names: Iterable[str], model: nn.Module) -> None:
    """Require that an error in a step names a setting, or a module and a reason."""
    text = str(error)
    settings_named = [name for name in names if re.search(rf"\b{name}\b", text)]
    modules = [
        name
        for name, _ in model.named_modules()
        if name and (text.startswith(f"{name}:") or f"'{name}'" in text)
    ]
    words = [word for word in ("GradScaler", "observe", "unscale_", "closure") if word in text]
    # What a user's own callable raises is the user's.
    own = isinstance(error, KeyError) or "positional argument" in text or "linear()" in text
    assert settings_named or modules or words or own, f"nothing is named: {error!r}"


# -- the preconditioner --------------------------------------------------------------------------


def build_preconditioner(model: Any, options: dict[str, Any]) -> soframe.Preconditioner:
    return soframe.Preconditioner(model, **grouped(options))


def step_preconditioner(
    own: soframe.Preconditioner, model: nn.Module, kind: str, inputs: Tensor
) -> None:
    model.zero_grad()
    for _ in range(2 if kind == TWICE else 0 if kind == NO_BACKWARD else 1):
        output = model(inputs)
        if own.loss is not None and own.takes_statistics:
            with torch.no_grad():  # a user's loss need not be the declared one
                finite = bool(output.isfinite().all())
            if finite:
                own.observe(output)
        loss = output.square().flatten(1).sum(1).mean() * LOSS_SCALES.get(kind, 1.0)
        loss.backward()
    own.step()


def gradients(own: Any, model: nn.Module) -> list[Tensor]:
    del own
    return [p.grad for p in model.parameters() if p.grad is not None]


PRECONDITIONERS = Target(build_preconditioner, step_preconditioner, PRECONDITIONER, gradients)


# -- the optimizer that owns the step --------------------------------------------------------------

METHODS = [
    *("adamw", "ekfac", "eva", "kfac", "kl-shampoo", "kl-soap", "muon", "newton-muon", "normuon"),
    *("sgd", "shampoo", "soap", "soap-muon", "soap-normuon", {"^0$": "muon"}, KFAC()),
]
KINDS_OF_DECAY = Values(["decoupled", "cautious"], ["nope"])
RATES = Values([1e-3, 0.1, 0.0], [1e300, *ODD_NUMBERS])
OF_BOTH = {
    name: PRECONDITIONER[name]
    for name in (
        *("solver", "strategy", "backend", "damping", "decay", "kl_clip", "norm_clip"),
        *("statistics_every", "solve_every", "stagger", "background", "skip", "samples", "layers"),
        *("loss_average", "dtype", "fisher", "loss", "gradients"),
    )
}
OPTIMIZER_OWN: Mapping[str, Values] = {
    **OF_BOTH,
    "method": component(METHODS, {"no": KFAC}),
    "lr": RATES,
    "weight_decay": Values([0.0, 0.1], [1e300, *ODD_NUMBERS]),
    "weight_decay_kind": KINDS_OF_DECAY,
    "constraint": Values([None, "hyperball"], ["nope"]),
    "auxiliary": component(["adamw", "sgd", "soap", "kfac"]),
    "auxiliary_lr": RATES,
    "auxiliary_weight_decay": Values([None, 0.0, 0.1], ODD_NUMBERS),
    "auxiliary_weight_decay_kind": KINDS_OF_DECAY,
    "auxiliary_constraint": Values([None, "hyperball"], ["nope"]),
}


def build_optimizer(model: Any, options: dict[str, Any]) -> soframe.Optimizer:
    return soframe.Optimizer(model, **grouped({"lr": 0.1, **options}))


def step_optimizer(own: soframe.Optimizer, model: nn.Module, kind: str, inputs: Tensor) -> None:
    own.zero_grad()
    for _ in range(2 if kind == TWICE else 0 if kind == NO_BACKWARD else 1):
        output = model(inputs)
        if own.preconditioner.loss is not None and own.preconditioner.takes_statistics:
            with torch.no_grad():
                finite = bool(output.isfinite().all())
            if finite:
                own.preconditioner.observe(output)
        loss = output.square().flatten(1).sum(1).mean() * LOSS_SCALES.get(kind, 1.0)
        loss.backward()
    own.step()


def weights(own: Any, model: nn.Module) -> list[Tensor]:
    del own
    return list(model.parameters())


OPTIMIZERS = Target(build_optimizer, step_optimizer, OPTIMIZER_OWN, weights)


# -- the trust region for mini-batches -------------------------------------------------------------

FLAGS = Values([True, False])
STOCHASTIC: Mapping[str, Values] = {
    "damping": Values(["levenberg-marquardt", "constant", 0.1, LevenbergMarquardt(interval=1)],
                      ["relative", RelativeDamping(), *ODD_NUMBERS]),
    "weight_decay": Values([0.0, 0.1], [1e300, *ODD_NUMBERS]),
    "lr": Values([0.7, 1.0, 0.0], [1e300, *ODD_NUMBERS]),
    "betas": Values([(0.9, 0.99), (0.0, 0.0)], [(1.0, 0.9), "xy", [0.9, NAN]]),
    "eps": Values([1e-8, 1e-30], [0.0, *ODD_NUMBERS]),
    "model_every": Values([1, 2, 30], [0, 1.5]),
    "averaging": Values([20.0, 0.0, 5], ODD_NUMBERS),
    "reject": FLAGS,
    "shorten": FLAGS,
    "reuse_activations": FLAGS,
    "backend": PRECONDITIONER["backend"],
}  # fmt: skip


def build_stochastic(model: Any, options: dict[str, Any]) -> soframe.StochasticTrustRegion:
    return soframe.StochasticTrustRegion(model, **options)


def step_stochastic(
    own: soframe.StochasticTrustRegion, model: nn.Module, kind: str, inputs: Tensor
) -> None:
    def closure() -> Tensor:
        return model(inputs).square().flatten(1).sum(1).mean() * LOSS_SCALES.get(kind, 1.0)

    own.step({NO_BACKWARD: [], TWICE: [closure, closure]}.get(kind, closure))


STOCHASTIC_TRUST_REGIONS = Target(build_stochastic, step_stochastic, STOCHASTIC, weights)
