"""The check of a loss: its Hessian, square root and samples against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from soframe.losses import Loss
from soframe.registry import KINDS
from soframe.testing.compare import compare, seeded
from soframe.testing.dense import double

Criterion = Callable[[Tensor, Tensor], Tensor]
"""The loss of outputs and targets, a scalar."""
DRAWS = 4000
"""Samples for each second moment."""
RTOL = 1e-6


def check_loss(
    loss: str | type[Loss] | Loss, outputs: Tensor, criterion: Criterion, targets: Tensor
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
    checked: Loss = KINDS["loss"].build(loss, Loss)
    if not 2 <= len(outputs) == len(targets):
        raise ValueError(
            f"check_loss needs two samples or more and as many targets, not {len(outputs)} and "
            f"{len(targets)}"
        )
    name = repr(checked)
    outputs, targets = outputs.detach().double(), double(targets)
    outputs_before = outputs.clone()
    columns = list(checked.half_factor(outputs))
    shapes = {tuple(column.shape) for column in columns}
    assert shapes == {tuple(outputs.shape)}, f"{name}: half_factor() yields columns of {shapes}"
    roots = torch.stack([column.flatten(1) for column in columns], 2)
    hessians = roots @ roots.mT
    vectors = torch.randn(outputs.shape, dtype=torch.float64, generator=seeded())
    product = checked.hessian_product(outputs, vectors)
    expected = (hessians @ vectors.flatten(1).unsqueeze(2)).view_as(outputs)
    compare(product, expected, f"{name}: hessian_product and half_factor", rtol=RTOL)
    if outputs.dim() > 2 and checked.means is not None:
        twice = torch.cat([outputs, outputs], -1), torch.cat([vectors, 0 * vectors], -1)
        part = checked.hessian_product(*twice)[..., : outputs.shape[-1]]
        expected = product * (0.5 if checked.means else 1.0)
        compare(
            part, expected, f"{name}: with twice the positions, means={checked.means}", rtol=RTOL
        )
    leaf = outputs.clone().requires_grad_()
    sample_losses = [criterion(leaf[n : n + 1], targets[n : n + 1]) for n in range(len(leaf))]
    values = torch.stack(sample_losses)
    if checked.floor is not None:
        least = values.min().item()
        assert least >= checked.floor, (
            f"{name}: a loss of {least:.3e} is below its floor, {checked.floor:g}"
        )
    if checked.expected:
        _compare_counts(checked, outputs, leaf, values, name)
    else:
        _compare_hessians(hessians, outputs, criterion, targets, name)
    _compare_samples(checked, outputs, hessians, name)
    single = outputs.float()
    for which, result in (
        ("hessian_product", checked.hessian_product(single, single)),
        ("half_factor", next(iter(checked.half_factor(single)))),
        ("sample", checked.sample(single)),
    ):
        assert result.dtype == torch.float32, f"{name}: {which} turns float32 into {result.dtype}"
    assert torch.equal(outputs, outputs_before), f"{name}: the outputs have changed"


def _compare_hessians(
    hessians: Tensor, outputs: Tensor, criterion: Criterion, targets: Tensor, name: str
) -> None:
    """Compare Hessians of samples with autograd's."""
    for n, hessian in enumerate(hessians):
        output, target = outputs[n : n + 1], targets[n : n + 1]
        exact = torch.func.hessian(lambda f, y=target: criterion(f, y))(output)
        compare(hessian, exact.reshape(hessian.shape), f"{name}: Hessian of sample {n}", rtol=RTOL)


def _compare_counts(loss: Loss, outputs: Tensor, leaf: Tensor, values: Tensor, name: str) -> None:
    """Compare the weights of samples with `Loss.counts` of their gradients in a leaf."""
    weights = torch.linspace(0.5, 1.5, len(outputs), dtype=torch.float64)
    (gradients,) = torch.autograd.grad((weights * values).sum(), leaf)
    try:
        counts = loss.counts(outputs, gradients)
    except NotImplementedError as error:
        raise AssertionError(str(error)) from error
    sample_weights = counts.expand_as(outputs).flatten(1).T
    compare(sample_weights, weights.expand_as(sample_weights), f"{name}: counts", rtol=RTOL)


def _compare_samples(loss: Loss, outputs: Tensor, hessians: Tensor, name: str) -> None:
    """Compare the second moments of samples with the Hessians, by their standard errors."""
    many = outputs.repeat_interleave(DRAWS, 0)
    drawn, again = loss.sample(many, seeded()), loss.sample(many, seeded())
    assert torch.equal(drawn, again), f"{name}: sample() does not draw from its generator"
    for v, hessian in zip(drawn.reshape(len(outputs), DRAWS, -1), hessians, strict=True):
        products = v.unsqueeze(2) * v.unsqueeze(1)
        moment, error = products.mean(0), products.std(0) / math.sqrt(DRAWS)
        off = (moment - hessian).abs() > 6 * error + RTOL * hessian.abs().max()
        if bool(off.any()):
            compare(moment, hessian, f"{name}: second moment of samples", rtol=0.0)
