"""Grafting: the direction of one method at the length of another (Agarwal et al., 2020).

With ``u`` the input of the stage and ``m`` the update of another method for the averaged gradient,
the update is ``u |m| / |u|``, with Frobenius norms of each group. ``Chain(("kfac", "graft"))`` has
Adam's length, so that Adam's learning rates can be used; `Shampoo` is grafted by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.adam import AdamW
from soframe.methods.base import Direction, Given, Method, entries
from soframe.methods.composed import Composed
from soframe.registry import KINDS, register


@register("method", "graft")
@dataclass(frozen=True)
class Graft(Composed):
    """Rescale the input of the stage to the length of another method's update.

    The other method gets the averaged gradient, independent of the stages before. Until the factors
    of the other method are solved, the stage returns its input unchanged.

    Attributes:
        length: The other method, as a name, class or instance: by default AdamW. ``"sgd"`` gives
            the length of the gradient.
    """

    length: Any = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        method: Method = KINDS["method"].build(self.length, Method)
        object.__setattr__(self, "length", method)
        self._declare_as(method)
        object.__setattr__(self, "elementwise", False)  # lengths are of whole matrices
        self._name()

    @property
    def _inner(self) -> Sequence[Method]:
        return (self.length,)

    def direct(self, step: Given) -> Direction:
        update = self.length.direct(replace(step, incoming=step.gradient))
        return Direction(at_length(step.incoming, update.matrix), update.state)

    def effort(self, shape: BlockShape) -> float:
        return super().effort(shape) + entries(shape)

    def forward_only(self) -> Method:
        return Graft(self.length.forward_only())


def at_length(matrix: Tensor, like: Tensor) -> Tensor:
    """Scale ``[groups, out, in]`` to the Frobenius norms of another tensor, group by group."""
    lengths = norms(matrix)
    return matrix * (norms(like) / lengths.where(lengths > 0, 1.0))


def norms(matrix: Tensor) -> Tensor:
    """Return the Frobenius norm of each ``[out, in]``, as ``[groups, 1, 1]``."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norms
