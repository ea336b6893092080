"""The gradients of a whole model: are they finite, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether every gradient is finite.

    Args:
        parameters: The parameters of a model.

    Returns:
        False if any element of any gradient is infinite or not a number.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not dense:
        return True
    # A sum is the fastest pass; what is not finite never leaves it finite.
    sums = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in dense]
    if len({total.device for total in sums}) > 1:
        sums = [total.to(sums[0].device) for total in sums]
    if bool(torch.stack(sums).isfinite().all()):
        return True
    # Finite elements may have a sum that is not.
    return bool(torch.nn.utils.get_total_norm(dense, norm_type=float("inf")).isfinite())


def discard(model: nn.Module) -> None:
    """Zero every gradient: the optimizer's step then costs one update, not the weights.

    Args:
        model: The model.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
