"""The eigenbasis of a factor, updated by one QR decomposition per solve, as in SOAP.

From the basis Q of the last solve (Vyas et al., 2024, algorithm 4): its columns are sorted by
descending ``diag(Q^T F Q)``, and ``Q <- qr(F Q).Q``. The permutation is part of the data, since
methods permute the state that they keep in the basis.

A factor of few gradients is rank-deficient, and rounding would choose the basis of its null space.
So ``1e-5 tr(F)/n diag(1, ..., 2)`` is added to F, which makes that basis unique in float64; in
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
    """Eigenvectors in descending order, and their permutation since the last solve.

    The data of a factor are ``vectors`` ``[groups, n, n]`` (columns) and ``order`` ``[groups, n]``:
    the old index of each new column. The first solve is an eigendecomposition. Eigenvalues are not
    computed, so this is for methods that keep second moments in the basis, such as SOAP.

    Attributes:
        ordered: Whether columns are sorted before the QR. Otherwise each column continues the old
            one at the same index, and the data have no ``order``.
    """

    ordered: bool = True

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        for factor in factors:
            if factor.captured or factor.kind != "psd":
                return "it has no eigenvalues to precondition with: pass solver='eigen'"
        return None

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        # Column indices, in the dtype of the factor, as all second-order data.
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
