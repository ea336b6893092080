"""Micro-batches of unequal sizes, class weights, ignored targets: what a closure counts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.losses import CrossEntropy, SquaredError, SumLoss, Term
from soframe.testing import compare
from soframe.trust_region.declared import fit
from tests.curvature import fill, half_square, randn
from tests.trust_region.kit import Measured, classes_of, deep, labels, trust_region, vector

SIZES = (1, 7, 4)


@pytest.mark.parametrize("fisher", ["type-2", "forward-only"])
@pytest.mark.parametrize("settings", [{}, {"loss_average": "global"}, {"loss_average": "local"}])
def test_unequal_micro_batches_are_the_batch(settings: dict[str, Any], fisher: str) -> None:
    """Where each has its share of the mean; also where the first step's were equal."""
    found = []
    for cut in (False, True):
        net = deep()
        own = trust_region(net, "cross-entropy", Measured(0.5), fisher=fisher, **settings)
        for step in range(4):
            x, y = classes_of(step, 12)
            sizes = ((6, 6) if step == 0 else SIZES) if cut else (12,)
            parts = zip(x.split(sizes), y.split(sizes), strict=True)
            own.step(
                [lambda x=x, y=y: F.cross_entropy(net(x), y) * len(x) / 12 for x, y in parts]  # noqa: B023
            )
        found.append(vector(net))
    compare(*found, "weights", rtol=1e-8)


@pytest.mark.parametrize("settings", [{}, {"loss_average": "local"}])
def test_unequal_micro_batches_may_have_equal_shares(settings: dict[str, Any]) -> None:
    net = deep()
    own = trust_region(net, "cross-entropy", **settings)
    x, y = classes_of(0, 12)
    parts = list(zip(x.split(SIZES), y.split(SIZES), strict=True))
    own.step([lambda x=x, y=y: F.cross_entropy(net(x), y) / 3 for x, y in parts])
    assert own.preconditioner._statistics.share == 1.0


def refused(settings: dict[str, Any], shares: list[float], message: str) -> None:
    net = deep()
    own = trust_region(net, "cross-entropy", **settings)
    before = vector(net)
    x, y = classes_of(0, 12)
    parts = list(zip(x.split(SIZES), y.split(SIZES), shares, strict=True))
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            own.step([lambda x=x, y=y, s=s: s * F.cross_entropy(net(x), y) for x, y, s in parts])
    assert torch.equal(vector(net), before)


@pytest.mark.parametrize("settings", [{}, {"loss_average": "global"}])
def test_shares_that_do_not_add_up_are_refused(settings: dict[str, Any]) -> None:
    message = "have shares of the mean that add up to one"
    refused(settings, [2 / 12, 14 / 12, 8 / 12], message)
    refused(settings, [1.0, 7.0, 4.0], message)


def test_equal_shares_of_unequal_batches_are_not_global() -> None:
    refused({"loss_average": "global"}, [1 / 3] * 3, "loss_average='global' says that all samples")


# -- weights of terms ----------------------------------------------------------------------------


class Positions(nn.Module):
    """Logits ``[N, classes, T]`` of inputs ``[N, T, features]``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mT


def classes(weight: list[float] | None, ignored: bool, reduction: str = "mean") -> Any:
    def criterion(outputs: Tensor, y: Tensor) -> Tensor:
        w = None if weight is None else torch.tensor(weight, dtype=outputs.dtype)
        y = torch.where(torch.arange(y.numel()).view(y.shape) % 3 == 1, -100, y) if ignored else y
        return F.cross_entropy(outputs, y, w, reduction=reduction)

    return criterion


def binary(outputs: Tensor, y: Tensor, **options: Any) -> Tensor:
    target = F.one_hot(y, outputs.shape[1]).to(outputs)
    target = target.movedim(-1, 1) if y.dim() > 1 else target
    options = {k: torch.tensor(v, dtype=outputs.dtype) for k, v in options.items()}
    return F.binary_cross_entropy_with_logits(outputs, target, **options)


def masked(outputs: Tensor, y: Tensor) -> Tensor:
    """A regression of which some numbers are missing."""
    there = (torch.arange(outputs.numel()).view(outputs.shape) % 4 != 0).to(outputs)
    return 0.5 * (there * outputs.square()).sum() / (there.sum() / outputs[0].numel())


WEIGHED: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "class weights": ("cross-entropy", classes([1.0, 0.3, 4.0], False)),
    "ignored": ("cross-entropy", classes(None, True)),
    "both": ("cross-entropy", classes([1.0, 0.3, 4.0], True)),
    "weighted sum": ("cross-entropy", classes([1.0, 0.3, 4.0], False, "sum")),
    "label smoothing": ("cross-entropy", partial(F.cross_entropy, label_smoothing=0.2)),
    "positives": ("binary-cross-entropy", partial(binary, pos_weight=[3.0])),
    "missing": (SquaredError(), masked),
}


@pytest.mark.parametrize("closures", [1, 2])
@pytest.mark.parametrize("shape", [(12,), (12, 4)], ids=["samples", "positions"])
@pytest.mark.parametrize("name", WEIGHED)
def test_the_fisher_is_that_of_the_closures_loss(name: str, shape: Any, closures: int) -> None:
    """Of one linear layer G is the mean over rows of the Hessians, as autograd says."""
    loss, criterion = WEIGHED[name]
    if name == "missing" and len(shape) > 1:
        pytest.skip("squared errors are of outputs")
    net = fill(Positions(3) if len(shape) > 1 else nn.Sequential(nn.Linear(3, 3, bias=False)))
    x = randn(*shape, 3)
    y = labels(x[..., 0].numel()).view(shape)
    own = trust_region(net, loss)
    parts = list(zip(x.chunk(closures), y.chunk(closures), strict=True))
    with torch.no_grad():
        outputs = [net(one).detach() for one, _ in parts]
    own.step([lambda x=x, y=y: criterion(net(x), y) / closures for x, y in parts])
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for output, (_, targets) in zip(outputs, parts, strict=True):
        hessian = torch.func.hessian(criterion)(output, targets)
        hessian = hessian.movedim((1, 3) if output.dim() == 2 else (1, 4), (0, 1))
        rows = hessian.reshape(3, 3, output[:, 0].numel(), -1)
        expected += rows.diagonal(dim1=2, dim2=3).sum(-1) * len(output) / output[:, 0].numel()
    compare(own.preconditioner._blocks[0].running["G"][0], expected / closures, "G", rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 3])
def test_class_weights_train(parts: int) -> None:
    """In a net of several layers, with closures whose weights are shares of one mean."""
    net, weight = deep().float(), torch.tensor([1.0, 0.2, 6.0])
    own = soframe.TrustRegion(net, "cross-entropy")
    x, y = classes_of(0, 48)
    x = x.float()
    y = torch.where(x[:, 0] > 0, y, -100)
    total = weight[y[y >= 0]].sum()

    def closure(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y, weight, reduction="sum") / total

    losses = []
    for _ in range(20):
        each = zip(x.chunk(parts), y.chunk(parts), strict=True)
        losses.append(float(own.step([partial(closure, *one) for one in each])))
    assert own.counters["skipped_steps"] == 0
    assert losses[-1] < 0.6 * losses[0]


def test_weights_are_followed_where_the_first_batch_has_none() -> None:
    net = deep()
    own = trust_region(net, "cross-entropy")
    weight = torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64)
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(net(x), y % 2, weight))
    assert own.preconditioner._statistics.share == 1.0
    (forward,), _ = own._forward_backward([lambda: F.cross_entropy(net(x), y, weight)])
    found = fit(CrossEntropy(), forward, 1)
    assert found.weights is not None
    expected = weight[y] / weight[y].mean()
    compare(found.times * found.weights[0].flatten(), expected, "weights", rtol=1e-6)
    (root,) = found.roots(1, alike=True)
    compare(root.flatten().square(), expected, "weights of samples that count alike", rtol=1e-6)


OTHERS: dict[str, tuple[Any, Any]] = {
    "a penalty of outputs": (
        "cross-entropy",
        lambda f, y: F.cross_entropy(f, y) + 0.1 * f.square().mean(),
    ),
    "weights of one term": (
        SumLoss([Term("cross-entropy", slice(0, 2)), Term("squared-error", slice(2, 3))]),
        lambda f, y: (
            F.cross_entropy(f[:, :2], y % 2, torch.tensor([1.0, 5.0]).to(f))
            + half_square(f[:, 2:], torch.zeros(len(f), 1).to(f))
        ),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_weights_cannot_explain_is_refused(name: str) -> None:
    loss, criterion = OTHERS[name]
    net = deep()
    own = trust_region(net, loss)
    before = vector(net)
    x, y = classes_of(0)
    message = "whatever weights samples have|times the curvature of loss"
    with pytest.raises(ValueError, match=message):
        own.step(lambda: criterion(net(x), y))
    assert torch.equal(vector(net), before)


def test_a_loss_of_other_shapes_is_named() -> None:
    net = fill(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))
    own = trust_region(net, "cross-entropy")
    with pytest.raises(
        ValueError, match=r"loss=CrossEntropy.* is not one of outputs of shape \[8\]"
    ):
        own.step(lambda: net(randn(8, 3)).square().mean())
