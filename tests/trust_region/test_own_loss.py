"""A loss that a user writes, from its registration to trained weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.registry import KINDS
from soframe.testing import compare
from tests.curvature import Batch, fill, randn
from tests.trust_region.kit import closures, fisher, gradient, trust_region, vector


@dataclass(frozen=True)
class Poisson(soframe.Loss):
    """``exposure * exp(f) - y f``, summed over features: counts y, of the rate ``exp(f)``."""

    exposure: float = 1.0

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self.exposure * outputs.exp() * vectors

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        for feature in range(outputs.shape[1]):
            column = torch.zeros_like(outputs)
            column[:, feature] = self.exposure**0.5 * (outputs[:, feature] / 2).exp()
            yield column

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        rates = self.exposure * outputs.exp()
        return rates - torch.poisson(rates, generator)


def counting(exposure: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss as the closure has it, a mean over samples."""
    return lambda f, y: (exposure * f.exp() - y * f).sum() / len(f)


def counts(rates: Tensor, seed: int = 0) -> Tensor:
    return torch.poisson(rates, torch.Generator().manual_seed(seed))


def repeated(step: int, samples: int = 5) -> Batch:
    """One input counted several times: a batch for which every block of K-FAC is exact."""
    x = randn(1, 3, seed=step).expand(samples, 3)
    return x, counts(torch.full((samples, 2), 2.0, dtype=torch.float64), seed=step)


def varied(step: int, samples: int = 6) -> Batch:
    x = randn(samples, 3, seed=step)
    return x, counts(torch.full((samples, 2), 2.0, dtype=torch.float64), seed=step)


def net() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


LAYERS = [slice(0, 16), slice(16, 26)]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KINDS["loss"], "_components", soframe.available("loss"))
    soframe.register("loss", "poisson")(Poisson)


def dense_step(
    theta: Tensor, last: Tensor | None, batch: Batch, exposure: float, damping: float
) -> tuple[Tensor, float]:
    """The update and what it promises, by dense matrices."""
    model = net()
    nn.utils.vector_to_parameters(theta, model.parameters())
    g = gradient(model, [batch], counting(exposure))
    f = fisher(model, [batch], counting(exposure)) + damping * torch.eye(len(g)).double()
    preconditioned = torch.zeros_like(g)
    for own in LAYERS:
        preconditioned[own] = -torch.linalg.solve(f[own, own], g[own])
    d = torch.stack([preconditioned] if last is None else [preconditioned, last])
    c, b = d @ f @ d.T, d @ g
    coefficients = torch.linalg.solve(c, -b)
    return coefficients @ d, float(b @ coefficients) / 2


@pytest.mark.parametrize(
    ("choice", "exposure"),
    [("poisson", 1.0), (Poisson, 1.0), (Poisson(), 1.0), (Poisson(2.5), 2.5)],
    ids=["name", "class", "instance", "instance with options"],
)
def test_steps_are_the_dense_ones(choice: Any, exposure: float) -> None:
    model = net()
    own = trust_region(model, choice, 0.5, decay=0.0, layer_groups=1)
    theta, last = vector(model), None
    for step in range(4):
        batch = repeated(step)
        last, predicted = dense_step(theta, last, batch, exposure, 0.5)
        theta = theta + last
        own.step(closures(model, [batch], counting(exposure)))
        compare(vector(model), theta, f"parameters after step {step}")
        assert own.last["predicted"] == pytest.approx(predicted, rel=1e-8)


@pytest.mark.parametrize("fisher_kind", ["monte-carlo", "type-2"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_model_is_the_dense_one_along_every_update(fisher_kind: str, parts: int) -> None:
    """Whatever the statistics are of: the curvature of the model is that of the closure's loss."""
    model = net()
    own = trust_region(model, "poisson", 0.3, fisher=fisher_kind, layer_groups=parts, lr=0.8)
    for step in range(4):
        batches = [varied(2 * step), varied(2 * step + 1, 3)]
        g, f = gradient(model, batches, counting()), fisher(model, batches, counting())
        before = vector(model)
        own.step(closures(model, batches, counting()))
        d = vector(model) - before
        predicted = g @ d + d @ f @ d / 2 + 0.3 * d @ d / 2
        assert own.last["predicted"] == pytest.approx(float(predicted), rel=1e-8)
        assert predicted < 0


def test_statistics_are_of_the_samples_of_the_loss() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    own = trust_region(model, "poisson", fisher="monte-carlo", decay=0.0)
    x, y = varied(0)
    with torch.no_grad():
        outputs = model(x)
    torch.manual_seed(3)
    own.step(lambda: counting()(model(x), y))
    torch.manual_seed(3)
    v = Poisson().sample(outputs)
    (block,) = own.preconditioner.blocks
    g = next(block.running.matrix(factor) for factor in block.factors if factor.name == "G")
    compare(g[0], v.T @ v / len(v), "G")


def test_a_loss_of_another_scale_is_refused() -> None:
    own = trust_region(model := net(), "poisson")
    with pytest.raises(ValueError, match=r"has 2\.5 times the curvature of loss=Poisson"):
        own.step(closures(model, [varied(0)], counting(2.5)))


@pytest.mark.parametrize("choice", ["poisson", Poisson, Poisson()], ids=["name", "class", "own"])
@pytest.mark.slow
def test_training_comes_to_the_most_likely_weights(choice: Any) -> None:
    x, truth = randn(64, 3), 0.5 * randn(2, 4, seed=1)
    inputs = torch.cat([x, torch.ones(64, 1).double()], 1)
    y = counts((inputs @ truth.T).exp())
    best = torch.zeros(2, 4, dtype=torch.float64)
    for _ in range(20):  # Newton's method, for each feature alone
        rates = (inputs @ best.T).exp()
        slope = (rates - y).T @ inputs
        hessians = torch.einsum("nk,ni,nj->kij", rates, inputs, inputs)
        best = best - torch.linalg.solve(hessians, slope)
    least = float(counting()(inputs @ best.T, y))
    torch.manual_seed(0)
    model = fill(nn.Sequential(nn.Linear(3, 2)), seed=2)
    own = soframe.TrustRegion(model, choice)  # the defaults, with sampled statistics
    losses = [float(own.step(lambda: counting()(model(x), y))) for _ in range(30)]
    assert losses[0] - least > 0.5
    assert losses[-1] - least < 1e-3 * (losses[0] - least)
    assert own.counters["skipped_steps"] == 0
