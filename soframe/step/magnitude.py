"""The gradients of a whole model: are they finite, how large, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from soframe.blocks.home import GradientHome
from soframe.kernels.devices import on_gpu

MODERATE = 1e10
"""What sums of gradients stay below, unless products with them may be out of range."""


def magnitude(parameters: Iterable[nn.Parameter], home: GradientHome) -> float:
    """Return how large the gradients are, where that matters.

    Args:
        parameters: The parameters of a model.
        home: Where their gradients live.

    Returns:
        Zero where sums tell of nothing large, else the largest absolute value: infinite or not a
        number where an element is.
    """
    gradients = [gradient for gradient in home.of(parameters) if gradient.numel() > 0]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not dense:
        return 0.0
    if on_gpu(dense[0]):
        # There launches count more than passes, and all norms are a few of them.
        sums = list(torch._foreach_norm(dense, ord=float("inf")))
    else:
        # A sum is the fastest pass; what is not finite never leaves it finite, nor small.
        sums = [g.sum(dtype=torch.float32 if g.itemsize < 4 else g.dtype) for g in dense]
    if len({total.device for total in sums}) > 1:
        sums = [total.to(sums[0].device) for total in sums]
    together = torch.stack(sums)
    if bool(((together if on_gpu(dense[0]) else together.abs()) < MODERATE).all()):
        return 0.0
    # Finite elements may have a sum that is not.
    return float(torch.nn.utils.get_total_norm(dense, norm_type=float("inf")))


def discard(model: nn.Module, home: GradientHome) -> None:
    """Zero every gradient: the optimizer's step then costs one update, not the weights.

    Args:
        model: The model.
        home: Where its gradients live.
    """
    for gradient in home.of(model.parameters()):
        gradient.zero_()
