"""Grafting: the direction of one method at the length of another (Agarwal et al., 2020).

With ``u`` what the stage is given and ``m`` what another method makes of the averaged gradient, the
direction is ``u |m| / |u|``, with Frobenius norms of each group. What Shampoo makes has no length
of the gradient's; Adam's, ``Chain(("shampoo", "graft"))``, is what its published training curves
are of (Anil et al., 2020), so that the learning rates of Adam serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.adam import AdamW
from soframe.methods.base import Addend, Call, Candidate, Direction, Given, Method
from soframe.methods.momentum import entries
from soframe.registry import KINDS, register
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder, TensorSpec


@register("method", "graft")
@dataclass(frozen=True)
class Graft(Method):
    """The length that another method gives, a stage after those that give the direction.

    The other method is given the averaged gradient, whatever stages there are before. Until it has
    the data that it needs the stage passes on what it is given.

    Attributes:
        length: The other method, as a name, class or instance: by default Adam's direction.
            ``"sgd"`` gives the length of the gradient.
    """

    length: Any = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        method: Method = KINDS["method"].build(self.length, Method)
        object.__setattr__(self, "length", method)
        self._declare_as(method)

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

    def direct(self, given: Given) -> Direction:
        made = self._method.direct(replace(given, incoming=given.gradient))
        return Direction(at_length(given.incoming, made.matrix), made.state)

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
        """Whether what the other method keeps lies in bases."""
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
    """Return ``[groups, out, in]`` at the Frobenius norm of another, in each group."""
    lengths, wanted = _lengths(matrix), _lengths(like)
    return matrix * (wanted / lengths.where(lengths > 0, 1.0))


def _lengths(matrix: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return lengths
