"""Eva: the curvature of mean inputs and mean output gradients (Zhang et al., 2023).

Eva replaces K-FAC's second moments of inputs and output gradients by the outer products of their
means ("Eva: Practical Second-order Optimization with Kronecker-vectorized Approximation",
equation 10): with the averages over samples n and positions t

    a = (1/N) sum_{n,t} a_{n,t}        g = (1/(N T)) sum_{n,t} g_{n,t}

the block is ``(g g^T) ⊗ (a a^T)``, and by Sherman and Morrison's formula the direction of X is

    (X - (g^T X a) / (damping + |g|^2 |a|^2) g a^T) / damping

so that two vectors are stored and sent, and nothing is solved. With several positions, this choice
of means is exact for a sample that has the same input at all of its positions: the block is its
``vec(W) vec(W)^T``, ``W = sum_t g_t a^T``.

The means are defined for the empirical Fisher only: with targets drawn from the model, output
gradients have mean zero, and the columns of a type-2 Fisher have arbitrary signs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.base import Call, Direction, Given, Method
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.specs import VALUE, FactorSpec


@register("method", "eva")
@dataclass(frozen=True)
class Eva(Method):
    """A rank-one curvature for each group, of the empirical Fisher; no solver is needed."""

    scalings = ("fisher",)
    empirical_only = True

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        groups, out, into = shape
        return (
            FactorSpec("a", "right", groups, into, kind="vector"),
            FactorSpec("g", "left", groups, out, kind="vector", degree=1),
        )

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        sums = {"g": call.output_rows.sum((1, 2))}
        if call.inputs is not None:
            sums["a"] = call.helper.input_sum(call.inputs, call.output_rows)
        return sums

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        del factor, default
        return None

    def direct(self, step: Given) -> Direction:
        if not {"a", "g"} <= step.data.keys():
            return Direction(step.incoming.clone())
        row = step.data["a"][VALUE].unsqueeze(1)  # [groups, 1, in]
        column = step.data["g"][VALUE].unsqueeze(2)  # [groups, out, 1]
        # Unit vectors, with lengths in float64: their squared product may overflow in float32.
        across = torch.linalg.vector_norm(row, dim=2, dtype=torch.float64)
        down = torch.linalg.vector_norm(column, dim=1, dtype=torch.float64)
        row = (row / across.where(across > 0, 1.0).unsqueeze(2)).to(row)
        column = (column / down.where(down > 0, 1.0).unsqueeze(2)).to(column)
        inner = column.mT @ step.incoming @ row.mT  # [groups, 1, 1]
        along = inner * column * row
        curvature = (across * down).square().unsqueeze(2)
        if step.damping == 0:
            # Zero curvature and zero damping: the pseudo-inverse gives no step.
            least = (along / curvature.where(curvature > 0, 1.0)).where(curvature > 0, 0)
            return Direction(least.to(along))
        # The curvature may be zero, or beyond float64.
        share = (1 / (1 + step.damping / curvature)).to(along)
        return Direction((step.incoming - share * along) / step.damping)
