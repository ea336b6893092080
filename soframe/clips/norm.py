"""The norm clip: a bound on the Euclidean length of the updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soframe.clips.base import Clip
from soframe.registry import register


@register("clip", "norm")
class NormClip(Clip):
    """Bounds ``sqrt(sum_l mean_o ||p_lo||^2)``, for the update ``p_lo`` of output o of layer l.

    The weights of an output have a length of about 0.6 in torch's initialisation of linear layers
    and convolutions, whatever the shape, so that a bound means the same for narrow and wide layers.

    It is the radius of a trust region (Nocedal and Wright, 2006, chapter 4), or gradient clipping
    (Pascanu et al., 2013) after the preconditioner instead of before. The momentum of an optimizer
    behind it is not included. The ``norm_constraint`` of kfac-jax is a bound in the metric of the
    Fisher matrix: it corresponds to the KL clip here.
    """

    reads_gradients = False

    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum over layers of the mean square over outputs."""
        entries = update.flatten()
        return torch.dot(entries, entries) / update.shape[-2]

    def terms(self, updates: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the same of each, in three calls for all on one device."""
        if not updates:
            return []
        lengths = torch._foreach_norm(list(updates))
        roots = [update.shape[-2] ** 0.5 for update in updates]
        means = torch._foreach_div(lengths, roots)
        return torch._foreach_mul(means, means)

    def factor(self, total: Tensor, bound: float) -> Tensor:
        """Return ``bound / sqrt(total)``."""
        return bound / total.sqrt()
