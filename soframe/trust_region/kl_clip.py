"""KL clip: bound the change of the model's predictions that one step may cause.

A step ``-lr p`` changes the KL divergence by about ``lr^2 p^T F p / 2``, and ``p^T F p`` is
estimated by ``<p, g>``. The preconditioned gradients are scaled by
``min(1, sqrt(kappa / |sum_l lr_l^2 <p_l, g_l>|))`` (Ba et al., 2017, section 5; KAISA).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kl_clip_factor(
    preconditioned: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lrs: Sequence[float | Tensor],
    kappa: float,
) -> Tensor:
    """Return the factor for all preconditioned gradients, without a host sync.

    Args:
        preconditioned: One matrix per block.
        gradients: The raw gradients, in the same order.
        lrs: The learning rate of each block, or a row of rates that fits its matrix.
        kappa: The bound.

    Returns:
        A scalar in (0, 1], in the dtype and on the device of the first block. On a network spread
        over several devices the terms are brought to that device.
    """
    first = preconditioned[0]
    terms = [
        _term(p, g, lr).to(first) for p, g, lr in zip(preconditioned, gradients, lrs, strict=True)
    ]
    total = torch.stack(terms).sum().abs()
    # kappa / 0 is infinite, and clamped like everything above one.
    return (kappa / total).sqrt().clamp(max=1.0)


def _term(p: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    if isinstance(lr, Tensor) and lr.dim() > 0:
        return (p * g * lr**2).sum()
    return torch.dot(p.flatten(), g.flatten()) * lr**2
