"""Any function whose gradient can be differentiated has derivatives along directions."""

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
    "differentiable once": (lambda: Called(Once.apply), "a gradient does not depend on what it"),
    "detached": (lambda: Called(Detached.apply), "a gradient does not depend on what it is made"),
}
"""Have no second derivative; and what the error says of it."""


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


@pytest.mark.parametrize("name", [*KERNELS, *(n for n in OTHERS if RECENT or n not in OLD)])
def test_equals_differences_of_outputs(name: str) -> None:
    """By whatever way is taken after the backward pass, and by differentiating the gradient."""
    model, x = fill({**KERNELS, **OTHERS}[name]()), inputs()
    twins = Twins(model, closure_of(model, x))
    buffers = [buffer.clone() for buffer in model.buffers()]
    twins.compare("tangent")
    twins.forward.backward()
    assert all(map(torch.equal, model.buffers(), buffers)) or "checkpoint" in name
    for one, other in zip(twins.by_tape(), differences(twins, x), strict=True):
        compare(one, other, "tangent", rtol=1e-6)


UNCOVERED = {"multi-head attention", "weight norm", "parameters in a list"}
"""Have no layer with curvature, which a trust region refuses."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({*KERNELS, *OTHERS} - UNCOVERED - (set() if RECENT else OLD))
)
def test_steps_are_taken_either_way(name: str) -> None:
    """With statistics of the layers, and a verdict for which the closure runs again."""
    steps: list[Tensor] = []
    for reuse in (True, False):
        torch.manual_seed(3)
        model, x = fill({**KERNELS, **OTHERS}[name]()), inputs()
        own = trust_region(model, "squared-error", reuse_activations=reuse)
        before = vector(model)
        for _ in range(3):
            own.step(lambda: half_square(model(x), torch.ones(())))  # noqa: B023
            assert own.last["predicted"] < 0
        assert own.counters["skipped_steps"] == 0
        steps.append(vector(model) - before)
        own.close()
    compare(steps[0], steps[1], "update", rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_plain_ones_while_the_closure_runs(name: str, dtype: torch.dtype) -> None:
    """In single precision the fast ones are what runs elsewhere; that stays as it was."""
    model, x = fill(KERNELS[name]()).to(dtype), inputs().to(dtype)
    before = torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()
    twins = Twins(model, closure_of(model, x))
    assert twins.tape.kernels
    twins.forward.backward()
    found = twins.by_tape()
    assert before == (torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled())
    double = Twins(model.double(), closure_of(model, x.double()))
    if "drops out" not in name:
        for one, other in zip(found, double.plain(), strict=True):
            compare(one.double(), other, "tangent", rtol=1e-3)


def test_one_gradient_serves_all_directions() -> None:
    """Each direction takes one pass through its graph."""
    model, x = fill(Called(Cube.apply)), inputs()
    passes: list[int] = []

    class Noting(Cube):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            passes.append(1)
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradients[0]

    model.function = Noting.apply
    twins = Twins(model, closure_of(model, x))
    twins.directions *= 2
    assert len(twins.by_tape()) == 4
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
    ((constant,),) = tangents_by_gradients([randn(2)], [x], [[randn(3)]])
    assert torch.equal(constant, torch.zeros(2).double())
    unused, v = randn(2).requires_grad_(), randn(3, seed=1)
    found, none = tangents_by_gradients([2 * x, 3 * unused], [x], [[v], [None]])
    compare(found[0], 2 * v, "tangent")
    assert not found[1].any()
    assert not any(tangent.any() for tangent in none)


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
    found = twins.by_tape()
    plain = Twins(model, lambda: half_square(model(x), y))
    plain.directions = twins.directions
    for one, other in zip(found, plain.plain(), strict=True):
        compare(one.float(), other, "tangent", rtol=0.15)


# -- derivatives that are not those of the gradient ------------------------------------------


class Halved(nn.Module):
    """A hook changes the gradient on the way, or random numbers are not torch's."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.random, self.hooked = np.random.default_rng(0), hooked

    def forward(self, hidden: Tensor) -> Tensor:
        noise = torch.from_numpy(self.random.normal(size=tuple(hidden.shape)))
        found = hidden * noise
        if self.hooked:
            found.register_hook(lambda gradient: gradient / 2)
        return found


@pytest.mark.parametrize("reuse", [False, True])
def test_random_numbers_may_come_from_anywhere(reuse: bool) -> None:
    """No closure runs again."""
    model, x, y = fill(Called(Halved(hooked=False))), randn(6, 4), randn(6, 8, seed=1)
    own = trust_region(model, "squared-error", reuse_activations=reuse, reject=False)
    own.step(lambda: half_square(model(x), y))
    assert own.last["predicted"] < 0


def test_a_gradient_that_a_hook_changes_is_refused() -> None:
    """By the tape; where the gradient is differentiated it is taken as it is."""
    model, x, y = fill(Called(Halved(hooked=True))), randn(6, 4), randn(6, 8, seed=1)
    before = vector(model)
    own = trust_region(model, "squared-error")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the gradient is not that of what the model comp"):
            own.step(lambda: half_square(model(x), y))
        assert torch.equal(vector(model), before)
    own.close()
    other = trust_region(model, "squared-error", reuse_activations=False)
    other.step(lambda: half_square(model(x), y))
    assert not torch.equal(vector(model), before)


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


def hooked_rank(rank: int, ranks: int) -> tuple[str, bool]:
    model = fill(Called(Halved(hooked=rank == 1)))
    before = vector(model)
    x, y = randn(6, 4, seed=rank), randn(6, 8, seed=5 + rank)
    wrapped = DistributedDataParallel(model)
    own = trust_region(wrapped, "squared-error")
    try:
        own.step(lambda: half_square(wrapped(x), y))
    except RuntimeError as error:
        return str(error), torch.equal(vector(model), before)
    return "", False


@pytest.mark.distributed
def test_a_hook_on_one_rank_stops_all() -> None:
    for told, stood in run_ranks(hooked_rank, 2):
        assert "the gradient is not that of what the model computes" in told
        assert stood
