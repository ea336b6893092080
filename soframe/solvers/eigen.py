"""Eigendecomposition: exact damping in the Kronecker eigenbasis.

``(A ⊗ G + damping I)^-1`` times a gradient V is
``Q_G ((Q_G^T V Q_A) / (l_G l_A^T + damping)) Q_A^T`` (Grosse and Martens, 2016, appendix; George et
al., 2018). The damping enters when the gradient is preconditioned, so it may change between solves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soframe.kernels.factorisations import eigh
from soframe.kernels.precision import multiply
from soframe.registry import register
from soframe.solvers.base import Solver, symmetric
from soframe.specs import Data, FactorSpec, TensorSpec

_SIZES = 2.0**20  # assumed bound of l_max(A) l_max(G) over the product of mean traces


@register("solver", "eigen")
@dataclass(frozen=True)
class Eigen(Solver):
    """Eigendecompositions of the factors, with the damping added to the products of eigenvalues.

    The data of a factor are ``vectors`` ``[groups, n, n]`` (columns) and ``values`` ``[groups, n]``
    (ascending, clamped at 0 against rounding); a diagonal factor has ``values`` only.

    Attributes:
        follows: Whether eigenvalues are refreshed between solves: after statistics they become
            ``diag(Q^T F Q)``, the optimal diagonal for the eigenvectors Q of the last solve (in the
            Frobenius norm). This takes one product per factor on every gradient worker, and
            all of them must hold the factor. It helps if the factor changes in scale more than in
            its eigenvectors. Among equal eigenvalues, for example zeros, Q depends on rounding.
    """

    follows: bool = field(default=False, kw_only=True)
    diagonals = True

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        if factor.kind == "diagonal":
            return {"values": TensorSpec(factor.shape)}
        return {
            "vectors": TensorSpec(factor.shape),
            "values": TensorSpec((factor.groups, factor.size)),
        }

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        shares = super().shares(mean_traces, damping)
        if len(mean_traces) == 1:
            return shares
        # Infinite products of eigenvalues would set gradients to zero.
        traces = list(map(Tensor.double, mean_traces))
        if len(set(map(len, traces))) > 1:
            traces = [trace.amax(0, keepdim=True) for trace in traces]
        beyond = torch.stack(traces).prod(0) > torch.finfo(mean_traces[0].dtype).max / _SIZES
        return [share.masked_fill(beyond, math.nan) for share in shares]

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.dim() == 2:
            return {"values": matrix.clamp(min=0)}
        values, vectors = eigh(matrix)
        return {"vectors": vectors, "values": values.clamp_(min=0)}

    def follow(self, matrix: Tensor, data: Data) -> dict[str, Tensor] | None:
        if not self.follows:
            return None
        if matrix.dim() == 2:
            return {"values": matrix.clamp(min=0)}
        vectors = data["vectors"]
        return {"values": rayleigh(vectors, multiply(symmetric(matrix), vectors)).clamp_(min=0)}

    def apply(self, gradient: Tensor, *, left: Data, right: Data, damping: float) -> Tensor:
        rotated = turned(gradient, left, right, back=False)
        curvature = left["values"].unsqueeze(-1) * right["values"].unsqueeze(-2) + damping
        if damping == 0:
            # Zero curvature and zero damping: the pseudo-inverse gives no step.
            rotated = torch.where(curvature > 0, rotated, 0.0)
            curvature = torch.where(curvature > 0, curvature, 1.0)
        # Not into `rotated`, which is the gradient itself if both factors are diagonal.
        out = curvature if curvature.shape == rotated.shape else None
        return turned(torch.div(rotated, curvature, out=out), left, right, back=True)

    def apply_right(self, gradient: Tensor, *, right: Data, damping: float) -> Tensor:
        curvature = right["values"].unsqueeze(-2) + damping
        # Zero curvature and zero damping: the pseudo-inverse gives no step.
        inverse = torch.where(curvature > 0, 1 / curvature, 0.0)
        scaled = turned(gradient, {}, right, back=False) * inverse
        return turned(scaled, {}, right, back=True)


def with_eigenbasis(solver: Solver, factor: FactorSpec, why: str) -> Solver:
    """Return the solver if it computes what `Eigen` does; else raise a ValueError."""
    if Eigen().tensors(factor).keys() <= solver.tensors(factor).keys():
        return solver
    raise ValueError(f"{why}, and {solver!r} makes none: pass solver='eigen', or method='kfac'")


def turned(gradient: Tensor, left: Data, right: Data, *, back: bool) -> Tensor:
    """Rotate ``[groups, out, in]`` into the eigenbases of two factors, or back."""
    # A diagonal factor has no vectors; if both are diagonal this returns the gradient itself.
    if "vectors" in left:
        vectors = left["vectors"]
        gradient = (vectors if back else vectors.mT) @ gradient
    if "vectors" in right:
        vectors = right["vectors"]
        gradient = gradient @ (vectors.mT if back else vectors)
    return gradient


def rayleigh(vectors: Tensor, product: Tensor) -> Tensor:
    """Compute ``diag(Q^T F Q)``, ``[groups, n]``, from Q and ``F Q``."""
    return (vectors * product).sum(-2)


def quotient(matrix: Tensor, curvature: Tensor) -> Tensor:
    """Divide by a damped curvature; where it is zero there is no step, as by the pseudo-inverse."""
    return (matrix / curvature.where(curvature > 0, 1.0)).where(curvature > 0, 0.0)
