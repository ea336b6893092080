"""The eigenbasis of a factor, which follows it by one QR, as SOAP keeps its bases.

From the basis Q of the last solve (Vyas et al., 2024, algorithm 4): its columns are put into the
descending order of ``diag(Q^T F Q)``, and ``Q <- qr(F Q).Q``. What methods keep in the basis has to
follow: which of the old columns each new one comes from is part of the data.

A factor of few gradients lacks rank, and rounding would choose the basis of its null space. So F is
the factor plus ``1e-5 tr(F)/n diag(1, ..., 2)``, which makes that basis unique in float64; in
float32 it is below the rounding of the largest eigenvalues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.registry import register
from soframe.solvers.base import Solver, mean_trace, whole
from soframe.solvers.eigen import rayleigh
from soframe.specs import FactorSpec, TensorSpec


@register("solver", "basis")
@dataclass(frozen=True)
class Basis(Solver):
    """Eigenvectors (columns) in descending order, and the order of the last basis in them.

    The first solve is an eigendecomposition. There are no eigenvalues, so it is for methods that
    have second moments of their own in the basis, such as SOAP.

    Attributes:
        ordered: Whether columns are put into order before the QR. Otherwise each new column comes
            from the old one in its place, and there is no order among the data.
    """

    ordered: bool = True

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        for factor in factors:
            if factor.captured or factor.kind != "psd":
                return "it has no eigenvalues to precondition with: pass solver='eigen'"
        return None

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        # The order has numbers of columns, in the dtype of the factor.
        vectors = {"vectors": TensorSpec(factor.shape)}
        order = {"order": TensorSpec((factor.groups, factor.size))}
        return {**vectors, **order} if self.ordered else vectors

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        del damping
        vectors = torch.linalg.eigh(_graded(matrix.clone()))[1].flip(-1)
        if not self.ordered:
            return {"vectors": vectors}
        groups, size, _ = matrix.shape
        order = torch.arange(size, dtype=matrix.dtype, device=matrix.device)
        return {"vectors": vectors, "order": order.expand(groups, size).clone()}

    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        del damping
        vectors = last["vectors"]
        product = _graded(whole(matrix)) @ vectors
        if not self.ordered:
            return {"vectors": torch.linalg.qr(product)[0]}
        order = rayleigh(vectors, product).argsort(descending=True, stable=True)
        product = product.gather(-1, order.unsqueeze(-2).expand_as(product))
        return {"vectors": torch.linalg.qr(product)[0], "order": order.to(matrix.dtype)}

    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        raise NotImplementedError("Basis has no eigenvalues to precondition with: use Eigen")


def _graded(matrix: Tensor) -> Tensor:
    """Add ``1e-5 tr(F)/n diag(1, ..., 2)`` in place, so that eigenvalues differ; return F."""
    size = matrix.shape[-1]
    grade = torch.linspace(1e-5, 2e-5, size, dtype=matrix.dtype, device=matrix.device)
    matrix.diagonal(dim1=-2, dim2=-1).add_(mean_trace(matrix).unsqueeze(-1) * grade)
    return matrix
