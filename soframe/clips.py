"""Clips: bounds on the updates of a step, each a formula of updates and gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from soframe.registry import register


class Clip(ABC):
    """A bound on a quadratic form of the updates of a step.

    The form is a sum of a term of each block. All updates are scaled by one factor, the smallest of
    all clips, so that the form of the scaled updates is at most the bound. The step sums the
    terms over blocks, ranks and stages, and multiplies them by the square of ``lr=``, if that is
    given: a clip then bounds the step ``lr update``, else the update.

    A clip has no state, and no tensor of its own is read on the host.

    Attributes:
        reads_gradients: Whether `term` reads the gradient, so that a rank that lacks it leaves the
            term to one that has it.
    """

    reads_gradients: ClassVar[bool] = True

    @abstractmethod
    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        """Return the term of some blocks.

        Args:
            update: Their update, ``[groups, out, in]``, in the factors' dtype; float64 where
                products may overflow.
            gradient: Their averaged gradient, of the same shape and dtype. A clip that does not
                read gradients must leave it alone: on some ranks it is the update.

        Returns:
            A scalar on the device of the update.
        """

    def terms(self, updates: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the `term` of each update; override it where fewer calls of torch do."""
        return [self.term(*pair) for pair in zip(updates, gradients, strict=True)]

    @abstractmethod
    def factor(self, total: Tensor, bound: float) -> Tensor:
        """Return the factor of the updates; values above one mean that nothing is scaled.

        Args:
            total: The sum of all terms, a float64 scalar; zero without updates.
            bound: The bound at this step.

        Returns:
            A float64 scalar on the device of the total, infinite for a total of zero.
        """


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
