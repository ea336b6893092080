"""TNT: the covariance of sample gradients as a Kronecker product (Ren and Goldfarb, 2021).

Tensor-normal training models the gradient of a sample n, ``W_n = sum_t g_{n,t} a_{n,t}^T`` of shape
``[out, in]``, as a draw from a matrix normal distribution (algorithm 1, with two modes). With the
second moments of its rows and columns, over the samples of the chosen Fisher,

    L = (1/N) sum_n W_n W_n^T        R = (1/N) sum_n W_n^T W_n        tau = tr L = tr R

the block is ``L ⊗ R / tau``. ``tau`` is the trace of the Fisher's block, and L and R are its
partial traces: they are exact for any weight sharing, whereas K-FAC treats positions as
independent. The update of X is ``(L ⊗ R / tau + damping I)^-1 X``, computed in the eigenbases of L
and R. `soframe.kernels.samples` computes the moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.base import MAX_SIZE, Call, Direction, Given, Method
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.solvers.eigen import quotient, turned, with_eigenbasis
from soframe.specs import FactorSpec


@register("method", "tnt")
@dataclass(frozen=True)
class TNT(Method):
    """Row and column covariances of the gradients of samples.

    It needs a solver that computes eigenvectors, ``"eigen"`` or ``"orthogonal-iteration"``: the
    damping is added to the block, whose eigenvalues are products divided by a trace. For an
    embedding only the diagonal of R is kept, which is exact if no sample has two different indices.

    A module that is called several times in one backward pass has a gradient for each call;
    products between calls are left out, as if the calls were independent.

    Attributes:
        max_size: The longest side whose factor is a matrix; a longer one has the factor's diagonal.
    """

    scalings = ("fisher",)

    max_size: int = field(default=MAX_SIZE, repr=False)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        groups, out, into = shape
        return (
            FactorSpec("L", "left", groups, out, reads="both").up_to(self.max_size),
            FactorSpec("R", "right", groups, into, reads="both").up_to(self.max_size),
        )

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        if call.inputs is None:
            return {}
        left, right = call.up_to(self.max_size).sample_moments()
        return {"L": left, "R": right}

    def solver(self, factor: FactorSpec, default: Solver) -> Solver:
        divides = "TNT divides the product of its factors by their trace before it is damped"
        return with_eigenbasis(default, factor, f"{divides}, in their eigenbases")

    def direct(self, step: Given) -> Direction:
        left, right = step.data["L"], step.data["R"]
        # Roots first: products of tiny eigenvalues would underflow.
        rows, columns = _unit(left), _unit(right)
        trace = (_trace(left) * _trace(right)).unsqueeze(-1)  # tau, as a product of its roots
        curvature = rows.unsqueeze(-1) * columns.unsqueeze(-2) * trace
        damping: Tensor | float = step.damping
        if "mean_trace" in left:  # a multiple of the block's mean eigenvalue
            damping = damping * trace / (rows.shape[-1] * columns.shape[-1])
        curvature = curvature + damping
        rotated = turned(step.incoming, left, right, back=False)
        return Direction(turned(quotient(rotated, curvature), left, right, back=True))


def _unit(data: Mapping[str, Tensor]) -> Tensor:
    """Divide a factor's eigenvalues ``[groups, n]`` by their sum; zeros if the sum is zero."""
    total = data["values"].sum(-1, keepdim=True)
    return data["values"] / total.where(total > 0, 1.0)


def _trace(data: Mapping[str, Tensor]) -> Tensor:
    """Compute the root of a factor's trace, ``[groups, 1]``."""
    total = data["values"].sum(-1, keepdim=True)
    if "mean_trace" in data:  # the eigenvalues were divided by it
        total = total * data["mean_trace"].unsqueeze(-1)
    return torch.sqrt(total)
