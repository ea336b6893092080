"""Any function whose gradient can be differentiated has derivatives along directions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.settings import grouped
from soframe.testing import compare
from soframe.trust_region import LevenbergMarquardt
from soframe.trust_region.forward import evaluated, first_pass, moved
from soframe.trust_region.replay import Replay
from soframe.trust_region.twice import jacobian_products
from tests.curvature import fill, half_square, randn
from tests.trust_region.kit import trust_region, vector


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


class InCheckpoint(nn.Module):
    """Runs a part again in each backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).sin()


class Counter(nn.Module):
    """Has a buffer that each forward pass changes, and depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x.tanh() * self.calls.sign()


class Cube(torch.autograd.Function):
    """No function of torch."""

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

KERNELS: dict[str, Callable[[], nn.Module]] = {
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
    "attention in a checkpoint": lambda: InCheckpoint(Attention()),
    "LSTM in a checkpoint": lambda: InCheckpoint(Recurrent(nn.LSTM)),
}
"""Have fast kernels, whose gradients cannot be differentiated."""

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "parameters in a list": Listed,
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
    "norms and dropout in a checkpoint": lambda: InCheckpoint(
        nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.LayerNorm(4), nn.Flatten()
        )
    ),
    "counts its calls": lambda: Called(Counter()),
}

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bags": (lambda: Called(bags), "_embedding_bag"),
    "differentiable once": (lambda: Called(Once.apply), "autograd treated a gradient as constant"),
    "detached": (lambda: Called(Detached.apply), "autograd treated a gradient as constant"),
}
"""Have no second derivative; and what the error says of it."""


def inputs() -> Tensor:
    return randn(5, 3, 4)


class Derivatives:
    """The forward pass of a model, and directions of its parameters."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x, self.parameters = model, x, list(model.parameters())

        def closure() -> Tensor:
            output: Tensor = model(x)
            return half_square(output, torch.ones_like(output))

        self.forward, _ = first_pass(model, closure, self.parameters)
        self.directions = [
            [randn(*p.shape, seed=9 * k + i).to(p) for i, p in enumerate(self.parameters)]
            for k in range(2)
        ]

    def found(self) -> list[Tensor]:
        each = self.forward.jacobian_products(self.parameters, self.directions)
        return [tangent for (tangent,) in each]

    def differences(self) -> list[Tensor]:
        """Derivatives from outputs on both sides."""

        def at(direction: list[Tensor], scale: float) -> Tensor:
            update = [scale * d for d in direction]
            with torch.no_grad(), moved(self.parameters, update), self.forward.replay.again():
                found: Tensor = self.model(self.x)
            return found

        return [(at(d, 1e-5) - at(d, -1e-5)) / 2e-5 for d in self.directions]


RECENT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
OLD = {"own function in a checkpoint"}
"""Which a checkpoint of an earlier torch does not differentiate twice."""


@pytest.mark.parametrize("name", [*KERNELS, *(n for n in OTHERS if RECENT or n not in OLD)])
def test_equals_differences_of_outputs(name: str) -> None:
    """After the backward pass, and in the mode of kernels that the user had."""
    own = Derivatives(fill({**KERNELS, **OTHERS}[name]()), inputs())
    buffers = [buffer.clone() for buffer in own.model.buffers()]
    before = torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()
    own.forward.backward()
    found = own.found()
    assert before == (torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled())
    assert all(map(torch.equal, own.model.buffers(), buffers)) or "checkpoint" in name
    for one, other in zip(found, own.differences(), strict=True):
        compare(one, other, "tangent", rtol=1e-6)


@pytest.mark.parametrize("name", ["attention", "multi-head attention", "LSTM"])
def test_fast_kernels_of_single_precision_are_replaced(name: str) -> None:
    single = Derivatives(fill(KERNELS[name]()).float(), inputs().float())
    single.forward.backward()
    double = Derivatives(fill(KERNELS[name]()), inputs())
    single.directions = [[d.float() for d in row] for row in double.directions]
    for one, other in zip(single.found(), double.found(), strict=True):
        compare(one.double(), other, "tangent", rtol=1e-3)


@pytest.mark.parametrize("name", ["LSTM", "attention in a checkpoint", "own function"])
def test_steps_are_taken(name: str) -> None:
    """With statistics of the layers, and a verdict for which the closure runs again."""
    model, x = fill({**KERNELS, **OTHERS}[name]()), inputs()
    own = trust_region(model, "squared-error")
    for _ in range(3):
        own.step(lambda: half_square(model(x), torch.ones(())))
        assert own.last["predicted"] < 0
    assert own.counters["skipped_steps"] == 0


def test_one_gradient_serves_all_directions() -> None:
    """Each direction takes one pass through its graph."""
    passes: list[int] = []

    class Noting(Cube):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            passes.append(1)
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradients[0]

    own = Derivatives(fill(Called(Noting.apply)), inputs())
    own.directions *= 2
    assert len(own.found()) == 4
    assert len(passes) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_derivative_is_refused(name: str) -> None:
    """At the first step, before anything has changed."""
    make, what = REFUSED[name]
    model, x = fill(make()), inputs()
    before = vector(model)
    own = trust_region(model, "squared-error")
    with pytest.raises(RuntimeError, match="its gradient cannot be differentiated: ") as error:
        own.step(lambda: half_square(model(x), torch.zeros(())))
    assert what in str(error.value)
    assert "soframe.Preconditioner" in str(error.value)
    assert torch.equal(vector(model), before)


def test_what_does_not_depend_on_anything_has_no_tangent() -> None:
    x = randn(3).requires_grad_()
    ((constant,),) = jacobian_products([randn(2)], [x], [[randn(3)]])
    assert torch.equal(constant, torch.zeros(2).double())
    unused, v = randn(2).requires_grad_(), randn(3, seed=1)
    found, none = jacobian_products([2 * x, 3 * unused], [x], [[v], [None]])
    compare(found[0], 2 * v, "tangent")
    assert not found[1].any()
    assert not any(tangent.any() for tangent in none)


def steps_of(function: Callable[[Tensor], Tensor], **settings: Any) -> Tensor:
    model = fill(Called(function))
    own = soframe.TrustRegion(model, "squared-error", **grouped(settings))
    torch.manual_seed(0)
    for step in range(4):
        x, y = randn(6, 4, seed=step), randn(6, 8, seed=50 + step)
        own.step(lambda x=x, y=y: half_square(model(x), y))
    own.close()
    return vector(model)


@pytest.mark.parametrize("fisher", ["forward-only", "monte-carlo", "type-2"])
def test_whole_steps_are_those_of_functions_of_torch(fisher: str) -> None:
    """Gradients that are differentiated give no statistics."""
    settings = {"fisher": fisher, "statistics_every": 2, "solve_every": 2}
    plain = steps_of(lambda t: t**3, **settings)
    compare(steps_of(Cube.apply, **settings), plain, "parameters")


@pytest.mark.slow
def test_a_model_under_autocast() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()]
    model, x = fill(nn.Sequential(*layers)).float(), randn(4, 3, 8, 8).float()
    y = randn(4, 64, seed=1).float()

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        return half_square(output.float(), y)

    own = trust_region(model, "squared-error", 0.1, layer_groups=2)
    losses = [float(own.step(closure)) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["stochastic", "trust region"])
def test_a_step_within_autocast_sees_its_parameters_move(kind: str) -> None:
    """Within one context torch casts each parameter once, whatever becomes of it."""
    changes: list[list[float | None]] = []
    for within in (False, True):
        model = fill(nn.Linear(3, 2)).float()
        own: Any = soframe.StochasticTrustRegion(model, model_every=1)
        if kind == "trust region":
            own = trust_region(model, "squared-error", LevenbergMarquardt(1.0, interval=1))
        seen: list[float | None] = []
        for step in range(3):
            x, y = randn(8, 3, seed=step).float(), randn(8, 2, seed=10 + step).float()

            def closure() -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x)  # noqa: B023
                return half_square(output.float(), y)  # noqa: B023

            with torch.autocast("cpu", torch.bfloat16, enabled=within):
                own.step(closure)
                loss = closure().item()
            seen += [own.readout.change, loss]
            assert loss == pytest.approx(closure().item(), rel=1e-6)
        changes.append(seen)
    assert changes[1] == pytest.approx(changes[0], rel=0.05)


@pytest.mark.parametrize("differentiates", [False, True])
def test_each_evaluation_within_autocast_has_its_own_weights(differentiates: bool) -> None:
    """As after a rejected step: torch keeps the casts of the weights that were tried first."""
    model, x = nn.Linear(3, 1), torch.ones(4, 3)

    def closure() -> Tensor:
        return model(x).float().square().mean()

    losses: list[float] = []
    expected: list[float] = []
    with torch.autocast("cpu", torch.bfloat16):
        for value in (1.0, 2.0, 4.0):
            nn.init.constant_(model.weight, value)
            nn.init.zeros_(model.bias)
            trial = [(closure, Replay(model))]
            losses.append(evaluated(trial, differentiates=differentiates))
            expected.append((3 * value) ** 2)
    assert losses == expected


def test_float16_autocast_is_refused() -> None:
    """Nothing scales the loss, and of many samples most gradients of outputs would be zeros."""
    model, x = fill(nn.Linear(3, 2)).float(), randn(4, 3).float()
    y = randn(4, 2, seed=1).float()

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        return half_square(output.float(), y)

    with pytest.raises(RuntimeError, match="zeros: let the closure use"):
        trust_region(model, "squared-error").step(closure)
    with pytest.raises(RuntimeError, match="zeros: let the closure use"):
        soframe.StochasticTrustRegion(model).step(closure)


class Table(nn.Module):
    """A table of indices, with dense gradients or sparse ones."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4, sparse=sparse), nn.Linear(8, 8)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.table(indices).flatten(1).tanh())


@pytest.mark.parametrize("kind", ["stochastic", "trust region"])
def test_sparse_gradients_are_the_dense_ones(kind: str) -> None:
    found = []
    for sparse in (False, True):
        model = fill(Table(sparse=sparse))
        own: Any = soframe.StochasticTrustRegion(model)
        if kind == "trust region":
            own = trust_region(model, "squared-error")
        for step in range(3):
            indices, y = torch.arange(12).view(6, 2) % 10, randn(6, 8, seed=step)
            own.step(lambda: half_square(model(indices), y))  # noqa: B023
        own.close()
        found.append(vector(model))
    compare(found[1], found[0], "parameters")


# -- derivatives that are not those of the gradient ------------------------------------------


class Halved(nn.Module):
    """A hook changes the gradient on the way, and random numbers are not torch's."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.random, self.hooked = np.random.default_rng(0), hooked

    def forward(self, hidden: Tensor) -> Tensor:
        noise = torch.from_numpy(self.random.normal(size=tuple(hidden.shape)))
        found = hidden * noise
        if self.hooked:
            found.register_hook(lambda gradient: gradient / 2)
        return found


@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_differentiated_is_the_gradient_as_it_is(hooked: bool) -> None:
    """No closure runs again, and a hook counts in slope and curvature."""
    model, x, y = fill(Called(Halved(hooked))), randn(6, 4), randn(6, 8, seed=1)
    own = trust_region(model, "squared-error", reject=False)
    own.step(lambda: half_square(model(x), y))
    assert own.last["predicted"] < 0
