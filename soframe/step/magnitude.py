"""The magnitude of the gradients of a model: finite or not, moderate or large."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from soframe.blocks.home import GradientHome
from soframe.kernels.devices import on_gpu

MODERATE = 1e10
"""Below this sum of a gradient, products with it are in range."""


def magnitude(parameters: Iterable[nn.Parameter], home: GradientHome) -> float:
    """Return the largest absolute value of the gradients, or zero if all their sums are moderate.

    Infinite or NaN if an element is.
    """
    gradients = [gradient for gradient in home.of(parameters) if gradient.numel() > 0]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not dense:
        return 0.0
    if on_gpu(dense[0]):
        # On a GPU launches cost more than passes, and all norms take a few launches.
        sums = list(torch._foreach_norm(dense, ord=float("inf")))
    else:
        # A sum is the fastest pass, and elements that are not finite make it not finite.
        sums = [g.sum(dtype=torch.float32 if g.itemsize < 4 else g.dtype) for g in dense]
    if len({total.device for total in sums}) > 1:
        sums = [total.to(sums[0].device) for total in sums]
    # One tensor, so that the host waits for the device once.
    together = torch.stack(sums)
    if bool(((together if on_gpu(dense[0]) else together.abs()) < MODERATE).all()):
        return 0.0
    # Finite elements may have a sum that is not.
    return float(torch.nn.utils.get_total_norm(dense, norm_type=float("inf")))


def discard(model: nn.Module, home: GradientHome) -> None:
    """Zero every gradient, so that a bad batch costs one update and not the weights."""
    for gradient in home.of(model.parameters()):
        gradient.zero_()
