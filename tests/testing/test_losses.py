"""The check of losses: soframe's own pass it, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Gaussian,
    Loss,
    MeanSquaredError,
    SquaredError,
    SumLoss,
    Term,
)
from soframe.testing import check_loss
from tests.curvature import randn

Criterion = Callable[[Tensor, Tensor], Tensor]
LABELS = torch.tensor([0, 2, 1])


def half(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum() / 2


def gaussian(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.gaussian_nll_loss(f[:, 0], y, f[:, 1].exp())


def joint(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f[:, :2], y) + 0.5 * f[:, 2:].square().mean()


@pytest.mark.parametrize(
    ("loss", "shape", "criterion", "targets"),
    [
        ("cross-entropy", (3, 4), nn.functional.cross_entropy, LABELS),
        (CrossEntropy(), (3, 4, 2), nn.functional.cross_entropy, LABELS[:, None].expand(3, 2)),
        (
            BinaryCrossEntropy,
            (3, 2),
            nn.functional.binary_cross_entropy_with_logits,
            (randn(3, 2) > 0).double(),
        ),
        (MeanSquaredError(), (3, 2, 2), nn.functional.mse_loss, randn(3, 2, 2, seed=1)),
        (SquaredError(), (3, 2, 2), half, randn(3, 2, 2, seed=1)),
        (Gaussian(), (3, 2, 3), gaussian, randn(3, 3, seed=1)),
        (
            SumLoss([Term("cross-entropy", slice(0, 2)), Term("mse", slice(2, 4), weight=0.5)]),
            (3, 4),
            joint,
            torch.tensor([0, 1, 1]),
        ),
    ],
    ids=["name", "positions", "class", "mse", "squared", "gaussian", "sum"],
)
def test_own_losses_pass(
    loss: Any, shape: tuple[int, ...], criterion: Criterion, targets: Tensor
) -> None:
    check_loss(loss, randn(*shape), criterion, targets)


class Poisson(Loss):
    """``exp(f) - y f``, summed over features: right in all it does."""

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return outputs.exp() * vectors

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        for feature in range(outputs.shape[1]):
            column = torch.zeros_like(outputs)
            column[:, feature] = (outputs[:, feature] / 2).exp()
            yield column

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        rates = outputs.exp()
        return rates - torch.poisson(rates, generator)


def poisson(f: Tensor, y: Tensor) -> Tensor:
    return (f.exp() - y * f).sum()


def check(loss: Loss) -> None:
    check_loss(loss, randn(3, 2), poisson, torch.tensor([[1, 0], [2, 3], [0, 1]]))


def test_a_loss_of_ones_own_passes() -> None:
    check(Poisson())


class DividesByN(Poisson):
    """A mean over the batch in both methods, which agree."""

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return super().hessian_product(outputs, vectors) / len(outputs)

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        for column in super().half_factor(outputs):
            yield column / len(outputs) ** 0.5


class Disagrees(Poisson):
    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return outputs.exp().square() * vectors


class LeavesOutAColumn(Poisson):
    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        yield next(iter(super().half_factor(outputs)))


class WrongShape(Poisson):
    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        for column in super().half_factor(outputs):
            yield column[0]


class NoisySamples(Poisson):
    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return 1.2 * super().sample(outputs, generator)


class OwnRandomness(Poisson):
    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return super().sample(outputs)


class InPlace(Poisson):
    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return outputs.exp_() * vectors


class TooHigh(Poisson):
    @property
    def floor(self) -> float:
        return 10.0


class Doubles(Poisson):
    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return outputs.double().exp() * vectors


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (DividesByN, "Hessian of sample 0: relative error"),
        (Disagrees, "hessian_product and half_factor: relative error"),
        (LeavesOutAColumn, "hessian_product and half_factor: relative error"),
        (WrongShape, r"half_factor\(\) yields columns of {\(2,\)}"),
        (NoisySamples, "second moment of samples: relative error"),
        (OwnRandomness, "does not draw from its generator"),
        (InPlace, "outputs have changed|relative error"),
        (TooHigh, "below its floor, 10"),
        (Doubles, "hessian_product turns float32 into torch.float64"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_loss_is_found(loss: type[Loss], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(loss())


class SummedMeanSquaredError(MeanSquaredError):
    @property
    def means(self) -> bool:
        return False


def test_positions_that_are_a_mean_are_no_sum() -> None:
    y = randn(3, 2, 2, seed=1)
    with pytest.raises(AssertionError, match="means=False: relative error"):
        check_loss(SummedMeanSquaredError(), randn(3, 2, 2), nn.functional.mse_loss, y)


class WrongCounts(Gaussian):
    def counts(self, outputs: Tensor, gradients: Tensor) -> Tensor:
        return 2 * super().counts(outputs, gradients)


def test_counts_are_compared() -> None:
    with pytest.raises(AssertionError, match="counts: relative error"):
        check_loss(WrongCounts(), randn(3, 2, 3), gaussian, randn(3, 3, seed=1))


def test_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="two samples or more"):
        check_loss(Poisson(), randn(1, 2), poisson, torch.ones(1, 2))


class Expects(Poisson):
    """Its expectation is declared, and no counts."""

    expected = True


def test_counts_that_are_missing_are_named() -> None:
    with pytest.raises(AssertionError, match=r"Expects\.expected is true, so it needs a method"):
        check(Expects())
