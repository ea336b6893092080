"""Orthogonal iteration: eigenvectors of a slowly changing factor, by products and a QR.

From the basis Q of the last solve, ``Q <- qr(F Q).Q`` (Golub and Van Loan, 2013, section 8.2.4),
with eigenvalues ``diag(Q^T F Q)``. The columns are in descending order of the eigenvalues, so that
each converges in the complement of the previous ones. An iteration takes products and one QR, which
accelerators do much faster than an eigendecomposition. SOAP (Vyas et al., 2024) updates its bases
in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.checks.values import require_integer
from soframe.kernels.precision import multiply
from soframe.registry import describe, register
from soframe.solvers.base import replace_groups, symmetric
from soframe.solvers.eigen import Eigen, rayleigh
from soframe.specs import Data


@register("solver", "orthogonal-iteration")
@dataclass(frozen=True)
class OrthogonalIteration(Eigen):
    """Eigenvectors and eigenvalues by orthogonal iteration, warm-started from the last solve.

    The data are as for `Eigen`, in descending order. A solve is an eigendecomposition if it is
    the first, if the owner is not a gradient worker of the block and so lacks the last basis, or if
    the factor has changed too much. Among equal eigenvalues, for example zeros, the basis depends
    on rounding.

    Attributes:
        iterations: QR iterations per solve.
        tolerance: The largest Frobenius norm of the off-diagonal part of ``Q^T F Q``, relative to
            the factor's norm; an eigendecomposition replaces bases that exceed it.
        follows: Whether eigenvalues are refreshed between solves, see `Eigen`.

    Raises:
        ValueError: If ``iterations`` is not positive, or ``tolerance`` is negative.
    """

    iterations: int = 1
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        require_integer("OrthogonalIteration: iterations", self.iterations, 1)
        if not self.tolerance >= 0:
            raise ValueError(f"{describe(self)}: tolerance must not be negative")

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        data = super().solve(matrix, damping)
        if matrix.dim() == 2:
            return data
        return {"vectors": data["vectors"].flip(-1), "values": data["values"].flip(-1)}

    def solve_again(self, matrix: Tensor, damping: Tensor, last: Data) -> dict[str, Tensor]:
        if matrix.dim() == 2:
            return self.solve(matrix, damping)
        factor, vectors = symmetric(matrix), last["vectors"]
        product = multiply(factor, vectors)
        for _ in range(self.iterations):
            vectors = torch.linalg.qr(product)[0]
            product = multiply(factor, vectors)
        values = rayleigh(vectors, product)
        # Scaled to at most one, so that squares neither underflow nor overflow.
        scale = factor.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(factor.dtype).tiny)
        left_over = torch.linalg.matrix_norm((product - vectors * values.unsqueeze(-2)) / scale)
        near = left_over <= self.tolerance * torch.linalg.matrix_norm(factor / scale)
        values, order = values.sort(descending=True, stable=True)
        vectors = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
        data = {"vectors": vectors, "values": values.clamp_(min=0)}
        return replace_groups(data, ~near, lambda far: self.solve(matrix[far], damping[far]))
