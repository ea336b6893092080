"""What a closure may do: exact, or refused by a message that names the remedy.

What a step promises is held against a dense Gauss-Newton matrix ``J^T H J``, with J of all outputs
of the closure and H the Hessian of its loss in them, by torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.testing import compare
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import Measured, classes_of, deep, labels, trust_region, vector

Make = Callable[[nn.Module], Any]
Run = Callable[[Callable[..., Any]], tuple[Tensor, ...]]
"""Makes the outputs of a closure, given the model."""

BOTH: dict[str, Make] = {
    "whole": lambda model: soframe.TrustRegion(model, "mse"),
    "stochastic": soframe.StochasticTrustRegion,
}
DAMPING = 0.2


def optimizer(kind: str, model: nn.Module, loss: Any, **settings: Any) -> Any:
    """With a damping that stays, and every step measured."""
    if kind == "whole":
        return trust_region(model, loss, DAMPING, **settings)
    return soframe.StochasticTrustRegion(model, damping=Measured(DAMPING), reject=False, **settings)


def promised(model: nn.Module, run: Run, criterion: Callable[..., Tensor], update: Tensor) -> float:
    """What the dense model of a closure says of an update; called before it."""
    named = dict(model.named_parameters())
    sizes = [p.numel() for p in named.values()]
    theta = torch.cat([p.detach().flatten() for p in named.values()])

    def outputs(theta: Tensor) -> tuple[Tensor, ...]:
        pieces = zip(named.items(), theta.split(sizes), strict=True)
        parameters = {name: piece.view(p.shape) for (name, p), piece in pieces}
        return run(lambda *x: functional_call(model, parameters, x))

    heads = [head.detach() for head in outputs(theta)]
    shapes = [(head.shape, head.numel()) for head in heads]

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([count for _, count in shapes])
        return criterion(*(p.view(shape) for p, (shape, _) in zip(pieces, shapes, strict=True)))

    flat = torch.cat([head.flatten() for head in heads])
    jacobian = jacrev(lambda t: torch.cat([head.flatten() for head in outputs(t)]))(theta)
    moved, gradient = jacobian @ update, torch.func.grad(loss)(flat)
    product = torch.func.hessian(loss)(flat) @ moved
    return float(gradient @ moved + moved @ product / 2 + DAMPING * update @ update / 2)


def hold_exact(
    kind: str,
    model: nn.Module,
    loss: Any,
    each: Sequence[tuple[Run, Callable[..., Tensor]]],
    twin: nn.Module | None = None,
    **settings: Any,
) -> Any:
    """Take steps with closures, and hold what each promises against the dense model.

    A twin has the same parameters, by the same names, and can be differentiated by torch.func.
    """
    own = optimizer(kind, model, loss, **settings)
    for _ in range(3):
        before = vector(model)
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        own.step([lambda run=run, of=of: of(*run(model)) for run, of in each])
        update, after = vector(model) - before, vector(model)
        model.load_state_dict(state, strict=False)
        expected = sum(promised(twin or model, run, of, update) for run, of in each)
        expected -= (len(each) - 1) * DAMPING * float(update @ update) / 2
        nn.utils.vector_to_parameters(after, model.parameters())
        assert expected != 0
        assert own.readout.predicted == pytest.approx(expected, rel=1e-7)
    return own


# -- several calls ---------------------------------------------------------------------------

INSIDE, EDGE = randn(8, 3), randn(3, 3, seed=1)


def calls(inside: Tensor = INSIDE, edge: Tensor = EDGE) -> Run:
    return lambda model: (model(inside), model(edge))


def of_both(inside: Tensor, edge: Tensor) -> Tensor:
    """Two means, of unequal batches and weights."""
    return half_square(inside, torch.ones_like(inside)) + 2.5 * half_square(
        edge, torch.zeros_like(edge)
    )


def test_several_calls_are_exact_without_a_declared_loss() -> None:
    own = hold_exact("stochastic", deep(), None, [(calls(), of_both)])
    assert not own._differentiates  # passes that only evaluate make no graph


def test_several_calls_in_micro_batches_are_exact() -> None:
    each = [(calls(), of_both), (calls(EDGE, INSIDE), lambda a, b: of_both(b, a) / 3)]
    hold_exact("stochastic", deep(), None, each)


def test_calls_that_the_loss_multiplies_are_exact() -> None:
    """A loss that couples two calls has a Hessian between them."""
    each = [(calls(INSIDE, -INSIDE), lambda a, b: (a * b).square().mean() + a.square().mean())]
    hold_exact("stochastic", deep(), None, each)


def test_a_declared_loss_is_of_one_call() -> None:
    own, before = trust_region(model := deep(), "squared-error"), vector(model)
    with pytest.raises(ValueError, match=r"calls the model 2 times.*pass a closure for each"):
        own.step(lambda: of_both(*calls()(model)))
    assert torch.equal(vector(model), before)


@pytest.mark.parametrize(
    "weighted",
    [
        lambda y, x: F.cross_entropy(x, y, weight=torch.tensor([1.0, 5.0, 2.0]).double()),
        lambda y, x: (torch.arange(8) * F.cross_entropy(x, y, reduction="none")).mean(),
        lambda y, x: F.cross_entropy(x, torch.where(torch.arange(8) < 4, -100, y)),
    ],
    ids=["classes", "samples", "ignored targets"],
)
def test_a_declared_loss_has_the_same_weight_for_each_sample(weighted: Any) -> None:
    own, before = trust_region(model := deep(), "cross-entropy"), vector(model)
    x, y = classes_of(0)
    with pytest.raises(ValueError, match=r"samples have from .* times its curvature"):
        own.step(lambda: weighted(y, model(x)))
    assert torch.equal(vector(model), before)


class Two(nn.Module):
    """Returns two outputs, of which one is made of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.first(x).tanh()
        return code, self.last(code)


def test_several_calls_with_several_outputs_are_exact() -> None:
    def run(model: Callable[..., Any]) -> tuple[Tensor, ...]:
        return (*model(INSIDE), *model(EDGE))

    def criterion(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return of_both(a, c) + 0.5 * of_both(b, d)

    hold_exact("stochastic", fill(Two()), None, [(run, criterion)])


@pytest.mark.parametrize("kind", BOTH)
def test_calls_without_gradients_are_constants(kind: str) -> None:
    """Before the call that counts, and after it."""
    model = deep()

    def target() -> Tensor:
        with torch.no_grad():
            return model(INSIDE).tanh()

    constant = target()
    own, plain = optimizer(kind, model, "squared-error"), deep()
    other = optimizer(kind, plain, "squared-error")
    own.step(lambda: half_square(model(INSIDE), target()) + 0 * target().sum())
    other.step(lambda: half_square(plain(INSIDE), constant))
    assert own.readout.predicted == pytest.approx(other.readout.predicted, rel=1e-9)


@pytest.mark.parametrize("kind", BOTH)
def test_a_call_of_what_another_has_returned_is_refused(kind: str) -> None:
    model = deep()
    before = vector(model)
    own = optimizer(kind, model, "squared-error")

    def closure() -> Tensor:
        inside = model(INSIDE)
        return of_both(inside, model(inside))

    with pytest.raises(RuntimeError, match=r"back to the model: let the model's forward"):
        own.step(closure)
    assert torch.equal(vector(model), before)


class Ragged(nn.Module):
    """Returns as many positions as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(1, 2)


def test_calls_whose_samples_have_other_shapes_are_exact() -> None:
    run = calls(randn(4, 3, 3), randn(2, 5, 3))
    each = [(run, lambda a, b: a.square().mean() + b.exp().mean())]
    hold_exact("stochastic", fill(Ragged()), None, each)


def on_rank(rank: int, ranks: int) -> Tensor:
    torch.set_num_threads(1)
    model = deep()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    own = soframe.StochasticTrustRegion(wrapped, damping=DAMPING)
    inside, edge = randn(8, 3)[rank::ranks], randn(4, 3, seed=1)[rank::ranks]
    for _ in range(4):
        own.step(lambda: of_both(*calls(inside, edge)(wrapped)))
    return vector(model)


@pytest.mark.distributed
def test_several_calls_on_ranks_are_those_of_one_process() -> None:
    alone = on_rank(0, 1)
    for weights in run_ranks(on_rank, 2, group_timeout=60):
        compare(weights, alone, "weights")


# -- derivatives in the closure, and in the model ----------------------------------------------


class Field(nn.Module):
    """``u(x)``; and in `Residuals` what a differential equation says of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fill(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def laplacian(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """By torch.autograd.grad, ``[N, 1]``."""
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
    second = [
        torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)
    ]
    return torch.stack(second).sum(0)[:, None]


def laplacian_by_func(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """By torch.func, ``[N, 1]``."""
    each = vmap(torch.func.hessian(lambda one: u(one[None])[0, 0]))(x)
    return each.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)


class Residuals(nn.Module):
    """Does all calls, and returns what the loss is of: samples of the inside, then of the edge."""

    def __init__(self, field: Field, laplacian: Callable[..., Tensor]) -> None:
        super().__init__()
        self.field, self.laplacian = field, laplacian

    def forward(self, inside: Tensor, edge: Tensor) -> Tensor:
        return torch.cat([self.laplacian(self.field, inside) + 1, self.field(edge)])


POINTS, BORDER = randn(9, 2), randn(4, 2, seed=1)


@pytest.mark.parametrize("by", [laplacian, laplacian_by_func], ids=["autograd", "func"])
@pytest.mark.parametrize("kind", BOTH)
def test_derivatives_within_the_model_are_exact(kind: str, by: Callable[..., Tensor]) -> None:
    """The remedy that messages name. The step is also judged, by one more pass."""
    model = Residuals(Field(), by)

    def mean(out: Tensor) -> Tensor:
        return half_square(out, torch.ones_like(out))

    def run(own: Callable[..., Any]) -> tuple[Tensor, ...]:
        return (own(POINTS, BORDER),)

    twin = Residuals(model.field, laplacian_by_func)
    own = hold_exact(kind, model, "squared-error", [(run, mean)], twin)
    assert own._differentiates


CLOSURES: dict[str, Callable[[Field], Tensor]] = {
    "autograd.grad": lambda u: half_square(laplacian(u, POINTS), torch.ones(9, 1).double()),
    "autograd.grad, and the outputs": lambda u: (
        laplacian(u, POINTS).square().mean() + u(BORDER).square().mean()
    ),
    "jacrev": lambda u: jacrev(lambda x: u(x).sum(0))(POINTS).square().mean(),
    "a penalty": lambda u: u(POINTS).square().mean() + u.net[0].weight.abs().sum(),
}


@pytest.mark.parametrize("name", CLOSURES)
@pytest.mark.parametrize("kind", BOTH)
def test_derivatives_in_the_closure_name_the_remedy(kind: str, name: str) -> None:
    model = Field()
    before, own = vector(model), optimizer(kind, model, "squared-error")
    with pytest.raises(RuntimeError, match="let the model's forward do all of that, and return"):
        own.step(lambda: CLOSURES[name](model))
    assert torch.equal(vector(model), before)


# -- weights and ignored targets ---------------------------------------------------------------


TARGETS, WEIGHTS = labels(12), torch.tensor([1.0, 0.2, 6.0]).double()
SOME = torch.where(torch.arange(12) % 4 == 0, -100, TARGETS)


def weighted(f: Tensor) -> Tensor:
    return F.cross_entropy(f, TARGETS, WEIGHTS)


def ignoring(f: Tensor) -> Tensor:
    return F.cross_entropy(f, SOME)


@pytest.mark.parametrize("criterion", [weighted, ignoring])
def test_terms_with_weights_are_exact_without_a_declared_loss(
    criterion: Callable[[Tensor], Tensor],
) -> None:
    x = randn(12, 3)
    hold_exact("stochastic", deep(), None, [(lambda model: (model(x),), criterion)])
    own = trust_region(model := deep(), "cross-entropy")
    with pytest.raises(ValueError, match="Weights of classes, samples and ignored targets are not"):
        own.step(lambda: criterion(model(x)))


# -- what is lost --------------------------------------------------------------------------------


class Halves(nn.Module):
    """Returns one of two results of one function, and keeps the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = fill(nn.Linear(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        out, self.kept = self.layer(x).chunk(2, 1)
        return out


@pytest.mark.parametrize("kind", BOTH)
def test_a_term_beside_the_output_of_one_function_with_it_is_refused(kind: str) -> None:
    """Autograd has one node for both halves, and the gradient of one of them is lost."""
    model, x = Halves(), randn(8, 3)
    own = BOTH[kind](model)
    with pytest.raises(RuntimeError, match="other than through the model's output"):
        own.step(lambda: F.mse_loss(model(x), x[:, :2]) + model.kept.square().mean())
    own.step(lambda: F.mse_loss(model(x), x[:, :2]))


@pytest.mark.parametrize("kind", ["whole", "stochastic"])
def test_a_closure_that_calls_backward_is_refused(kind: str) -> None:
    """Torch's own error proposes retain_graph=True, which would add to the step's gradients."""
    model = fill(nn.Linear(3, 2).double())
    before = model.weight.detach().clone()

    def closure() -> Tensor:
        loss = F.cross_entropy(model(randn(4, 3)), torch.tensor([0, 1, 1, 0]))
        loss.backward(retain_graph=True)
        return loss

    optimizer: Any = soframe.StochasticTrustRegion(model)
    if kind == "whole":
        optimizer = soframe.TrustRegion(model, "cross-entropy")
    with pytest.raises(RuntimeError, match="leave it out, and return the loss"):
        optimizer.step(closure)
    assert torch.equal(model.weight, before)
