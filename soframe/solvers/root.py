"""Powers of a factor, such as its inverse fourth root, by eigendecomposition.

``F^p = Q diag((l + epsilon l_max)^p) Q^T``. ``epsilon`` is relative to the largest eigenvalue, so
that the result scales like an exact power: ``(c F)^p = c^p F^p``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels.factorisations import eigh
from soframe.kernels.gram import mirror
from soframe.kernels.precision import multiply
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.specs import Data, FactorSpec, TensorSpec


@register("solver", "root")
@dataclass(frozen=True)
class Root(Solver):
    """A matrix power of each factor, for methods such as Shampoo.

    The data of a factor are ``root``, symmetric ``[groups, n, n]``. The product of factors is not
    damped, so this is not for the K-FAC family. The power of a zero factor is zero; without
    ``epsilon`` the same holds for eigenvalues that are zero within rounding.

    Attributes:
        power: The exponent.
        epsilon: Added to the eigenvalues, relative to the largest of them.
    """

    power: float = -0.25
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.power == 0 or not math.isfinite(self.power):
            raise ValueError(f"Root: power must be finite and not 0, not {self.power!r}")
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"Root: epsilon must not be negative, not {self.epsilon!r}")

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        for factor in factors:
            if factor.captured or factor.kind != "psd":
                return (
                    "it takes powers of matrices made of the averaged gradient, and adds no "
                    "damping to their product: pass solver='eigen'"
                )
        return None

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return {"root": TensorSpec(factor.shape, symmetric=True)}

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        del damping
        values, vectors = eigh(matrix)
        largest = values[:, -1:].clamp(min=0)
        if self.epsilon:
            values = values.clamp(min=0) + self.epsilon * largest
        else:
            # A zero that rounding has perturbed would have a huge negative power.
            rounding = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * largest
            values = values.where(values > rounding, 0.0)
        powers = values.where(values > 0, 1.0).pow(self.power).where(values > 0, 0.0)
        return {"root": mirror(multiply(vectors * powers.unsqueeze(-2), vectors.mT))}

    def apply(self, gradient: Tensor, *, left: Data, right: Data, damping: float) -> Tensor:
        del damping
        return left["root"] @ gradient @ right["root"]

    def apply_right(self, gradient: Tensor, *, right: Data, damping: float) -> Tensor:
        del damping
        return gradient @ right["root"]
