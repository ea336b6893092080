"""The KL clip: a bound on the change of the model's predictions (Ba et al., 2017, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from soframe.clips.base import Clip
from soframe.registry import register


@register("clip", "kl")
class KLClip(Clip):
    """Bounds ``sum_l <p_l, g_l>``, about twice the KL divergence of a step of rate one.

    A step ``-p`` changes the KL divergence by about ``p^T F p / 2``, and ``p^T F p`` is estimated
    by ``<p, g>``.
    """

    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        """Return the inner product."""
        # One launch, and no temporary of the size of the matrix.
        return torch.dot(update.flatten(), gradient.flatten())

    def factor(self, total: Tensor, bound: float) -> Tensor:
        """Return ``sqrt(bound / |total|)``."""
        return (bound / total.abs()).sqrt()
