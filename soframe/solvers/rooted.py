"""Factors of a block that is their product over a trace, around any solver.

The partial traces of a block, each divided by the size of the other side, have one mean trace m,
which is the mean eigenvalue of the block: ``L ⊗ R / m``. With each factor divided by the root of
its mean trace the block is a plain product, which the inner solver damps and applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from soframe.solvers.around import Scaling, divided
from soframe.solvers.base import mean_trace


@dataclass(frozen=True)
class Rooted(Scaling):
    """Divide each factor by the root of its mean trace before it is solved."""

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        return super().shares([trace.sqrt() for trace in mean_traces], damping)

    def scaled(self, matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return divided(matrix, mean_trace(matrix).sqrt()), {}
