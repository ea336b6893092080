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
from soframe.losses import SumLoss, Term
from soframe.testing import compare
from soframe.trust_region.passes import first_pass
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import Measured, deep, labels, trust_region, vector

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
    settings.pop("method", None)
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


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("kind", BOTH)
def test_several_calls_are_exact(kind: str, reuse: bool) -> None:
    settings = {"reuse_activations": reuse}
    own = hold_exact(kind, deep(), "squared-error", [(calls(), of_both)], **settings)
    assert not own._outputs.differentiates  # passes that only evaluate make no graph


@pytest.mark.parametrize("kind", BOTH)
def test_several_calls_in_micro_batches_are_exact(kind: str) -> None:
    each = [(calls(), of_both), (calls(EDGE, INSIDE), lambda a, b: of_both(b, a) / 3)]
    hold_exact(kind, deep(), "squared-error", each)


@pytest.mark.parametrize("kind", BOTH)
def test_calls_that_the_loss_multiplies_are_exact_or_refused(kind: str) -> None:
    """A loss that couples two calls has a Hessian between them, which no declared loss has."""
    each = [(calls(INSIDE, -INSIDE), lambda a, b: (a * b).square().mean() + a.square().mean())]
    if kind == "stochastic":
        hold_exact(kind, deep(), None, each)
        return
    with pytest.raises(ValueError, match=r"whatever weights samples have|times the curvature"):
        hold_exact(kind, deep(), "squared-error", each)


class Two(nn.Module):
    """Returns two outputs, of which one is made of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.first(x).tanh()
        return code, self.last(code)


@pytest.mark.parametrize("kind", BOTH)
def test_several_calls_with_several_outputs_are_exact(kind: str) -> None:
    def run(model: Callable[..., Any]) -> tuple[Tensor, ...]:
        return (*model(INSIDE), *model(EDGE))

    def criterion(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return of_both(a, c) + 0.5 * of_both(b, d)

    loss = SumLoss([Term("squared-error"), Term("squared-error", weight=0.5, output=1)])
    hold_exact(kind, fill(Two()), loss, [(run, criterion)])


@pytest.mark.parametrize(
    ("samples", "share"), [(3, 2.5), (8, 2.5), (8, 1.0)], ids=["unequal", "weighed", "alike"]
)
@pytest.mark.parametrize("closures", [1, 2])
def test_the_statistics_of_calls_are_those_of_one_with_all_samples(
    samples: int, share: float, closures: int
) -> None:
    """The factors of a layer: rows of all calls, weighed as the loss weighs them."""
    model = fill(nn.Sequential(nn.Linear(3, 2, bias=False)))
    own, edge = trust_region(model, "squared-error"), randn(samples, 3, seed=2)

    def closure() -> Tensor:
        found = model(INSIDE), model(edge)
        first, last = (half_square(one, torch.zeros_like(one)) for one in found)
        return (first + share * last) / closures

    own.step([closure] * closures)
    (block,) = own.preconditioner.blocks
    rows = torch.cat([INSIDE, edge])
    compare(block.running["A"][0], rows.T @ rows / len(rows), "A")
    compare(block.running["G"][0], (1 + share) * torch.eye(2).double(), "G", rtol=1e-6)


def test_several_calls_follow_one_tape() -> None:
    """With a parameter that both calls need, and functions between them that neither does."""
    model = deep()
    own = trust_region(model, "squared-error")

    def closure() -> Tensor:
        inside = model(INSIDE)
        weight = inside.detach().max(1).values.sum()
        return half_square(inside, inside.detach()) + weight * half_square(model(EDGE), EDGE)

    forward, _ = first_pass(model, own._outputs, closure, list(model.parameters()), reuse=True)
    assert forward.tape.problem is None
    assert forward.calls == 2
    directions = [[randn(*p.shape, seed=k) for p in model.parameters()] for k in range(2)]
    found = forward.jacobian_products(list(model.parameters()), directions)
    plain = first_pass(model, own._outputs, closure, list(model.parameters()), reuse=False)[0]
    twins = plain.jacobian_products(list(model.parameters()), directions)
    for one, other in zip(found, twins, strict=True):
        for tangent, twin in zip(one, other, strict=True):
            compare(tangent, twin, "tangent")


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

    with pytest.raises(RuntimeError, match=r"to the model again: let the model's forward"):
        own.step(closure)
    assert torch.equal(vector(model), before)


class Ragged(nn.Module):
    """Returns as many positions as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(1, 2)


def test_calls_whose_samples_have_other_shapes() -> None:
    """Exact where no loss is declared; else there is no batch of all samples."""
    run = calls(randn(4, 3, 3), randn(2, 5, 3))
    each = [(run, lambda a, b: a.square().mean() + b.exp().mean())]
    hold_exact("stochastic", fill(Ragged()), None, each)
    own = trust_region(model := fill(Ragged()), "cross-entropy")
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 5\).*let the model's forward"):
        own.step(lambda: each[0][1](*run(model)))


def test_samples_that_count_alike_are_of_one_call() -> None:
    own = trust_region(model := deep(), "squared-error", loss_average="global")
    with pytest.raises(ValueError, match=r"calls the model 2 times.*leave it out"):
        own.step(lambda: of_both(*calls()(model)))


class Sometimes(nn.Module):
    """Returns as many tensors as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(self.layer(x) * k for k in range(1, count + 1))


@pytest.mark.parametrize("kind", BOTH)
def test_calls_return_as_many_tensors(kind: str) -> None:
    own = BOTH[kind](model := Sometimes())
    with pytest.raises(RuntimeError, match=r"\(1, 2\): let the model's forward"):
        own.step(lambda: sum(o.square().mean() for k in (1, 2) for o in model(torch.ones(2, 3), k)))


def on_rank(rank: int, ranks: int, kind: str) -> Tensor:
    torch.set_num_threads(1)
    model = deep()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    loss = "squared-error"
    settings: dict[str, Any] = {"fisher": "type-2"} if kind == "whole" else {}
    if kind == "whole":
        own: Any = soframe.TrustRegion(wrapped, loss, damping=DAMPING, **settings)
    else:
        own = soframe.StochasticTrustRegion(wrapped, damping=DAMPING)
    inside, edge = randn(8, 3)[rank::ranks], randn(4, 3, seed=1)[rank::ranks]
    for _ in range(4):
        own.step(lambda: of_both(*calls(inside, edge)(wrapped)))
    return vector(model)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", BOTH)
def test_several_calls_on_ranks_are_those_of_one_process(kind: str) -> None:
    """On four each has one sample of one of the calls, and two of the other."""
    alone = on_rank(0, 1, kind)
    for ranks in (2, 4):
        for weights in run_ranks(on_rank, ranks, kind, group_timeout=60):
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

    def weighed(out: Tensor) -> Tensor:
        return of_both(out[:9], out[9:])

    def run(own: Callable[..., Any]) -> tuple[Tensor, ...]:
        return (own(POINTS, BORDER),)

    twin = Residuals(model.field, laplacian_by_func)
    own = hold_exact(kind, model, "squared-error", [(run, weighed)], twin)
    assert own._outputs.differentiates


CLOSURES: dict[str, Callable[[Field], Tensor]] = {
    "autograd.grad": lambda u: half_square(laplacian(u, POINTS), torch.ones(9, 1).double()),
    "autograd.grad, and the outputs": lambda u: (
        laplacian(u, POINTS).square().mean() + u(BORDER).square().mean()
    ),
    "jacrev": lambda u: jacrev(lambda x: u(x).sum(0))(POINTS).square().mean(),
    "vmap": lambda u: vmap(u)(POINTS).square().mean(),
    "vmap of a functional call": lambda u: (
        laplacian_by_func(lambda x: functional_call(u, dict(u.named_parameters()), (x,)), POINTS)
        .square()
        .mean()
    ),
    "jvp": lambda u: torch.func.jvp(u, (POINTS,), (POINTS,))[1].square().mean(),
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


@pytest.mark.parametrize("closures", [1, 2])
@pytest.mark.parametrize("kind", BOTH)
def test_class_weights_and_ignored_targets_are_exact(kind: str, closures: int) -> None:
    weight = torch.tensor([1.0, 0.2, 6.0]).double()
    x, y = randn(12, 3), labels(12)
    y[::4] = -100
    total = weight[y[y >= 0]].sum()

    def criterion(targets: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda f: F.cross_entropy(f, targets, weight, reduction="sum") / total

    each: list[tuple[Run, Callable[..., Tensor]]] = [
        (lambda model, x=x: (model(x),), criterion(y))  # type: ignore[misc]
        for x, y in zip(x.chunk(closures), y.chunk(closures), strict=True)
    ]
    hold_exact(kind, deep(), "cross-entropy", each)


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


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_a_closure_that_makes_gradients_is_refused(kind: str, retain: bool) -> None:
    """As one for `torch.optim.LBFGS` does."""
    model, x = nn.Linear(3, 2), randn(8, 3).float()
    own = BOTH[kind](model)

    def closure() -> Tensor:
        loss = F.mse_loss(model(x), x[:, :2])
        loss.backward(retain_graph=retain)
        return loss

    with pytest.raises(RuntimeError, match=r"call neither backward\(\) nor zero_grad\(\)"):
        own.step(closure)
    own.step(lambda: F.mse_loss(model(x), x[:, :2]))


@pytest.mark.parametrize("kind", BOTH)
def test_a_term_beside_the_output_of_one_function_with_it_is_refused(kind: str) -> None:
    """Autograd has one node for both halves, and the gradient of one of them is lost."""
    model, x = Halves(), randn(8, 3)
    own = BOTH[kind](model)
    with pytest.raises(RuntimeError, match="other than through the model's output"):
        own.step(lambda: F.mse_loss(model(x), x[:, :2]) + model.kept.square().mean())
    own.step(lambda: F.mse_loss(model(x), x[:, :2]))


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_of_a_functional_call_are_the_models(kind: str) -> None:
    model, x = fill(nn.Linear(3, 2)), randn(8, 3)
    own = BOTH[kind](model)
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def closure(parameters: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), x[:, :2])

    with pytest.raises(RuntimeError, match="depend on none of the parameters that are trained"):
        own.step(lambda: closure(copies))
    before = float(own.step(lambda: closure(dict(model.named_parameters()))))
    assert closure(dict(model.named_parameters())) < before
