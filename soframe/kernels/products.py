"""Matrix products as the trust region's derivatives take them, outside of autocast."""

from __future__ import annotations

import math

from torch import Tensor


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left^T right`` of ``[rows, m]`` and ``[rows, n]``."""
    return left.T @ right


def times(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left right``, of matrices or of batches of matrices."""
    return left @ right


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, added: Tensor | None = None
) -> Tensor:
    """Return ``x weight^T + bias + added``, in the memory of a contiguous ``added``."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # whose width may be zero
    if added is None:
        outputs = rows @ weight.T
    else:
        outputs = added.view(len(rows), len(weight)).addmm_(rows, weight.T)
    if bias is not None:
        outputs.add_(bias)
    return outputs.view(*x.shape[:-1], len(weight))
