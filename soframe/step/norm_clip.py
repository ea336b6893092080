"""Norm clip: bound the Euclidean length of a step.

The preconditioned gradients are scaled by ``min(1, bound / sqrt(sum_l ||lr_l p_l||^2))``, so that
the parameters with curvature move by ``bound`` at most: the radius of a trust region (Nocedal and
Wright, 2006, chapter 4), or gradient clipping (Pascanu et al., 2013) after the preconditioner
instead of before. The momentum of an optimizer behind it is not included. The ``norm_constraint``
of kfac-jax is a bound in the metric of the Fisher matrix: it corresponds to the KL clip here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def norm_clip_factor(
    preconditioned: Sequence[Tensor | None],
    lrs: Sequence[float | Tensor],
    bound: float,
    add: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
    over_stages: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the factor for all preconditioned gradients, without a host sync.

    Args:
        preconditioned: One matrix per block; None for blocks that another rank counts.
        lrs: The learning rate of each block, or a row of rates that fits its matrix.
        bound: The largest length of the step.
        add: Sums the squares over ranks, if each counts some of the blocks.
        like: A tensor with the dtype and device of the sum; by default the first block's.
        over_stages: Sums the squares over the stages of a pipeline, which have other rates.

    Returns:
        A scalar in (0, 1], in the dtype and on the device of ``like``.
    """
    first = preconditioned[0] if like is None else like
    assert first is not None
    # Relative to the largest rate, so that squares are in range where rates are large.
    largest = max((lr for lr in lrs if not isinstance(lr, Tensor)), default=0.0) or 1.0
    terms = [
        (p * (lr / largest)).square().sum().to(first)
        for p, lr in zip(preconditioned, lrs, strict=True)
        if p is not None
    ]
    squares = torch.stack(terms).sum() if terms else first.new_zeros(())
    squares = squares if add is None else add(squares)
    length = squares.sqrt().double()  # float32 may not hold the bound over a rate
    if over_stages is not None:
        # Each stage has its own largest rate, so absolute squares are summed.
        length = over_stages((length * largest).square()).sqrt() / largest
    # bound / 0 is infinite, and clamped like everything above one.
    return (bound / largest / length).clamp(max=1.0).to(first)
