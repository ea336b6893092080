"""The norm clip: a bound on the Euclidean length of the updates together."""

from __future__ import annotations

from torch import Tensor

from soframe.clips.base import Clip
from soframe.registry import register


@register("clip", "norm")
class NormClip(Clip):
    """Bounds ``sqrt(sum_l ||p_l||^2)``: parameters with curvature move by ``bound`` at most.

    It is the radius of a trust region (Nocedal and Wright, 2006, chapter 4), or gradient clipping
    (Pascanu et al., 2013) after the preconditioner instead of before. The momentum of an optimizer
    behind it is not included. The ``norm_constraint`` of kfac-jax is a bound in the metric of the
    Fisher matrix: it corresponds to the KL clip here.
    """

    reads_gradients = False

    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum of squares."""
        return update.square().sum()

    def factor(self, total: Tensor, bound: float) -> Tensor:
        """Return ``bound / sqrt(total)``."""
        return bound / total.sqrt()
