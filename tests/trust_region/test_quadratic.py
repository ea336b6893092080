"""The quadratic model of the loss: its curvature along directions, and its minimum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.testing import compare
from soframe.trust_region import Quadratic
from soframe.trust_region.forward import Forward, evaluated, first_pass, run
from soframe.trust_region.quadratic import curvature_along
from soframe.trust_region.twice import PlainKernels
from tests.curvature import Batch, fill, half_square, log_cosh, randn
from tests.examples import examples
from tests.trust_region.kit import Criterion, classes_of, closures, deep, fisher, flat, labels


def forward_of(model: nn.Module, closure: Callable[[], Tensor]) -> Forward:
    return first_pass(model, closure, list(model.parameters()))[0]


def directions_of(model: nn.Module, count: int) -> list[list[Tensor]]:
    parameters = list(model.parameters())
    return [
        [randn(*p.shape, seed=100 * k + i) for i, p in enumerate(parameters)] for k in range(count)
    ]


def curvature(
    model: nn.Module, each: list[Callable[[], Tensor]], directions: list[list[Tensor]]
) -> Tensor:
    forwards = [forward_of(model, closure) for closure in each]
    return curvature_along(forwards, list(model.parameters()), directions)


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(2, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3)]
    return fill(nn.Sequential(*layers))


def image_batch(samples: int, seed: int = 0) -> Batch:
    return randn(samples, 2, 3, 3, seed=seed), labels(samples, seed=seed)


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


CURVATURES: dict[str, tuple[Callable[[], nn.Module], list[Batch], Criterion]] = {
    "softmax": (deep, [classes_of(0, 5)], F.cross_entropy),
    "micro-batches": (deep, [classes_of(0, 4), classes_of(1, 2)], F.cross_entropy),
    "conv, relu": (convolutional, [image_batch(3)], F.cross_entropy),
    "squares": (deep, [(randn(4, 3), randn(4, 3, seed=1))], half_square),
    "depends on targets": (deep, [(randn(4, 3), randn(4, 3, seed=1))], log_cosh),
    "sigmoid": (
        deep,
        [(randn(4, 3), (randn(4, 3, seed=1) > 0).double())],
        F.binary_cross_entropy_with_logits,
    ),
    "tied": (lambda: fill(Tied()), [classes_of(0, 4)], F.cross_entropy),
    "layer norm": (
        lambda: fill(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))),
        [classes_of(0, 4)],
        F.cross_entropy,
    ),
}


@pytest.mark.parametrize("name", CURVATURES)
def test_curvature_is_that_of_the_dense_fisher(name: str) -> None:
    make, batches, criterion = CURVATURES[name]
    model = make()
    directions = directions_of(model, 3)
    d = torch.stack([flat(direction) for direction in directions])
    before = flat(list(model.parameters()))
    expected = d @ fisher(model, batches, criterion) @ d.T
    compare(curvature(model, closures(model, batches, criterion), directions), expected, name)
    assert torch.equal(flat(list(model.parameters())), before)
    assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values())


class Nested(nn.Module):
    """A model whose outputs are in a structure, with parts that are no outputs of the loss."""

    def __init__(self, structure: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.structure = deep(), structure

    def forward(self, x: Tensor) -> Any:
        return self.structure(self.inner(x))


STRUCTURES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "states": (lambda y: (y, (y.tanh(), y.sin())), lambda out: out[0]),
    "states in the loss": (lambda y: (y.detach(), ([y / 2], y / 2)), lambda out: out[1][0][0] * 2),
    "dict": (lambda y: {"logits": y, "cache": None, "length": 3}, lambda out: out["logits"]),
    "places": (lambda y: (y, y.argmax(1), ["a"]), lambda out: out[0]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_outputs_may_be_nested(name: str) -> None:
    structure, logits = STRUCTURES[name]
    model, plain = Nested(structure), deep()
    batches = [classes_of(0, 5)]
    directions = directions_of(plain, 2)
    d = torch.stack([flat(direction) for direction in directions])
    expected = d @ fisher(plain, batches, F.cross_entropy) @ d.T
    x, y = batches[0]
    closure = lambda: F.cross_entropy(logits(model(x)), y)  # noqa: E731
    compare(curvature(model, [closure], directions), expected, name)


class Masked(nn.Module):
    """`Dropout` in the middle of a network, that notes its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 3)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mask = F.dropout(torch.ones_like(hidden, requires_grad=False), 0.5)
        self.masks.append(mask.detach().clone())
        return self.last((hidden * mask).tanh())


def test_dropout_has_the_masks_of_the_first_pass() -> None:
    model = fill(Masked())
    x, y = classes_of(0, 4)
    torch.manual_seed(5)
    directions = directions_of(model, 2)
    masks = model.masks
    found = curvature(model, closures(model, [(x, y)], F.cross_entropy), directions)
    after = torch.rand(())
    assert len(masks) == 1  # nothing runs again
    # The dense matrix of the network with this mask, which has no randomness left.
    fixed = nn.Module()
    fixed.first, fixed.last = model.first, model.last
    fixed.forward = lambda pair: model.last((model.first(pair[:, :3]) * pair[:, 3:]).tanh())  # type: ignore[method-assign]
    d = torch.stack([flat(direction) for direction in directions])
    inputs = torch.cat([x, masks[0]], 1)
    compare(found, d @ fisher(fixed, [(inputs, y)], F.cross_entropy) @ d.T, "curvature")
    # The random numbers go on as after one pass.
    torch.manual_seed(5)
    model(x)
    assert torch.equal(torch.rand(()), after)


def draws_first(graph: Callable[..., Any], _: object) -> Callable[..., Any]:
    """A compiler whose dropout has other masks than the eager one, as inductor's has."""

    def run(*inputs: Any) -> Any:
        torch.rand(1)
        return graph(*inputs)

    return run


class Around(nn.Module):
    """A network around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 6), layer, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(self.first(x)).tanh())
        return found


@pytest.mark.parametrize(
    ("layer", "compiled"),
    [
        (nn.Dropout(0.5), True),
        (nn.utils.spectral_norm(nn.Linear(6, 6)), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), False),
    ],
    ids=["dropout, compiled", "spectral norm by hooks", "spectral norm"],
)
def test_the_loss_is_evaluated_again_as_it_was_first(layer: nn.Module, compiled: bool) -> None:
    model = Around(layer).double()
    if compiled:
        torch._dynamo.reset()
        model.compile(backend=draws_first)
    x, y = classes_of(0, 40)
    forward, loss = first_pass(
        model, lambda: F.cross_entropy(model(x), y), list(model.parameters())
    )
    buffers = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        again = evaluated([(forward.closure, forward.replay)], differentiates=False)
        assert again == float(loss.detach())
        assert all(map(torch.equal, model.buffers(), buffers))


def test_batch_norm_is_left_as_after_one_pass() -> None:
    def make() -> nn.Module:
        return fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))

    model, once = make(), make()
    x, y = classes_of(0, 5)
    once(x)
    buffers = list(model.buffers())
    directions = directions_of(model, 2)
    found = curvature(model, closures(model, [(x, y)], F.cross_entropy), directions)
    assert [id(b) for b in model.buffers()] == [id(b) for b in buffers]
    assert all(map(torch.equal, model.buffers(), once.buffers()))
    # Statistics of the batch tie its samples together: one Jacobian of all outputs.
    names = [name for name, _ in model.named_parameters()]
    state = {name: p.detach() for name, p in model.named_parameters()}
    copies = {name: b.clone() for name, b in model.named_buffers()}

    def run(own: dict[str, Tensor]) -> Tensor:
        buffers = {name: b.clone() for name, b in copies.items()}
        return torch.func.functional_call(model, (own, buffers), (x,))

    jacobian = torch.func.jacrev(run)(state)
    j = torch.cat([jacobian[name].flatten(2) for name in names], 2).flatten(0, 1)
    with torch.no_grad():
        output = make()(x)
    h = torch.func.hessian(lambda f: F.cross_entropy(f, y))(output).reshape(15, 15)
    d = torch.stack([flat(direction) for direction in directions])
    compare(found, d @ j.T @ h @ j @ d.T, "curvature")


def test_a_loss_linear_in_the_output_has_no_curvature() -> None:
    model, x = deep(), randn(4, 3)
    each = closures(model, [(x, x)], lambda f, _: (2 * f).sum())
    found = curvature(model, each, directions_of(model, 2))
    assert torch.equal(found, torch.zeros(2, 2, dtype=torch.float64))


class Heads(nn.Module):
    """Two outputs, of one body; and all that two terms of a loss are of."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.one(hidden), self.other(hidden)


@pytest.mark.parametrize("coupled", [False, True])
def test_several_outputs_against_the_dense_matrix(coupled: bool) -> None:
    """Also where the loss couples them, which no sum of terms does: the model is of any loss."""

    def criterion(f: Tensor, y: Tensor) -> Tensor:
        product = f[:, 0] * f[:, 3] if coupled else f[:, 3]
        return log_cosh(f[:, :2], y[:, :2]) + product.square().mean()

    model = fill(Heads())
    batches = [(randn(n, 3, seed=n), randn(n, 5, seed=9 + n)) for n in (4, 2)]
    directions = directions_of(model, 2)
    each = closures(model, batches, lambda f, y: criterion(torch.cat(f, 1), y))
    found = curvature(model, each, directions)

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(self.model(x), 1)

    f = fisher(Joined(), batches, criterion)
    d = torch.stack([flat(direction) for direction in directions])
    compare(found, d @ f @ d.T, "curvature")


# -- the collector ---------------------------------------------------------------------------


def test_what_runs_outside_a_closure_is_not_held() -> None:
    model = deep()
    with pytest.raises(ZeroDivisionError):
        run(model, lambda: model(randn(2, 3)).sum() * (1 // 0), PlainKernels())
    assert not model._forward_hooks
    ((output,),), loss = run(model, lambda: model(randn(2, 3)).sum(), PlainKernels())
    assert torch.equal(output.sum(), loss)
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (lambda model, x: x.sum(), RuntimeError, "must run the model"),
        (lambda model, x: model(x), TypeError, "a scalar tensor"),
        (lambda model, x: model(x).sum().item(), TypeError, "a scalar tensor"),
        (lambda model, x: print(model(x)), TypeError, "a scalar tensor"),
    ],
    ids=["never", "no scalar", "a number", "nothing"],
)
def test_closures_that_are_none(
    closure: Callable[..., Any], error: type[Exception], message: str
) -> None:
    model, x = deep(), randn(2, 3)
    with pytest.raises(error, match=message):
        run(model, lambda: closure(model, x), PlainKernels())


# -- the minimum -----------------------------------------------------------------------------


def positive(size: int, rank: int, seed: int) -> Tensor:
    root = randn(size, rank, seed=seed)
    return root @ root.T


@given(size=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=examples(20))
def test_the_minimum_is_the_dense_solve(size: int, seed: int) -> None:
    c, b = positive(size, size + 2, seed), randn(size, seed=seed + 1)
    found = Quadratic(c, b).minimise()
    compare(found, torch.linalg.solve(c, -b), "minimum", rtol=1e-6)
    value = 0.5 * found @ c @ found + b @ found
    assert Quadratic(c, b).change(found) == pytest.approx(float(value), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e6])
def test_a_short_direction_is_no_singular_one(scale: float) -> None:
    c, b = positive(2, 3, 0), randn(2, seed=1)
    s = torch.tensor([1.0, scale], dtype=torch.float64)
    found = Quadratic(c * s * s[:, None], b * s).minimise()
    compare(found * s, Quadratic(c, b).minimise(), "minimum", rtol=1e-6)


def test_zero_directions_get_nothing() -> None:
    c, b = positive(3, 4, 0), randn(3, seed=1)
    c[1, :], c[:, 1], b[1] = 0, 0, 0
    found = Quadratic(c, b).minimise()
    keep = [0, 2]
    compare(found[keep], Quadratic(c[keep][:, keep], b[keep]).minimise(), "minimum")
    assert found[1] == 0
    nothing = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(Quadratic(torch.zeros(2, 2).double(), nothing).minimise(), nothing)


def test_dependent_directions_reach_the_same_minimum() -> None:
    # The third direction is the sum of the other two, the fourth the first once more.
    combine = torch.tensor([[1.0, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.float64)
    c, b = positive(2, 3, 0), randn(2, seed=1)
    found = Quadratic(combine.T @ c @ combine, combine.T @ b).minimise()
    compare(combine @ found, torch.linalg.solve(c, -b), "minimum", rtol=1e-6)
    assert found.norm() < 10


@given(size=st.integers(1, 3), rank=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=examples(25))
def test_one_more_direction_is_never_worse(size: int, rank: int, seed: int) -> None:
    root = randn(size + 1, rank, seed=seed)
    # The slope lies in the range of the curvature, as a gradient's does with damping.
    c, b = root @ root.T, root @ randn(rank, seed=seed + 1)
    more = Quadratic(c, b)
    less = Quadratic(c[:size, :size], b[:size])
    best, other = more.change(more.minimise()), less.change(less.minimise())
    assert best <= other + 1e-7 * abs(other)
    assert best <= 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_finite(bad: float) -> None:
    c, b = positive(2, 3, 0), randn(2)
    assert Quadratic(c, b).finite()
    c[0, 1] = bad
    assert not Quadratic(c, b).finite()
    assert not Quadratic(positive(2, 3, 0), torch.tensor([0.0, bad])).finite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_half_outputs_are_of_single_precision(dtype: torch.dtype) -> None:
    """A sum beyond the largest of half precision is no infinity, and small ones are not rounded."""
    layer = nn.Linear(2, 64).to(dtype)
    parameters = list(layer.parameters())
    x = randn(64, 2).to(dtype)

    def closure() -> Tensor:
        return layer(x).float().square().sum() / 2

    forward, _ = first_pass(layer, closure, parameters)
    directions = [[3 * randn(*p.shape, seed=k).to(dtype) for p in parameters] for k in range(2)]
    found = curvature_along([forward], parameters, directions)
    rows = [one[0].double().flatten() for one in forward.jacobian_products(parameters, directions)]
    tangents = torch.stack(rows)
    expected = tangents @ tangents.T
    assert expected.max() > torch.finfo(torch.float16).max
    compare(found, expected, "curvature", rtol=1e-6)
