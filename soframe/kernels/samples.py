"""Squares of the gradients of single samples, which are never all there at once.

Sample n has the gradient ``W_n = sum_t g_{n,t} a_{n,t}^T`` of a linear layer's weight, with inputs
``a`` and output gradients ``g`` at its positions t. Where there is one position the squares need
no product of samples: ``sum_n W_n^2 = (g^2)^T (a^2)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 2**22  # numbers: the gradients of as many samples are made together


def squared_gradients(rows: Tensor, output_rows: Tensor) -> Tensor:
    """Return the sum over samples of the squares of their gradients.

    Args:
        rows: ``[groups, batch, shared, in]``, the inputs.
        output_rows: ``[groups, batch, shared, out]``, the gradients of the outputs.

    Returns:
        ``[groups, out, in]``.
    """
    if rows.shape[2] == 1:
        return output_rows.squeeze(2).square().mT @ rows.squeeze(2).square()
    return by_samples(rows, output_rows)


def by_samples(rows: Tensor, output_rows: Tensor, at_once: int = AT_ONCE) -> Tensor:
    """Do the same by way of the gradients, some samples at a time.

    Args:
        rows: See `squared_gradients`.
        output_rows: See `squared_gradients`.
        at_once: How many numbers gradients may have together; those of one sample in any case.

    Returns:
        See `squared_gradients`.
    """
    groups, _, _, into = rows.shape
    out = output_rows.shape[3]
    total = rows.new_zeros(groups, out, into)
    samples = max(1, at_once // (groups * out * into))
    for inputs, gradients in zip(
        rows.split(samples, 1), output_rows.split(samples, 1), strict=True
    ):
        own = torch.matmul(gradients.mT, inputs)
        total += own.square_().sum(1)
    return total
