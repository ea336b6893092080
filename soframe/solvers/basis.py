"""The eigenbasis of a factor, updated by one QR decomposition per solve, as in SOAP.

From the basis Q of the last solve (Vyas et al., 2024, algorithm 4): its columns are sorted by
descending ``diag(Q^T F Q)``, and ``Q <- qr(F Q).Q``. The permutation is part of the data, since
methods permute the state that they keep in the basis.

A factor of few gradients is rank-deficient, and rounding would choose the basis of its null space:
the columns N whose eigenvalues are within ``t = 1e-4 tr(F)/n`` of the smallest. So the first basis
has the columns ``qr(N N^T E)`` there, with a fixed random E, and ``t diag(1, ..., 2)`` is added to
F in every QR, which makes the order of these columns unique. In float64 the weights then do not
depend on rounding; in float32 the rounding of the largest eigenvalues may exceed t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels.factorisations import eigh, orthonormal
from soframe.kernels.precision import multiply
from soframe.registry import register
from soframe.solvers.base import Solver, mean_trace, symmetric
from soframe.solvers.eigen import rayleigh
from soframe.specs import Data, FactorSpec, TensorSpec

GRADE = 1e-4  # relative to the mean eigenvalue


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
        specs = {"vectors": TensorSpec(factor.shape)}
        if self.ordered:
            # Column indices, in the dtype of the factor, as all second-order data.
            specs["order"] = TensorSpec((factor.groups, factor.size))
        return specs

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        values, vectors = eigh(matrix)
        null = values - values[:, :1] <= GRADE * mean_trace(matrix).unsqueeze(-1)
        first = {"vectors": _canonical(vectors, null).flip(-1)}
        data = self.solve_again(matrix, damping, first)
        if self.ordered:
            groups, size, _ = matrix.shape
            order = torch.arange(size, dtype=matrix.dtype, device=matrix.device)
            data["order"] = order.expand(groups, size).clone()
        return data

    def solve_again(self, matrix: Tensor, damping: Tensor, last: Data) -> dict[str, Tensor]:
        del damping
        vectors = last["vectors"]
        size = matrix.shape[-1]
        # F and ``1e-4 tr(F)/n diag(1, ..., 2)``, so that eigenvalues differ.
        graded = symmetric(matrix)
        grade = torch.linspace(GRADE, 2 * GRADE, size, dtype=matrix.dtype, device=matrix.device)
        graded.diagonal(dim1=-2, dim2=-1).add_(mean_trace(matrix).unsqueeze(-1) * grade)
        product = multiply(graded, vectors)
        del graded  # as large as the matrix
        if not self.ordered:
            return {"vectors": orthonormal(product)}
        order = rayleigh(vectors, product).argsort(descending=True, stable=True)
        product = product.gather(-1, order.unsqueeze(-2).expand_as(product))
        return {"vectors": orthonormal(product), "order": order.to(matrix.dtype)}

    def apply(self, gradient: Tensor, *, left: Data, right: Data, damping: float) -> Tensor:
        raise NotImplementedError("Basis has no eigenvalues to precondition with: use Eigen")


def _canonical(vectors: Tensor, null: Tensor) -> Tensor:
    """Replace columns, ``[groups, n]``, by a basis of their span that depends on the span alone."""
    size = vectors.shape[-1]
    generator = torch.Generator(device="cpu").manual_seed(0)
    fixed = torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")
    both = null.unsqueeze(-1) & null.unsqueeze(-2)
    eye = torch.eye(size, dtype=vectors.dtype, device=vectors.device)
    seen = multiply(vectors.mT.contiguous(), fixed.to(vectors).expand_as(vectors).contiguous())
    return multiply(vectors, torch.linalg.qr(seen.where(both, eye))[0])
