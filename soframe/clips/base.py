"""The interface of a clip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor


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
