"""Powers of a factor, such as its inverse fourth root, by eigendecomposition.

``F^p = Q diag((l + epsilon l_max)^p) Q^T``. What is added to the eigenvalues is relative to the
largest, so that the result scales with the factor as the power does: ``(c F)^p = c^p F^p``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels.gram import mirror
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, TensorSpec


@register("solver", "root")
@dataclass(frozen=True)
class Root(Solver):
    """A power of each factor by itself, for methods such as Shampoo that multiply with them.

    There is no damping of the product of factors, so it is not for the K-FAC family. A factor that
    is zero has the power zero, and so have, without ``epsilon``, eigenvalues that are zero within
    rounding.

    Attributes:
        power: The power.
        epsilon: What is added to the eigenvalues, over the largest of them.

    Raises:
        ValueError: If a setting is out of range.
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
        values, vectors = torch.linalg.eigh(matrix)
        largest = values[:, -1:].clamp(min=0)
        if self.epsilon:
            values = values.clamp(min=0) + self.epsilon * largest
        else:
            # What is left of a zero by rounding has no power of its own: it would be a huge one.
            rounding = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * largest
            values = values.where(values > rounding, 0.0)
        powers = values.where(values > 0, 1.0).pow(self.power).where(values > 0, 0.0)
        return {"root": mirror((vectors * powers.unsqueeze(-2)) @ vectors.mT)}

    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        del damping
        return left["root"] @ gradient @ right["root"]

    def apply_right(
        self, gradient: Tensor, *, right: Mapping[str, Tensor], damping: float
    ) -> Tensor:
        del damping
        return gradient @ right["root"]
