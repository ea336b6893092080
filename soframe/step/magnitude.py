"""The magnitude of gradients and statistics: finite or not, moderate or large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from soframe.blocks.home import GradientHome
from soframe.kernels.devices import on_gpu

MODERATE = 1e10
"""Below this sum of a gradient, products with it are in range."""


def magnitude(
    parameters: Iterable[nn.Parameter], home: GradientHome, statistics: Sequence[Tensor] = ()
) -> tuple[float, bool]:
    """Return the magnitude of the gradients, and whether some scalars of statistics are finite.

    It is the largest absolute value, infinite or NaN if an element is, or zero if all sums of
    gradients are moderate.
    """
    gradients = [gradient for gradient in home.of(parameters) if gradient.numel() > 0]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if dense and on_gpu(dense[0]):
        # On a GPU launches cost more than passes, and all norms take a few launches.
        sums = list(torch._foreach_norm(dense, ord=math.inf))
    else:
        # A sum is the fastest pass, and elements that are not finite make it not finite.
        sums = [g.sum(dtype=torch.float32 if g.itemsize < 4 else g.dtype) for g in dense]
    each = [*sums, *statistics]
    # One tensor, so that the host waits for the device once.
    together = torch.stack([one.to(each[0].device) for one in each]).tolist() if each else []
    finite = all(abs(number) < math.inf for number in together[len(sums) :])
    if all(abs(number) < MODERATE for number in together[: len(sums)]):
        return 0.0, finite
    # Finite elements may have a sum that is not.
    return float(torch.nn.utils.get_total_norm(dense, norm_type=math.inf)), finite


def discard(model: nn.Module, home: GradientHome) -> None:
    """Zero every gradient, so that a bad batch costs one update and not the weights."""
    for gradient in home.of(model.parameters()):
        gradient.zero_()
