"""Models that torch does not differentiate forward have derivatives along directions too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.derivatives import jacobian, tangents
from soframe.derivatives.twice import tangents_by_gradients
from soframe.testing import compare
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import trust_region, vector
from tests.trust_region.test_tape import Twins, closure_of


class Attention(nn.Module):
    """Two heads, behind and before a linear layer; the fast kernel takes four dimensions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.inputs, self.last, self.settings = nn.Linear(4, 12), nn.Linear(4, 3), settings

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, **self.settings)
        return self.last(mixed.transpose(1, 2).flatten(2)).flatten(1)


class Recurrent(nn.Module):
    """Its parameters are in a list of its own too."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.inner, self.last = kind(4, 3, batch_first=True, **settings), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)[0].tanh()).flatten(1)


class Called(nn.Module):
    """A function behind a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return torch.cat([self.function(hidden).flatten(1), hidden.flatten(1).sin()], 1)


class Listed(nn.Module):
    """Calls a function with parameters that it has in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.both = [self.layer.weight, self.layer.bias]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.both).tanh().flatten(1)


class Cube(torch.autograd.Function):
    """Has no jvp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class Once(Cube):
    """Says that its gradient cannot be differentiated."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class Detached(Cube):
    """Has a gradient that autograd takes for constant."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0].detach()


def multihead() -> nn.Module:
    class MultiHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0].flatten(1)

    return MultiHead()


def bags(hidden: Tensor) -> Tensor:
    return F.embedding_bag(torch.arange(10).view(5, 2), hidden.view(-1, 4), mode="sum")


MASK = torch.ones(3, 3).tril().bool()

FORWARD: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "causal attention": lambda: Attention(is_causal=True),
    "masked attention": lambda: Attention(attn_mask=MASK),
    "attention that drops out": lambda: Attention(dropout_p=0.3),
    "multi-head attention": multihead,
    "encoder layer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten()
    ),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU, that drops out": lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.2),
    "RNN": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "parameters in a list": Listed,
}
"""Have forward-mode derivatives, in some kernel."""

BACKWARD: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Flatten()
    ),
    "own function": lambda: Called(Cube.apply),
    "own function in a checkpoint": lambda: Called(
        lambda t: checkpoint(Cube.apply, t, use_reentrant=False)
    ),
    "some of several results": lambda: Called(
        lambda t: torch.cat([Cube.apply(t), t.argmax(-1, keepdim=True)], -1)
    ),
}
"""Have none."""

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bags": (lambda: Called(bags), "embedding_bag"),
    "differentiable once": (lambda: Called(Once.apply), "the model"),
    "detached": (lambda: Called(Detached.apply), "the model"),
}
"""Have none and no second derivative either; and what the error says they are of."""


def inputs() -> Tensor:
    return randn(5, 3, 4)


def differences(twins: Twins, x: Tensor) -> list[Tensor]:
    """Derivatives from outputs on both sides."""

    def at(direction: list[Tensor], scale: float) -> Tensor:
        with torch.no_grad():
            for parameter, own in zip(twins.parameters, direction, strict=True):
                parameter.add_(own, alpha=scale)
            with twins.forward.replay.again():
                found: Tensor = twins.model(x)
            for parameter, own in zip(twins.parameters, direction, strict=True):
                parameter.sub_(own, alpha=scale)
        return found

    return [(at(d, 1e-5) - at(d, -1e-5)) / 2e-5 for d in twins.directions]


RECENT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
OLD = {"own function in a checkpoint"}
"""Which a checkpoint of an earlier torch does not differentiate twice."""


@pytest.mark.parametrize("name", [*FORWARD, *(n for n in BACKWARD if RECENT or n not in OLD)])
def test_equals_differences_of_outputs(name: str) -> None:
    """By the tape where it can be followed, and by running the closure again."""
    model, x = fill({**FORWARD, **BACKWARD}[name]()), inputs()
    twins = Twins(model, closure_of(model, x))
    twins.compare("tangent")
    for one, other in zip(twins.plain(), differences(twins, x), strict=True):
        compare(one, other, "tangent", rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORWARD)
def test_other_kernels_do_where_there_are_any(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient is differentiated only where a function has no forward-mode derivative at all."""

    def never(*own: Any) -> Any:
        raise AssertionError("a gradient is differentiated")

    monkeypatch.setattr(tangents, "tangents_by_gradients", never)
    monkeypatch.setattr(jacobian, "tangents_by_gradients", never)
    model, x = fill(FORWARD[name]()).to(dtype), inputs().to(dtype)
    before = torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()
    twins = Twins(model, closure_of(model, x))
    assert twins.tape.follows()
    twins.compare("tangent")
    assert before == (torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled())


def test_says_once_that_a_gradient_is_differentiated(caplog: pytest.LogCaptureFixture) -> None:
    jacobian._tell.cache_clear()
    model, x = fill(BACKWARD["own function"]()), inputs()
    with caplog.at_level("INFO", "soframe.derivatives.jacobian"):
        for _ in range(2):
            Twins(model, closure_of(model, x)).plain()
    (record,) = caplog.records
    assert record.getMessage().startswith("derivatives differentiate the gradient: You must impl")


def test_the_tape_differentiates_the_gradient_of_one_function_alone() -> None:
    model, x = fill(BACKWARD["weight norm"]()), inputs()
    runs = []

    def closure() -> Tensor:
        runs.append(1)
        return closure_of(model, x)()

    twins = Twins(model, closure)
    twins.by_tape()
    assert len(runs) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_derivative_is_refused(name: str) -> None:
    """At the first step, before anything has changed."""
    make, what = REFUSED[name]
    model, x = fill(make()), inputs()
    before = vector(model)
    own = trust_region(model, "squared-error")
    message = f"TrustRegion needs derivatives of {what} along directions of the parameters"
    with pytest.raises(RuntimeError, match=message):
        own.step(lambda: half_square(model(x), torch.zeros(())))
    assert torch.equal(vector(model), before)


def test_what_does_not_depend_on_anything_has_no_tangent() -> None:
    x = randn(3).requires_grad_()
    assert tangents_by_gradients([randn(2)], [x], [randn(3)], "it") == [None]
    unused = randn(2).requires_grad_()
    found = tangents_by_gradients([2 * x, 3 * unused], [x], [randn(3, seed=1)], "it")
    compare(found[0], 2 * randn(3, seed=1), "tangent")  # type: ignore[arg-type]
    assert found[1] is None or not found[1].any()


def steps_of(function: Callable[[Tensor], Tensor], **settings: Any) -> Tensor:
    model = fill(Called(function))
    own = soframe.TrustRegion(model, "squared-error", **settings)
    torch.manual_seed(0)
    for step in range(4):
        x, y = randn(6, 4, seed=step), randn(6, 8, seed=50 + step)
        own.step(lambda x=x, y=y: half_square(model(x), y))
    own.close()
    return vector(model)


@pytest.mark.parametrize("fisher", ["forward-only", "monte-carlo", "type-2"])
@pytest.mark.parametrize("every", [1, 2])
def test_whole_steps_are_those_of_functions_of_torch(fisher: str, every: int) -> None:
    """Gradients that are differentiated give no statistics."""
    settings = {"fisher": fisher, "statistics_every": every, "solve_every": every}
    plain = steps_of(lambda t: t**3, reuse_activations=False, **settings)
    compare(steps_of(Cube.apply, **settings), plain, "parameters")


def test_normalisation_under_autocast() -> None:
    """Its tangents are of another dtype than its results there, which convolutions refuse."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()]
    model, x = fill(nn.Sequential(*layers)).float(), randn(4, 3, 8, 8).float()
    y = randn(4, 64, seed=1).float()

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        return half_square(output.float(), y)

    own = trust_region(model, "squared-error", 0.1, parts=2)
    losses = [float(own.step(closure)) for _ in range(4)]
    assert losses[-1] < losses[0]
    twins = Twins(model, closure)
    twins.directions = [
        [None if p.ndim == 1 else v for p, v in zip(twins.parameters, own, strict=True)]  # type: ignore[misc]
        for own in twins.directions
    ]
    found = twins.plain()
    plain = Twins(model, lambda: half_square(model(x), y))
    plain.directions = twins.directions
    for one, other in zip(found, plain.plain(), strict=True):
        compare(one.float(), other, "tangent", rtol=0.15)


# -- derivatives that are not those of the gradient ------------------------------------------


class Noise:
    """Random numbers that do not come from torch's generators, the same in every test."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden * torch.from_numpy(self.random.normal(size=tuple(hidden.shape)))


def test_a_closure_that_computes_something_else_is_refused() -> None:
    model, x, y = fill(Called(Noise())), randn(6, 4), randn(6, 8, seed=1)
    before = vector(model)
    own = trust_region(model, "squared-error", reuse_activations=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the closure computes something else when it runs"):
            own.step(lambda: half_square(model(x), y))
        assert torch.equal(vector(model), before)


def test_weights_that_decay_are_no_part_of_what_is_compared() -> None:
    model, x, y = fill(Called(torch.sin)), randn(6, 4), randn(6, 8, seed=1)
    own = trust_region(model, "squared-error", weight_decay=10.0)
    own.step(lambda: half_square(model(x), y))
    assert own._exact._verified


def test_a_gradient_that_underflows_is_not_refused() -> None:
    model, x = fill(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))).float(), randn(8, 3).float()
    own = trust_region(model, "squared-error")
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    y = torch.full((8, 2), 1e-30)
    own.step(lambda: half_square(model(x), y))
    assert own._exact._verified


def noisy_rank(rank: int, ranks: int) -> tuple[str, bool]:
    model = fill(Called(Noise() if rank == 1 else torch.sin))
    before = vector(model)
    x, y = randn(6, 4, seed=rank), randn(6, 8, seed=5 + rank)
    wrapped = DistributedDataParallel(model)
    own = trust_region(wrapped, "squared-error", reuse_activations=False)
    try:
        own.step(lambda: half_square(wrapped(x), y))
    except RuntimeError as error:
        return str(error), torch.equal(vector(model), before)
    return "", False


@pytest.mark.distributed
def test_a_closure_that_computes_something_else_on_one_rank_stops_all() -> None:
    for told, stood in run_ranks(noisy_rank, 2, timeout=60):
        assert "the closure computes something else when it runs again" in told
        assert stood
