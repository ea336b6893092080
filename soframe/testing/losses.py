"""The check of a loss: its Hessian, square root and samples against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from soframe.losses import Loss
from soframe.registry import KINDS
from soframe.testing.compare import compare

DRAWS = 4000
"""Samples for each second moment."""
_ERRORS = 6.0  # standard errors that a mean of samples may be off
_RTOL = 1e-6


def check_loss(
    loss: str | type[Loss] | Loss,
    outputs: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
    targets: Tensor,
) -> None:
    """Check a loss against the Hessian that autograd computes of it, in float64.

    - ``hessian_product`` and the columns of ``half_factor`` give the Hessian of each sample's loss,
      and do not divide by the number of samples. If `Loss.expected` is set they give its
      expectation instead: the two must agree, and ``counts`` must find the factor of each sample.
    - Samples have that second moment, and come from the generator.
    - ``floor`` is a lower bound, and ``means`` is right where outputs have positions.
    - Outputs stay as they are, and float32 stays float32.

    Args:
        loss: The loss; or its name or class.
        outputs: ``[N, ...]``, some outputs of a model, at least two samples.
        criterion: The loss of a batch of one sample, as a number: ``criterion(outputs[n : n + 1],
            targets[n : n + 1])``.
        targets: ``[N, ...]``.

    Raises:
        AssertionError: If the loss is wrong.
        ValueError: If there are fewer than two samples, or not as many targets.
    """
    own: Loss = KINDS["loss"].build(loss, Loss)
    if not 2 <= len(outputs) == len(targets):
        raise ValueError(
            f"check_loss needs two samples or more and as many targets, not {len(outputs)} and "
            f"{len(targets)}"
        )
    name = repr(own)
    outputs = outputs.detach().double()
    given = outputs.clone()
    targets = targets.double() if targets.is_floating_point() else targets
    hessians = _hessians_of_columns(own, outputs, name)
    _check_products(own, outputs, hessians, name)
    if own.expected:
        _check_counts(own, outputs, criterion, targets, name)
    else:
        for n, hessian in enumerate(hessians):
            one, target = outputs[n : n + 1], targets[n : n + 1]
            exact = torch.func.hessian(lambda f, y=target: criterion(f, y))(one)
            compare(
                hessian, exact.reshape(hessian.shape), f"{name}: Hessian of sample {n}", rtol=_RTOL
            )
    _check_samples(own, outputs, hessians, name)
    _check_floor(own, outputs, criterion, targets, name)
    _check_means(own, outputs, name)
    single = outputs.float()
    for which, made in (
        ("hessian_product", own.hessian_product(single, single)),
        ("half_factor", next(iter(own.half_factor(single)))),
        ("sample", own.sample(single)),
    ):
        assert made.dtype == torch.float32, f"{name}: {which} turns float32 into {made.dtype}"
    assert torch.equal(outputs, given), f"{name}: the outputs have changed"


def _hessians_of_columns(loss: Loss, outputs: Tensor, name: str) -> Tensor:
    """Return ``[N, K, K]``, the products of the half-factor's columns."""
    columns = list(loss.half_factor(outputs))
    assert columns, f"{name}: half_factor() yields no column"
    for column in columns:
        shape = tuple(column.shape)
        assert shape == tuple(outputs.shape), f"{name}: half_factor() yields a column {shape}"
    roots = torch.stack([column.flatten(1) for column in columns], 2)
    return roots @ roots.mT


def _check_products(loss: Loss, outputs: Tensor, hessians: Tensor, name: str) -> None:
    vectors = _randn(outputs.shape)
    expected = (hessians @ vectors.flatten(1).unsqueeze(2)).view_as(outputs)
    product = loss.hessian_product(outputs, vectors)
    compare(product, expected, f"{name}: hessian_product and half_factor", rtol=_RTOL)


def _check_counts(
    loss: Loss,
    outputs: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
    targets: Tensor,
    name: str,
) -> None:
    """Compare the factors of a weighted sum of samples' losses with the weights."""
    leaf = outputs.clone().requires_grad_()
    weights = torch.linspace(0.5, 1.5, len(outputs), dtype=torch.float64)
    each = [criterion(leaf[n : n + 1], targets[n : n + 1]) for n in range(len(outputs))]
    (gradients,) = torch.autograd.grad((weights * torch.stack(each)).sum(), leaf)
    shape = (-1, *(1 for _ in outputs.shape[1:]))
    found = loss.counts(outputs, gradients).expand_as(outputs)
    compare(found, weights.view(shape).expand_as(outputs), f"{name}: counts", rtol=_RTOL)


def _check_samples(loss: Loss, outputs: Tensor, hessians: Tensor, name: str) -> None:
    many = outputs.repeat_interleave(DRAWS, 0)
    drawn, again = (loss.sample(many, torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(drawn, again), f"{name}: sample() does not draw from its generator"
    v = drawn.reshape(len(outputs), DRAWS, -1)
    for n, hessian in enumerate(hessians):
        products = v[n].unsqueeze(2) * v[n].unsqueeze(1)
        moment, error = products.mean(0), products.std(0) / math.sqrt(DRAWS)
        slack = _ERRORS * error + _RTOL * hessian.abs().max()
        off = (moment - hessian).abs() > slack
        if bool(off.any()):
            compare(moment, hessian, f"{name}: second moment of samples", rtol=0.0)


def _check_floor(
    loss: Loss,
    outputs: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
    targets: Tensor,
    name: str,
) -> None:
    if loss.floor is None:
        return
    for n in range(len(outputs)):
        value = float(criterion(outputs[n : n + 1], targets[n : n + 1]))
        assert value >= loss.floor, f"{name}: a loss of {value:.3e} is below floor {loss.floor:g}"


def _check_means(loss: Loss, outputs: Tensor, name: str) -> None:
    """Compare Hessians of samples with twice as many positions."""
    if outputs.dim() < 3 or loss.means is None:
        return
    vectors = _randn(outputs.shape)
    twice = torch.cat([outputs, outputs], -1), torch.cat([vectors, torch.zeros_like(vectors)], -1)
    part = loss.hessian_product(*twice)[..., : outputs.shape[-1]]
    expected = loss.hessian_product(outputs, vectors) * (0.5 if loss.means else 1.0)
    compare(part, expected, f"{name}: with twice the positions, means={loss.means}", rtol=_RTOL)


def _randn(shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator)
