"""What a loss says of its Hessian, against autograd on the loss of torch that it stands for."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Gaussian,
    Loss,
    MeanSquaredError,
    SquaredError,
    SumLoss,
)
from soframe.losses.base import random_signs
from soframe.registry import KINDS
from tests.curvature import randn


def labels(output: Tensor) -> Tensor:
    shape = (output.shape[0], *output.shape[2:])
    return torch.randint(output.shape[1], shape, generator=torch.Generator().manual_seed(1))


def zeros_and_ones(output: Tensor) -> Tensor:
    return (randn(*output.shape, seed=1) > 0).double()


def numbers(output: Tensor) -> Tensor:
    return randn(*output.shape, seed=1)


def half_of(precision: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: precision / 2 * (f - y).square().sum()


# soframe's loss; torch's loss of one sample, which is a batch of one; its targets.
LOSSES: dict[str, tuple[Loss, Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "cross-entropy": (CrossEntropy(), nn.CrossEntropyLoss(), labels),
    "cross-entropy, sum": (CrossEntropy("sum"), nn.CrossEntropyLoss(reduction="sum"), labels),
    "binary": (BinaryCrossEntropy(), nn.BCEWithLogitsLoss(), zeros_and_ones),
    "binary, sum": (
        BinaryCrossEntropy("sum"),
        nn.BCEWithLogitsLoss(reduction="sum"),
        zeros_and_ones,
    ),
    "mse": (MeanSquaredError(), nn.MSELoss(), numbers),
    "squared": (SquaredError(), half_of(1.0), numbers),
    "squared, precise": (SquaredError(2.5), half_of(2.5), numbers),
}
SHAPES = [(3, 4), (1, 1), (2, 3, 2), (2, 2, 3, 2)]
CASES = [(name, shape) for name in LOSSES for shape in SHAPES]
# Without a dimension of its own a sample has no classes.
CASES += [(name, (3,)) for name in LOSSES if not name.startswith("cross")]


def dense(name: str, outputs: Tensor) -> Tensor:
    """The Hessian of every sample's own loss: ``[N, K, K]``."""
    _, criterion, targets_of = LOSSES[name]
    targets = targets_of(outputs)
    rows = []
    for n in range(len(outputs)):
        target = targets[n : n + 1]
        hessian = torch.func.hessian(lambda f, y=target: criterion(f, y))(outputs[n : n + 1])
        rows.append(hessian.reshape(outputs[n].numel(), outputs[n].numel()))
    return torch.stack(rows)


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_products_are_those_of_the_hessian(name: str, shape: tuple[int, ...]) -> None:
    outputs, vectors = randn(*shape), randn(*shape, seed=2)
    flat = vectors.reshape(shape[0], -1, 1)
    expected = (dense(name, outputs) @ flat).reshape(shape)
    equal(LOSSES[name][0].hessian_product(outputs, vectors), expected)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_half_factors_multiply_to_the_hessian(name: str, shape: tuple[int, ...]) -> None:
    outputs = randn(*shape)
    columns = list(LOSSES[name][0].half_factor(outputs))
    assert all(column.shape == outputs.shape for column in columns)
    s = torch.stack(columns).reshape(len(columns), shape[0], -1)
    equal(torch.einsum("kni,knj->nij", s, s), dense(name, outputs))


class Neighbours(Loss):
    """A user's loss, with the two methods alone: ``H = B B^T`` for a fixed B ``[3, 2]``."""

    root = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return vectors @ self.root @ self.root.T

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        for column in self.root.T:
            yield column.expand_as(outputs)


SAMPLED = [(name, (2, 3)) for name in LOSSES] + [
    ("cross-entropy", (2, 3, 2)),
    ("binary", (2, 3, 2)),
    ("mse", (2, 2, 2)),
]


def moment_error(loss: Loss, hessian: Tensor, outputs: Tensor, samples: int, seed: int) -> float:
    """The relative error of the second moment of samples."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(hessian)
    # Samples are rows of one large batch: all of them in one call.
    many = outputs.repeat_interleave(samples, 0)
    v = loss.sample(many, generator).reshape(len(outputs), samples, -1)
    total = torch.einsum("nsi,nsj->nij", v, v) / samples
    return float((total - hessian).norm() / hessian.norm())


@pytest.mark.parametrize(("name", "shape"), [*SAMPLED, ("neighbours", (2, 3))])
def test_the_second_moment_of_samples_tends_to_the_hessian(
    name: str, shape: tuple[int, ...]
) -> None:
    outputs = randn(*shape)
    if name == "neighbours":
        loss: Loss = Neighbours()
        hessian = (Neighbours.root @ Neighbours.root.T).expand(len(outputs), 3, 3)
    else:
        loss, hessian = LOSSES[name][0], dense(name, outputs)
    few, many = (
        math.sqrt(sum(moment_error(loss, hessian, outputs, s, seed) ** 2 for seed in range(8)) / 8)
        for s in (400, 40000)
    )
    assert many < 0.03
    # A hundred times the samples: a tenth of the error, as far as eight runs can tell.
    assert 0.05 < many / few < 0.2


@pytest.mark.parametrize("name", [*LOSSES, "neighbours"])
def test_samples_come_from_the_generator(name: str) -> None:
    loss = Neighbours() if name == "neighbours" else LOSSES[name][0]
    outputs = randn(5, 3)
    before = torch.get_rng_state()
    one, same, other = (
        loss.sample(outputs, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CrossEntropy("max"), "positions must be 'mean' or 'sum', not 'max'"),
        (lambda: BinaryCrossEntropy("max"), "features must be 'mean' or 'sum', not 'max'"),
        (lambda: SquaredError(0.0), "precision must be positive, not 0.0"),
        (lambda: SquaredError(-1.0), "precision must be positive, not -1.0"),
        (lambda: SquaredError(math.nan), "precision must be positive, not nan"),
    ],
)
def test_options_out_of_range(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_losses_go_by_name() -> None:
    names = soframe.available("loss")
    assert names == {
        "binary-cross-entropy": BinaryCrossEntropy,
        "cross-entropy": CrossEntropy,
        "gaussian": Gaussian,
        "mse": MeanSquaredError,
        "squared-error": SquaredError,
        "sum": SumLoss,
    }
    assert KINDS["loss"].build("mse", Loss) == MeanSquaredError()


def test_an_unknown_loss_lists_those_that_are() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"no loss 'hinge'; registered: .*'gaussian', 'mse'"):
        soframe.Preconditioner(
            model, kl_clip=None, statistics=soframe.Statistics(fisher="type-2", loss="hinge")
        )
    with pytest.raises(TypeError, match="a loss is a name"):
        soframe.Preconditioner(
            model, kl_clip=None, statistics=soframe.Statistics(fisher="type-2", loss=nn.MSELoss())
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (4, 25), (300, 5, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_random_signs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.zeros(shape, dtype=dtype)
    one, same, other = (
        random_signs(like, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert one.shape == like.shape
    assert one.dtype == dtype
    assert bool((one.abs() == 1).all())
    assert torch.equal(one, same)
    assert one.numel() < 7 or not torch.equal(one, other)


def test_random_signs_are_independent() -> None:
    """Neither their means nor their products show more than chance: eight of a byte, and more."""
    count = 20000
    signs = random_signs(torch.zeros(count, 24, dtype=torch.float64), torch.Generator())
    moments = torch.cat([signs, signs.new_ones(count, 1)], 1)
    error = moments.T @ moments / count - torch.eye(25)
    assert float(error.abs().max()) < 5 / math.sqrt(count)


@pytest.mark.parametrize("name", ["cross-entropy", "binary-cross-entropy", "mse", "squared-error"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_in_the_sample(name: str, bad: float) -> None:
    """Not an error on one rank in the middle of a step: what comes of it is dropped on all."""
    outputs = torch.randn(4, 3)
    outputs[1, 2] = bad
    drawn = KINDS["loss"].build(name, Loss).sample(outputs * bad)
    assert drawn.shape == outputs.shape
    # An infinite logit of a Bernoulli variable is a certain one.
    certain = name == "binary-cross-entropy" and math.isinf(bad)
    assert drawn.isfinite().all() == (certain or "entropy" not in name)


def outcomes(name: str, output: Tensor) -> Iterator[Tensor]:
    """All targets that a likelihood can draw."""
    if name == "cross-entropy":
        yield from torch.arange(output.shape[1]).unsqueeze(1)
    else:
        for bits in itertools.product((0.0, 1.0), repeat=output.shape[1]):
            yield torch.tensor([bits], dtype=output.dtype)


@pytest.mark.parametrize("name", ["cross-entropy", "binary, sum"])
def test_the_hessian_is_the_fisher_of_the_predictive_distribution(name: str) -> None:
    """Summed over all labels, each with the probability that torch's own loss gives it."""
    outputs, (own, criterion, _) = randn(3, 4), LOSSES[name]
    for n in range(len(outputs)):
        total, mass = torch.zeros(4, 4, dtype=torch.float64), 0.0
        for target in outcomes(name, outputs[n : n + 1]):
            logits = outputs[n : n + 1].clone().requires_grad_()
            loss = criterion(logits, target)
            (gradient,) = torch.autograd.grad(loss, logits)
            probability = loss.detach().neg().exp()
            total += probability * gradient.T @ gradient
            mass += float(probability)
        assert mass == pytest.approx(1.0, rel=1e-12)
        columns = torch.eye(4, dtype=torch.float64)
        repeated = outputs[n : n + 1].expand(4, 4)
        equal(own.hessian_product(repeated, columns), total)


@pytest.mark.parametrize("name", ["squared", "squared, precise"])
def test_a_squared_error_s_hessian_is_the_fisher_of_its_gaussian(name: str) -> None:
    """Gauss and Hermite's three points are exact for second moments."""
    output, (own, criterion, _) = randn(1, 2), LOSSES[name]
    precision = own.precision
    points, weights = np.polynomial.hermite.hermgauss(3)
    total = torch.zeros(2, 2, dtype=torch.float64)
    for i, j in itertools.product(range(3), repeat=2):
        noise = torch.tensor([[points[i], points[j]]]) * math.sqrt(2 / precision)
        leaf = output.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(criterion(leaf, output + noise), leaf)
        total += weights[i] * weights[j] / math.pi * gradient.T @ gradient
    columns = torch.eye(2, dtype=torch.float64)
    equal(own.hessian_product(output.expand(2, 2), columns), total)
