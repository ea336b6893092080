"""Orthogonal iteration: eigenvectors that follow a slowly changing factor by products and a QR.

From the basis Q of the last solve, ``Q <- qr(F Q).Q`` (Golub and Van Loan, 2013, section 8.2.4),
with eigenvalues ``diag(Q^T F Q)``. The columns are in descending order of the eigenvalues: only
then do the leading ones lead, and each of the others converge within what they leave. An iteration
takes products and one QR, which accelerators do much faster than an eigendecomposition. SOAP (Vyas
et al., 2024) keeps its bases in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels.products import times
from soframe.registry import register
from soframe.solvers.base import whole
from soframe.solvers.eigen import Eigen, rayleigh


@register("solver", "orthogonal-iteration")
@dataclass(frozen=True)
class OrthogonalIteration(Eigen):
    """Eigenvectors (columns) and eigenvalues, descending in the last solve, warm-started from it.

    The first solve is an eigendecomposition. So is one whose owner lacks the last basis since it is
    no gradient worker of the block, and one at which the factor has changed too much. Where
    eigenvalues are equal, for example zero, the last basis is arbitrary, so that runs that differ
    by rounding differ by what the iteration makes of it.

    Attributes:
        iterations: QR iterations per solve.
        tolerance: The largest norm of what the basis leaves off the diagonal of ``Q^T F Q``,
            relative to the factor's; an eigendecomposition replaces what exceeds it.
    """

    iterations: int = 1
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations must be positive, not {self.iterations!r}")

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        """See `Solver.solve`: a cold start, by eigendecomposition."""
        data = super().solve(matrix, damping)
        if matrix.dim() == 2:
            return data
        return {"vectors": data["vectors"].flip(-1), "values": data["values"].flip(-1)}

    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """See `Solver.solve_again`."""
        if matrix.dim() == 2:
            return self.solve(matrix, damping)
        factor, vectors = whole(matrix), last["vectors"]
        product = times(factor, vectors)
        for _ in range(self.iterations):
            vectors = torch.linalg.qr(product)[0]
            product = times(factor, vectors)
        values = rayleigh(vectors, product)
        # Norms of numbers that are at most one: squares of others may be zero or infinite.
        scale = factor.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(factor.dtype).tiny)
        left_over = torch.linalg.matrix_norm((product - vectors * values.unsqueeze(-2)) / scale)
        if not bool((left_over <= self.tolerance * torch.linalg.matrix_norm(factor / scale)).all()):
            return self.solve(matrix, damping)
        values, order = values.sort(descending=True, stable=True)
        vectors = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
        return {"vectors": vectors, "values": values.clamp_(min=0)}
