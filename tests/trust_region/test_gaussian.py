"""A loss whose Hessian depends on targets: models have the Fisher, gradients tell the scale."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.losses import Gaussian, SumLoss, Term
from soframe.testing import compare
from soframe.trust_region import LevenbergMarquardt
from tests.curvature import Batch, fill, randn
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import closures, gradient, trust_region, vector


def net() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def batch(step: int, samples: int = 6) -> Batch:
    return randn(samples, 3, seed=step), randn(samples, seed=step + 50)


def nll(outputs: Tensor, y: Tensor) -> Tensor:
    return F.gaussian_nll_loss(outputs[:, 0], y, outputs[:, 1].exp(), eps=0.0)


def fisher(model: nn.Module, batches: list[Batch]) -> Tensor:
    """The dense one: ``J^T diag(exp(-s), 1 / 2) J``, a mean over samples and micro-batches."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    total: Any = 0.0
    for x, _ in batches:
        for one in x.split(1):
            jacobian = torch.func.jacrev(
                lambda p, one=one: torch.func.functional_call(model, p, (one,))[0]
            )(parameters)
            j = torch.cat([rows.reshape(2, -1) for rows in jacobian.values()], 1)
            s = model(one)[0, 1].detach()
            h = torch.stack([(-s).exp(), torch.full_like(s, 0.5)]).diag()
            total = total + j.T @ h @ j / len(x) / len(batches)
    return total


@pytest.mark.parametrize("kind", ["monte-carlo", "type-2"])
@pytest.mark.parametrize("samples", [(6,), (6, 6)])
def test_the_model_has_the_dense_fisher_along_every_update(
    kind: str, samples: tuple[int, ...]
) -> None:
    model = net()
    own = trust_region(model, "gaussian", 0.3, fisher=kind, lr=0.8)
    for step in range(4):
        batches = [batch(2 * step + i, n) for i, n in enumerate(samples)]
        g, f = gradient(model, batches, nll), fisher(model, batches)
        before = vector(model)
        own.step(closures(model, batches, nll))
        d = vector(model) - before
        predicted = g @ d + d @ f @ d / 2 + 0.3 * d @ d / 2
        assert own.last["predicted"] == pytest.approx(float(predicted), rel=1e-8)
        assert predicted < 0


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (lambda f, y: 6 * nll(f, y), r"has 6 times the curvature of loss=Gaussian"),
        (
            lambda f, y: ((y - f[:, 0]) ** 2 * (-f[:, 1]).exp() + f[:, 1]).mean(),
            r"has 2 times the curvature of loss=Gaussian",
        ),
        (
            lambda f, y: ((y - f[:, 0]) ** 2 * (-f[:, 1]).exp() + f[:, 1] / 2).mean(),
            r"not the mean of loss=Gaussian.*terms count from .* to .* of it",
        ),
        (
            lambda f, y: F.gaussian_nll_loss(f[:, 0], y, F.softplus(f[:, 1])),
            r"not the mean of loss=Gaussian",
        ),
        (
            lambda f, y: (
                (
                    torch.arange(6.0)
                    * F.gaussian_nll_loss(f[:, 0], y, f[:, 1].exp(), reduction="none")
                ).sum()
                / 15
            ),
            r"not the mean of loss=Gaussian.*terms count from 0 to 2",
        ),
        (lambda f, y: F.mse_loss(f[:, 0], y), r"not the mean of loss=Gaussian|times the curvature"),
    ],
    ids=["sum", "twice", "without its half", "softplus", "weights", "squared error"],
)
def test_another_loss_is_refused(criterion: Any, message: str) -> None:
    own = trust_region(model := net(), "gaussian")
    before = vector(model)
    with pytest.raises(ValueError, match=message):
        own.step(closures(model, [batch(0)], criterion))
    assert torch.equal(vector(model), before)


def test_what_cannot_be_told_is_refused() -> None:
    terms = SumLoss([Term("gaussian", slice(0, 2)), Term("mse", slice(2, None))])
    with pytest.raises(ValueError, match="a sum of losses with an expected Hessian among them"):
        trust_region(net(), terms)
    model = fill(nn.Linear(3, 3))
    own = trust_region(model, Gaussian())
    with pytest.raises(ValueError, match=r"is not one of outputs of shape \[6, 3\]"):
        own.step(closures(model, [batch(0)], lambda f, y: (f[:, 0] - y).square().mean()))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.net(x).unbind(1)


def test_a_pair_of_outputs_is_named() -> None:
    model = Pair()
    own = trust_region(model, "gaussian")
    x, y = batch(0)
    with pytest.raises(TypeError, match=r"returns 2 tensors, .* is of one: .* torch.stack"):
        own.step(lambda: F.gaussian_nll_loss((out := model(x))[0], y, out[1].exp()))


def test_a_batch_that_is_not_finite_is_skipped() -> None:
    model = net()
    own = trust_region(model, "gaussian")
    x, y = batch(0)
    before = vector(model)
    own.step(closures(model, [(x, y * math.inf)], nll))
    assert own.counters["skipped_steps"] == 1
    assert torch.equal(vector(model), before)
    own.step(closures(model, [(x, y)], nll))
    assert not torch.equal(vector(model), before)


@pytest.mark.slow
def test_training_comes_to_the_most_likely_line() -> None:
    """With the defaults: noise grows along the line, and what is found is where slopes vanish."""
    x = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = 2 * x[:, 0] + 0.3 + (0.5 * x[:, 0] - 1).exp() * noise
    torch.manual_seed(0)
    model = nn.Linear(1, 2).double()
    own = soframe.TrustRegion(model, "gaussian", full_batch=True)
    for _ in range(60):
        own.step(lambda: nll(model(x), y))
    slopes = torch.autograd.grad(nll(model(x), y), list(model.parameters()))
    assert max(float(one.abs().max()) for one in slopes) < 1e-6
    assert model.weight.detach().flatten().tolist() == pytest.approx([2.0, 1.0], abs=0.3)


def leg(rank: int, ranks: int, steps: range, saved: bytes) -> tuple[bytes, Tensor]:
    """Some steps of two micro-batches, from what was saved, if anything."""
    model = net()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    own = trust_region(wrapped, "gaussian", LevenbergMarquardt(interval=1))
    if saved:
        everything = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(everything["model"])
        own.load_state_dict(everything["optimizer"])
    for step in steps:
        # Micro-batches of one sample of each rank, or of all of them: means are over 12 or 6.
        x, y = batch(step, 24)
        share = 24 // ranks
        part = slice(rank * share, (rank + 1) * share)
        halves = [(x[part][i::2], y[part][i::2]) for i in range(2)]
        own.step(closures(wrapped, halves, nll))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": own.state_dict()}, file)
    own.close()
    return file.getvalue(), vector(model)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "then"),
    [
        (2, 2),
        *(
            pytest.param(ranks, then, marks=pytest.mark.thorough)
            for ranks, then in ((4, 2), (3, 4))
        ),
    ],
)
def test_ranks_with_micro_batches_are_one_process_and_go_on(ranks: int, then: int) -> None:
    _, weights = leg(0, 1, range(5), b"")
    first = run_ranks(leg, ranks, range(3), b"", timeout=120)
    for _, found in run_ranks(leg, then, range(3, 5), first[0][0], timeout=120):
        compare(found, weights, "weights", rtol=1e-7)
