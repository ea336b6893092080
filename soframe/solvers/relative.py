"""Damping relative to the curvature of each block, around any solver.

The damping of a block with factors A and G is ``relative * tr(A) / n_A * tr(G) / n_G``, a multiple
of the mean eigenvalue of ``A ⊗ G``; blocks in groups have one for each group. With a and g for the
mean traces,

    (A ⊗ G + relative a g I)^-1 = (A/a ⊗ G/g + relative I)^-1 / (a g)

so the inner solver sees factors of mean eigenvalue one, and a number for the damping. The traces of
the solve travel and are saved with the second-order data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.solvers.around import Around
from soframe.solvers.base import mean_trace
from soframe.specs import FactorSpec, TensorSpec


@dataclass(frozen=True)
class Relative(Around):
    """A solver whose damping is a multiple of each block's mean eigenvalue.

    A block without curvature, whose damping would be zero too, gets no step.

    Attributes:
        solver: The solver within.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "diagonals", self.solver.diagonals)

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        if len({factor.groups for factor in factors}) > 1:
            listed = ", ".join(f"{f.name} of {f.groups} group(s)" for f in factors)
            return f"relative damping needs factors of as many groups, not {listed}"
        return self.solver.unsupported(factors)

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return {**self.solver.tensors(factor), "mean_trace": TensorSpec((factor.groups,))}

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        # Shares are those of factors of mean eigenvalue one. In float64: the block's damping, a
        # product, may be one that the factors' dtype cannot hold, while multiples of traces are.
        traces = [trace.double() for trace in mean_traces]
        product = torch.stack(traces).prod(0)
        shares = self.solver.shares(traces, damping * product)
        # Where the damping is zero for want of curvature, any share that can be solved will do.
        return [
            torch.where(product > 0, share / trace, 1.0).to(mean_traces[0].dtype)
            for share, trace in zip(shares, traces, strict=True)
        ]

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        scaled, trace = _scaled(matrix)
        return {**self.solver.solve(scaled, damping), "mean_trace": trace}

    @property
    def continues(self) -> bool:
        return self.solver.continues

    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        scaled, trace = _scaled(matrix)
        return {**self.solver.solve_again(scaled, damping, last), "mean_trace": trace}

    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        scaled, trace = _scaled(matrix)
        followed = self.solver.follow(scaled, data)
        return None if followed is None else {**followed, "mean_trace": trace}

    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        result = super().apply(gradient, left=left, right=right, damping=damping)
        return _divide(_divide(result, left["mean_trace"]), right["mean_trace"])

    def apply_right(
        self, gradient: Tensor, *, right: Mapping[str, Tensor], damping: float
    ) -> Tensor:
        result = super().apply_right(gradient, right=right, damping=damping)
        return _divide(result, right["mean_trace"])


def _divide(matrix: Tensor, trace: Tensor) -> Tensor:
    """Divide in place by the mean trace of each group; by zero is zero."""
    # Not times the reciprocal, which is infinite where the trace is denormal.
    matrix.div_(torch.where(trace > 0, trace, math.inf)[:, None, None])
    return matrix


def _scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor with mean eigenvalue one, and its mean trace."""
    trace = mean_trace(matrix)
    positive = torch.where(trace > 0, trace, 1.0)
    return matrix / positive.view(-1, *(1 for _ in matrix.shape[1:])), trace
