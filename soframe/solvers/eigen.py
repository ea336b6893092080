"""Eigendecomposition: exact damping in the Kronecker eigenbasis.

``(A ⊗ G + damping I)^-1`` of a gradient V is ``Q_G ((Q_G^T V Q_A) / (l_G l_A^T + damping)) Q_A^T``
(Grosse and Martens, 2016, appendix; George et al., 2018). The damping is that of the step at which
the gradient is preconditioned, so it may change between solves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soframe.kernels.products import times
from soframe.registry import register
from soframe.solvers.base import SolveFailedError, Solver, whole
from soframe.specs import FactorSpec, TensorSpec

_SIZES = 2.0**20  # what the largest eigenvalues of two factors may be times their mean traces


@register("solver", "eigen")
@dataclass(frozen=True)
class Eigen(Solver):
    """Eigenvectors (columns) and eigenvalues (ascending, negative ones from rounding set to 0).

    Attributes:
        follows: Whether eigenvalues follow the running factors between solves: after statistics
            they become ``diag(Q^T F Q)``, the best diagonal that the eigenvectors Q of the last
            solve allow (in the Frobenius norm). That is one product per factor, on every gradient
            worker; where not all of them hold the factor, the eigenvalues are those of the last
            solve. It helps where the factor grows or shrinks and hardly turns. Where eigenvalues
            were equal, for example zero, Q is any basis, and other roundings follow otherwise.
    """

    follows: bool = field(default=False, kw_only=True)
    diagonals = True

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        """See `Solver.tensors`: a diagonal factor has values and no vectors."""
        if factor.kind == "diagonal":
            return {"values": TensorSpec(factor.shape)}
        return {
            "vectors": TensorSpec(factor.shape),
            "values": TensorSpec((factor.groups, factor.size)),
        }

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        """See `Solver.shares`.

        Args:
            mean_traces: ``[groups]`` for each factor.
            damping: The damping of this step.

        Returns:
            The whole damping, which nobody asks for.

        Raises:
            SolveFailedError: If products of the factors' eigenvalues are not finite: what is
                divided by them would be zero.
        """
        dtype = mean_traces[0].dtype
        largest = torch.stack([trace.double().amax() for trace in mean_traces])
        if len(mean_traces) > 1 and float(largest.prod()) > torch.finfo(dtype).max / _SIZES:
            raise SolveFailedError(
                f"its eigenvalues times those of the other factor are beyond {dtype}: scale the "
                f"loss, or pass dtype=torch.float64"
            )
        return super().shares(mean_traces, damping)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        """See `Solver.solve`; the damping enters in ``apply``."""
        if matrix.dim() == 2:
            return {"values": matrix.clamp(min=0)}
        values, vectors = torch.linalg.eigh(matrix)
        return {"vectors": vectors, "values": values.clamp_(min=0)}

    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """See `Solver.follow`."""
        if not self.follows:
            return None
        if matrix.dim() == 2:
            return {"values": matrix.clamp(min=0)}
        vectors = data["vectors"]
        return {"values": rayleigh(vectors, times(whole(matrix), vectors)).clamp_(min=0)}

    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        """See `Solver.apply`."""
        rotated = turned(gradient, left, right, back=False)
        curvature = left["values"].unsqueeze(-1) * right["values"].unsqueeze(-2) + damping
        if damping == 0:
            # Where there is neither curvature nor damping, no step is the least one.
            rotated = torch.where(curvature > 0, rotated, 0.0)
            curvature = torch.where(curvature > 0, curvature, 1.0)
        # Not in place of `rotated`, which is the gradient itself where both factors are diagonal.
        return turned(torch.div(rotated, curvature, out=curvature), left, right, back=True)

    def apply_right(
        self, gradient: Tensor, *, right: Mapping[str, Tensor], damping: float
    ) -> Tensor:
        """See `Solver.apply_right`."""
        curvature = right["values"].unsqueeze(-2) + damping
        # Where there is neither curvature nor damping, no step is the least one.
        inverse = torch.where(curvature > 0, 1 / curvature, 0.0)
        scaled = turned(gradient, {}, right, back=False) * inverse
        return turned(scaled, {}, right, back=True)


def turned(
    gradient: Tensor, left: Mapping[str, Tensor], right: Mapping[str, Tensor], *, back: bool
) -> Tensor:
    """Return a gradient in the eigenbasis of two factors, or back from it.

    Args:
        gradient: ``[groups, out, in]``.
        left: ``"vectors"`` of the factor of the outputs; without any it is diagonal, and its basis
            the one that the gradient is in.
        right: The same of the factor of the inputs.
        back: Whether the gradient is in the eigenbasis, rather than to be brought there.

    Returns:
        ``[groups, out, in]``; the gradient itself where both are diagonal.
    """
    if "vectors" in left:
        vectors = left["vectors"]
        gradient = times(vectors if back else vectors.mT, gradient)
    if "vectors" in right:
        vectors = right["vectors"]
        gradient = times(gradient, vectors.mT if back else vectors)
    return gradient


def rayleigh(vectors: Tensor, product: Tensor) -> Tensor:
    """Return ``diag(Q^T F Q)``.

    Args:
        vectors: Q, ``[groups, n, n]``.
        product: ``F Q``.

    Returns:
        ``[groups, n]``.
    """
    return (vectors * product).sum(-2)
