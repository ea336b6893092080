"""Grafting: the direction of one method at the length of another (Agarwal et al., 2020).

With ``u`` the input of the stage and ``m`` the update of another method for the averaged gradient,
the update is ``u |m| / |u|``, with Frobenius norms of each group. ``Chain(("kfac", "graft"))`` has
Adam's length, so that Adam's learning rates can be used; `Shampoo` is grafted by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.adam import AdamW
from soframe.methods.base import Addend, Call, Candidate, Direction, Given, Method, entries
from soframe.registry import KINDS, register
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder, TensorSpec


@register("method", "graft")
@dataclass(frozen=True)
class Graft(Method):
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

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return self._method.factors(shape)

    def statistics(self, call: Call) -> Mapping[str, Tensor | Addend]:
        return self._method.statistics(call)

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        return self._method.observe(gradient, data)

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        return self._method.state(shape)

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        return self._method.solver(factor, default)

    def direct(self, step: Given) -> Direction:
        update = self._method.direct(replace(step, incoming=step.gradient))
        return Direction(at_length(step.incoming, update.matrix), update.state)

    def rebase(
        self, state: Mapping[str, Tensor], old: SecondOrder, new: SecondOrder
    ) -> Mapping[str, Tensor]:
        return self._method.rebase(state, old, new)

    def unsuited(self, candidate: Candidate) -> str | None:
        return self._method.unsuited(candidate)

    def effort(self, shape: BlockShape) -> float:
        return self._method.effort(shape) + entries(shape)

    @property
    def rebases(self) -> bool:
        """Whether the other method's state is kept in the basis of its second-order data."""
        return self._method.rebases

    def factor_names(self) -> frozenset[str]:
        return self._method.factor_names()

    def state_names(self) -> frozenset[str]:
        return self._method.state_names()

    def forward_only(self) -> Method:
        return Graft(self._method.forward_only())

    @property
    def _method(self) -> Method:
        method: Method = self.length
        return method


def at_length(matrix: Tensor, like: Tensor) -> Tensor:
    """Scale ``[groups, out, in]`` to the Frobenius norms of another tensor, group by group."""
    lengths = _lengths(matrix)
    return matrix * (_lengths(like) / lengths.where(lengths > 0, 1.0))


def _lengths(matrix: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return lengths
