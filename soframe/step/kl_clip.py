"""KL clip: bound the change of the model's predictions that one step may cause.

A step ``-lr p`` changes the KL divergence by about ``lr^2 p^T F p / 2``, and ``p^T F p`` is
estimated by ``<p, g>``. The preconditioned gradients are scaled by
``min(1, sqrt(kappa / |sum_l lr_l^2 <p_l, g_l>|))`` (Ba et al., 2017, section 5; KAISA).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def kl_clip_factor(
    preconditioned: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lrs: Sequence[float | Tensor],
    kappa: float,
    add: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Return the factor for all preconditioned gradients, without a host sync.

    Args:
        preconditioned: One matrix per block.
        gradients: The raw gradients, in the same order.
        lrs: The learning rate of each block, or a row of rates that fits its matrix.
        kappa: The bound.
        add: Sums the inner products over ranks, if each has some of the blocks.
        like: A tensor with the dtype and device of the sum; by default the first block's.

    Returns:
        A scalar in (0, 1], in the dtype and on the device of ``like``. If a network is spread over
        several devices, the terms are copied to that device.
    """
    like = preconditioned[0] if like is None else like
    # One rate for all: one product of the sum, instead of one of each term.
    same = len({id(lr) for lr in lrs}) == 1 and _is_scalar(lrs[0])
    each = [1.0] * len(lrs) if same else lrs
    terms = [_term(p, g, lr) for p, g, lr in zip(preconditioned, gradients, each, strict=True)]
    if len({(term.device, term.dtype) for term in (like, *terms)}) > 1:
        terms = [term.to(like) for term in terms]
    total = torch.stack(terms).sum() if terms else like.new_zeros(())
    total = total.double()  # squares of rates may be out of range where rates are not
    if same:
        total = (total * lrs[0] * lrs[0]).to(total)
    total = (total if add is None else add(total)).abs()
    # kappa / 0 is infinite, and clamped like everything above one.
    return (kappa / total).sqrt().clamp(max=1.0).to(like)


def _term(p: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    if not _is_scalar(lr):
        return (p * lr * (g * lr)).sum()
    # One launch, and no temporary of the size of the matrix.
    product = torch.dot(p.flatten(), g.flatten())
    return product if isinstance(lr, float) and lr == 1.0 else product * lr * lr


def _is_scalar(lr: float | Tensor) -> bool:
    return not isinstance(lr, Tensor) or lr.dim() == 0
