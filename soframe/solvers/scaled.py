"""Factors that are scaled before another solver solves them: by traces, or by roots of these.

`Relative`: the damping of a block with factors A and G is ``relative * tr(A) / n_A * tr(G) / n_G``,
a multiple of the mean eigenvalue of ``A ⊗ G``, for each group. With the mean traces a and g,

    (A ⊗ G + relative a g I)^-1 = (A/a ⊗ G/g + relative I)^-1 / (a g)

so the inner solver gets factors with mean eigenvalue one, and a plain number as the damping. The
mean traces of the solve are part of the second-order data.

`Rooted`: the partial traces of a block, each divided by the size of the other side, have one mean
trace m, which is the mean eigenvalue of the block: ``L ⊗ R / m``. With each factor divided by the
root of its mean trace the block is a plain product, which the inner solver damps and applies.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels.devices import along_first
from soframe.solvers.around import Around
from soframe.solvers.base import mean_trace
from soframe.specs import Data, FactorSpec, TensorSpec


@dataclass(frozen=True)
class Scaling(Around):
    """Scales factors before the inner solver solves them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "diagonals", self.solver.diagonals)

    @property
    def continues(self) -> bool:
        return self.solver.continues

    @abstractmethod
    def scaled(self, matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a scaled factor, in new memory, and tensors to be kept beside its data."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        factor, kept = self.scaled(matrix)
        return {**self.solver.solve(factor, damping), **kept}

    def solve_again(self, matrix: Tensor, damping: Tensor, last: Data) -> dict[str, Tensor]:
        factor, kept = self.scaled(matrix)
        return {**self.solver.solve_again(factor, damping, last), **kept}

    def follow(self, matrix: Tensor, data: Data) -> dict[str, Tensor] | None:
        factor, kept = self.scaled(matrix)
        followed = self.solver.follow(factor, data)
        if followed is None:
            return None
        return {**followed, **kept}


@dataclass(frozen=True)
class Relative(Scaling):
    """Interpret the damping as a multiple of each block's mean eigenvalue.

    A block with zero curvature has zero damping too, and gets no step.

    Attributes:
        solver: The inner solver.
    """

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        if len({factor.groups for factor in factors}) > 1:
            listed = ", ".join(f"{f.name} of {f.groups} group(s)" for f in factors)
            return f"relative damping needs factors of as many groups, not {listed}"
        return self.solver.unsupported(factors)

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return {**super().tensors(factor), "mean_trace": TensorSpec((factor.groups,))}

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        # Shares for factors with mean eigenvalue one. In float64, since the damping of the block is
        # a product that may overflow in the factors' dtype.
        traces = [trace.double() for trace in mean_traces]
        product = torch.stack(traces).prod(0)
        shares = self.solver.shares(traces, damping * product)
        # With zero curvature the damping is zero too: any share that can be solved will do.
        dtype, scaled = mean_traces[0].dtype, map(torch.div, shares, traces)
        return [torch.where(product > 0, share, 1.0).to(dtype) for share in scaled]

    def scaled(self, matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        trace = mean_trace(matrix)
        return divided(matrix, trace), {"mean_trace": trace}

    def apply(self, gradient: Tensor, *, left: Data, right: Data, damping: float) -> Tensor:
        result = super().apply(gradient, left=left, right=right, damping=damping)
        return _divide(_divide(result, left["mean_trace"]), right["mean_trace"])

    def apply_right(self, gradient: Tensor, *, right: Data, damping: float) -> Tensor:
        result = super().apply_right(gradient, right=right, damping=damping)
        return _divide(result, right["mean_trace"])


@dataclass(frozen=True)
class Rooted(Scaling):
    """Divide each factor by the root of its mean trace before it is solved."""

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        return super().shares([trace.sqrt() for trace in mean_traces], damping)

    def scaled(self, matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return divided(matrix, mean_trace(matrix).sqrt()), {}


def divided(matrix: Tensor, divisor: Tensor) -> Tensor:
    """Divide matrices, or diagonals ``[groups, n]``, by ``[groups]``; where that is 0 by one."""
    return matrix / along_first(torch.where(divisor > 0, divisor, 1.0), matrix)


def _divide(matrix: Tensor, trace: Tensor) -> Tensor:
    """Divide ``[groups, out, in]`` by mean traces ``[groups]`` in place; zero where these are."""
    # Not times the reciprocal, which is infinite where the trace is denormal.
    matrix.div_(torch.where(trace > 0, trace, math.inf)[:, None, None])
    return matrix
