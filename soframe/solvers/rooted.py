"""Factors of a block that is their product over a trace, around any solver.

The partial traces of a block, each divided by the size of the other side, have one mean trace m,
which is the mean eigenvalue of the block: ``L ⊗ R / m``. With each factor divided by the root of
its mean trace the block is a plain product, which the inner solver damps and applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels.devices import along_first
from soframe.solvers.around import Around
from soframe.solvers.base import mean_trace
from soframe.specs import Data, FactorSpec, TensorSpec


@dataclass(frozen=True)
class Rooted(Around):
    """Divide each factor by the root of its mean trace before it is solved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "diagonals", self.solver.diagonals)

    @property
    def continues(self) -> bool:
        return self.solver.continues

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return self.solver.tensors(factor)

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        return self.solver.shares([trace.sqrt() for trace in mean_traces], damping)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        return self.solver.solve(_rooted(matrix), damping)

    def solve_again(self, matrix: Tensor, damping: Tensor, last: Data) -> dict[str, Tensor]:
        return self.solver.solve_again(_rooted(matrix), damping, last)

    def follow(self, matrix: Tensor, data: Data) -> dict[str, Tensor] | None:
        return self.solver.follow(_rooted(matrix), data)


def _rooted(matrix: Tensor) -> Tensor:
    """Divide matrices, or diagonals ``[groups, n]``, by the roots of their mean traces."""
    root = mean_trace(matrix).sqrt()
    return matrix / along_first(torch.where(root > 0, root, 1.0), matrix)
