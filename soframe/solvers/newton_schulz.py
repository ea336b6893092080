"""Damped inverses by Newton-Schulz iteration: products alone, for accelerators.

``X <- X + X (I - M X)`` (Schulz, 1933) squares the residual ``I - M X`` at every step: the number
of digits doubles once it is below one, which from ``X = 2 / (|M| + damping) I`` takes about
``log2`` of the condition number of the damped factor M. The iteration corrects its own rounding
errors. A Cholesky inverse takes far fewer FLOPs, but in a sequence of small kernels: the iteration
can be faster if launches dominate, or if it starts from the last inverse of a factor that has
hardly changed.

It needs products in full float32 or float64, whatever torch's setting: TF32 and bfloat16 round to
three digits or fewer, which no further iteration recovers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.checks.values import require_integer
from soframe.kernels.precision import multiply
from soframe.registry import register
from soframe.solvers.base import replace_groups, symmetric
from soframe.solvers.inverse import Inverse, damped
from soframe.specs import Data

_CHUNK = 3  # iterations between two tests of the residual; each test synchronises


@register("solver", "newton-schulz")
@dataclass(frozen=True)
class NewtonSchulz(Inverse):
    """Inverses of the damped factors by Newton-Schulz, warm-started from the last solve.

    The iteration has converged when ``|I - M X|_F / sqrt(n)`` is at most the square root of the
    dtype's precision, before its last step. Groups that do not converge (in float32 with condition
    numbers above some thousands) are solved by Cholesky. Data as for `Inverse`.

    Attributes:
        split: How the damping is split, see `Inverse`.
        iterations: The maximal number of iterations per solve.
    """

    iterations: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("NewtonSchulz: iterations", self.iterations, 1)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.dim() == 2:
            return super().solve(matrix, damping)
        full = damped(symmetric(matrix), damping)
        # Row sums bound the largest eigenvalue, the damping is at most the smallest.
        scale = 2 / (full.abs().sum(-1).amax(-1) + damping)
        eye = torch.eye(full.shape[-1], dtype=full.dtype, device=full.device)
        inverse, converged = invert(full, scale[:, None, None] * eye, self.iterations)
        cholesky = super().solve
        return replace_groups(
            {"inverse": inverse},
            ~converged,
            lambda groups: cholesky(matrix[groups], damping[groups]),
        )

    def solve_again(self, matrix: Tensor, damping: Tensor, last: Data) -> dict[str, Tensor]:
        if matrix.dim() == 2:
            return super().solve(matrix, damping)
        full = damped(symmetric(matrix), damping)
        inverse, converged = invert(full, last["inverse"], self.iterations)
        return replace_groups(
            {"inverse": inverse},
            ~converged,
            lambda groups: self.solve(matrix[groups], damping[groups]),
        )


def invert(matrix: Tensor, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Invert ``[groups, n, n]``, exactly symmetric, and return the convergence by group."""
    inverse = start
    tolerance = torch.finfo(matrix.dtype).eps ** 0.5
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # A plan runs this without numbers, on a device that has no autocast.
    device = "cpu" if matrix.is_meta else matrix.device.type
    with torch.autocast(device, enabled=False):
        residual = eye - multiply(matrix, inverse)
        for count in range(1, iterations + 1):
            inverse = inverse + multiply(inverse, residual)
            residual = eye - multiply(matrix, inverse)
            if count % _CHUNK and count < iterations:
                continue
            size = (residual.square().sum((-2, -1)) / len(eye)).sqrt()
            if bool(((size <= tolerance) | ~(size <= 1)).all()):  # all have converged or diverge
                break
        inverse = inverse + multiply(inverse, residual)
    return (inverse + inverse.mT) / 2, size <= tolerance
