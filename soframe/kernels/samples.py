"""Squares and moments of the gradients of single samples, without storing all of them.

Sample n has the gradient ``W_n = sum_t g_{n,t} a_{n,t}^T`` of a linear layer's weight, with inputs
``a`` and output gradients ``g`` at its positions t. With one position the squares need no product
of samples: ``sum_n W_n^2 = (g^2)^T (a^2)``. The moments of its rows and columns,
``sum_n W_n W_n^T`` and ``sum_n W_n^T W_n``, are then the moments of ``g`` and ``a``, weighted with
``|a|^2`` and ``|g|^2``; with several positions, products of Gram matrices
``[positions, positions]`` with ``g`` and ``a``, wherever that takes less than the gradients.
Rows are ``[groups, batch, positions, in]`` and ``[groups, batch, positions, out]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

AT_ONCE = 2**22  # numbers in the gradients of the samples that are computed together


def squared_gradients(rows: Tensor, output_rows: Tensor) -> Tensor:
    """Return the sum over samples of their squared gradients, ``[groups, out, in]``."""
    if rows.shape[2] == 1:
        return output_rows.squeeze(2).square().mT @ rows.squeeze(2).square()
    return by_samples(rows, output_rows)


def by_samples(rows: Tensor, output_rows: Tensor, at_once: int = AT_ONCE) -> Tensor:
    """Compute the same from the gradients, some samples at a time."""
    groups, _, _, into = rows.shape
    total = rows.new_zeros(groups, output_rows.shape[3], into)
    for by_sample in _gradients(rows, output_rows, at_once):
        total += by_sample.square_().sum(1)
    return total


def _gradients(rows: Tensor, output_rows: Tensor, at_once: int) -> Iterator[Tensor]:
    """Yield the gradients ``[groups, samples, out, in]`` of some samples at a time."""
    samples = max(1, at_once // (len(rows) * rows.shape[3] * output_rows.shape[3]))
    chunks = zip(rows.split(samples, 1), output_rows.split(samples, 1), strict=True)
    for inputs, gradients in chunks:
        yield torch.matmul(gradients.mT, inputs)


Diagonal = tuple[bool, bool]
"""Whether the diagonals of the moments of rows, and of columns, are returned instead."""


def sample_moments(
    rows: Tensor, output_rows: Tensor, diagonal: Diagonal = (False, False)
) -> tuple[Tensor, Tensor]:
    """Return the sums over samples of ``W_n W_n^T`` and ``W_n^T W_n``, of two sets of rows."""
    shared, into, out = *rows.shape[2:], output_rows.shape[3]
    if shared == 1:
        inputs, outputs = rows.squeeze(2), output_rows.squeeze(2)
        left = _weighted(outputs, inputs, diagonal[0])
        return left, _weighted(inputs, outputs, diagonal[1])
    last_out = 1 if diagonal[0] else out
    last_in = 1 if diagonal[1] else into
    grams = 2 * shared**2 * (into + out) + shared * (into * last_in + out * last_out)
    if grams <= out * into * (shared + last_in + last_out):
        return moments_by_grams(rows, output_rows, diagonal)
    return moments_by_samples(rows, output_rows, diagonal=diagonal)


def _weighted(rows: Tensor, weighting: Tensor, diagonal: bool) -> Tensor:
    """Return the moment of ``[groups, rows, n]``, weighted with the squared lengths of others."""
    weights: Tensor = torch.linalg.vector_norm(weighting, dim=2, keepdim=True).square()
    if diagonal:
        return (weights.mT @ rows.square()).squeeze(1)
    return (rows * weights).mT @ rows


def _products(rows: Tensor, other_rows: Tensor, diagonal: bool) -> Tensor:
    """Return ``one^T other`` of ``[groups, rows, n]``, or its diagonal ``[groups, n]``."""
    return (rows * other_rows).sum(1) if diagonal else rows.mT @ other_rows


def moments_by_grams(
    rows: Tensor, output_rows: Tensor, diagonal: Diagonal = (False, False)
) -> tuple[Tensor, Tensor]:
    """Compute the same without the gradients: ``W W^T = g^T (a a^T) g`` for rows a and g."""
    inputs = torch.matmul(rows, rows.mT)  # [groups, batch, shared, shared]
    outputs = torch.matmul(output_rows, output_rows.mT)
    mixed_outputs = torch.matmul(inputs, output_rows)  # [groups, batch, shared, out]
    mixed_inputs = torch.matmul(outputs, rows)  # [groups, batch, shared, in]
    left = _products(output_rows.flatten(1, 2), mixed_outputs.flatten(1, 2), diagonal[0])
    return left, _products(rows.flatten(1, 2), mixed_inputs.flatten(1, 2), diagonal[1])


def moments_by_samples(
    rows: Tensor, output_rows: Tensor, at_once: int = AT_ONCE, diagonal: Diagonal = (False, False)
) -> tuple[Tensor, Tensor]:
    """Compute the same from the gradients, some samples at a time: the plain twin."""
    groups, _, _, into = rows.shape
    out = output_rows.shape[3]
    left_shape, right_shape = [groups, out], [groups, into]
    if not diagonal[0]:
        left_shape.append(out)
    if not diagonal[1]:
        right_shape.append(into)
    left, right = rows.new_zeros(left_shape), rows.new_zeros(right_shape)
    for by_sample in _gradients(rows, output_rows, at_once):
        wide, tall = by_sample.transpose(1, 2).flatten(2).mT, by_sample.flatten(1, 2)
        left += _products(wide, wide, diagonal[0])
        right += _products(tall, tall, diagonal[1])
    return left, right
