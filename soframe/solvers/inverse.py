"""Cholesky inverses with factored damping.

``(A + pi sqrt(damping) I)^-1`` and ``(G + sqrt(damping) / pi I)^-1``, where
``pi = sqrt((tr A / dim A) / (tr G / dim G))`` minimises the trace of the residual of factoring the
damping (Martens and Grosse, 2015, section 6.3). It takes at most half the work of an
eigendecomposition, and two products per gradient instead of four. The damping of the solve stays in
force until the next one.

Factors may have any scale. With mean traces a and g, the share of the damping of each factor is
``sqrt(damping / (a g))`` times its mean trace. If the shares dominate both factors beyond the
precision of the dtype, the block is ``damping I`` to the last digit for any split. In this case pi
is clamped as close to one as still dominates both, since more unequal shares may be out of range.
The limit is a factor that has underflowed to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from soframe.kernels import devices
from soframe.kernels.factorisations import cholesky, half_inverse
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.specs import Data, FactorSpec, TensorSpec

FRAMED = 512  # the size from which matrices are enlarged for LAPACK


@register("solver", "inverse")
@dataclass(frozen=True)
class Inverse(Solver):
    """Inverses of the damped factors, by Cholesky decomposition.

    The data of a factor are ``inverse``: symmetric ``[groups, n, n]``, or ``[groups, n]`` for a
    diagonal factor.

    Attributes:
        split: How the damping is split: ``"pi"`` by the factors' mean traces, ``"sqrt"`` equally,
            ``"full"`` the whole damping to each factor (as in kfac-pytorch, which does not factor
            the damping of the block).
    """

    damps_factors: ClassVar[bool] = True
    diagonals = True
    split: Literal["pi", "sqrt", "full"] = "pi"

    def __post_init__(self) -> None:
        if self.split not in ("pi", "sqrt", "full"):
            raise ValueError(f"Inverse: split must be 'pi', 'sqrt' or 'full', not {self.split!r}")

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        is_pair = len(factors) == 2 and factors[0].groups == factors[1].groups
        if is_pair or self.split == "full" or len(factors) == 1:
            return super().unsupported(factors)
        listed = ", ".join(f"{f.name} of {f.groups} group(s)" for f in factors)
        return (
            f"split={self.split!r} shares the damping between two factors of as many groups, and "
            f"these are {listed}; pass split='full', or a solver such as 'eigen' that damps their "
            f"product"
        )

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return {"inverse": TensorSpec(factor.shape, symmetric=factor.kind == "psd")}

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        if self.split == "full" or len(mean_traces) == 1:
            return super().shares(mean_traces, damping)
        if len(mean_traces) != 2:
            raise ValueError(
                f"Inverse(split={self.split!r}) shares the damping between two factors, not "
                f"{len(mean_traces)}; use split='full'"
            )
        like = mean_traces[0]
        limits = torch.finfo(like.dtype)
        first, second = map(Tensor.double, mean_traces)
        both = torch.ones_like(first) * damping
        pi = pi_of(first, second, both, limits.eps) if self.split == "pi" else both.new_ones(())
        first_share, second_share = share(both, pi, largest=limits.max**0.94)
        return [first_share.to(like.dtype), second_share.to(like.dtype)]

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.dim() == 2:
            return {"inverse": 1 / (matrix.clamp(min=0) + damping.unsqueeze(-1))}
        if devices.on_gpu(matrix):
            parts = devices.batches(matrix)
            shares = damping.split(list(map(len, parts)))
            inverses = list(map(_inverse, parts, shares))
            if len(inverses) == 1:
                return {"inverse": inverses[0]}
            return {"inverse": torch.cat(inverses)}
        size = matrix.shape[-1]
        lower, info = torch.linalg.cholesky_ex(damped(matrix, damping, frame(size)))
        # NaN marks groups that are not positive definite.
        lower.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), math.nan)
        # LAPACK's inverse is symmetric to the last bit and column-major: its transpose is a view.
        return {"inverse": torch.cholesky_inverse(lower).mT[..., :size, :size].contiguous()}

    def usable(self, data: Data) -> Tensor:
        # A zero on the diagonal is an underflow: the factor was too large.
        inverse = data["inverse"]
        diagonal = inverse if inverse.dim() == 2 else inverse.diagonal(dim1=-2, dim2=-1)
        return diagonal.amin(-1) > 0

    def apply(self, gradient: Tensor, *, left: Data, right: Data, damping: float) -> Tensor:
        inverse = left["inverse"]
        if inverse.dim() == 2:
            return self.apply_right(inverse.unsqueeze(2) * gradient, right=right, damping=damping)
        return self.apply_right(inverse @ gradient, right=right, damping=damping)

    def apply_right(self, gradient: Tensor, *, right: Data, damping: float) -> Tensor:
        inverse = right["inverse"]
        if inverse.dim() == 2:
            return gradient * inverse.unsqueeze(1)
        return gradient @ inverse


def _inverse(matrix: Tensor, damping: Tensor) -> Tensor:
    """Return the inverses by few operators, for a GPU; NaN where one is not positive definite."""
    dtype = torch.float64 if devices.fast_double(matrix.device) else matrix.dtype
    eye = torch.eye(matrix.shape[-1], dtype=dtype, device=matrix.device)
    lower, info = cholesky(torch.addcmul(matrix, eye, damping.view(-1, 1, 1)))
    # CUDA's inverse is not symmetric to the last bit, so ranks that receive a triangle would differ
    # from the owner; its half, added to the half's transpose, is.
    half = half_inverse(lower, eye)
    # One where there is no error, since any number to the power of zero is one, else NaN.
    fine = torch.pow(math.nan, info).view(-1, 1, 1)
    return torch.addcmul(half, half.mT, fine, out=torch.empty_like(matrix))


def pi_of(first: Tensor, second: Tensor, damping: Tensor, precision: float) -> Tensor:
    """Return ``pi = sqrt(first / second)`` of mean traces, ``[groups]`` in float64.

    If both factors are negligible beside their shares of the damping for some pi, it is the value
    closest to one for which they are; one if both mean traces are zero.
    """
    # Next to one, a number below a sixteenth of the precision is not visible.
    least = precision / 16 * damping.sqrt()
    # Roots first: a product or quotient of the traces themselves may be out of range.
    first_root, second_root = first.clamp(min=0).sqrt(), second.clamp(min=0).sqrt()
    pi = torch.where((first > 0) & (second > 0), first_root / second_root, 1.0)
    high = torch.where(second > 0, least / second, math.inf)
    hidden = torch.minimum((first / least).clamp(min=1), high)
    return torch.where(first_root * second_root < least, hidden, pi)


def share(damping: Tensor, pi: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return ``sqrt(damping) pi`` and ``sqrt(damping) / pi``, ``[groups]`` each; 0 without damping.

    Pi is clamped so that both are in ``[1 / largest, largest]``.
    """
    root = damping.sqrt()
    low = torch.maximum(1 / (largest * root), root / largest)
    high = torch.minimum(largest / root, root * largest)
    pi = torch.minimum(torch.maximum(pi, low), high)
    first, second = root * pi, root / pi
    undamped = root <= 0
    for side in (first, second):
        side.clamp_(1 / largest, largest).masked_fill_(undamped, 0.0)
    return first, second


def frame(size: int) -> int:
    """Return by how many rows a matrix is enlarged for LAPACK: to a multiple of 16, not of 256."""
    # Rows of a multiple of 1024 bytes collide in the cache, and odd lengths are unaligned.
    if size < FRAMED:
        return 0
    rows = -size % 16
    if (size + rows) % 256 == 0:
        rows += 16
    return rows


def damped(matrix: Tensor, damping: Tensor, extra: int = 0) -> Tensor:
    """Add ``[groups]`` to the diagonals of a copy, padded by ``extra`` rows of the identity."""
    size = matrix.shape[-1]
    if extra:
        result = matrix.new_zeros(len(matrix), size + extra, size + extra)
        result[:, :size, :size] = matrix
        result.diagonal(dim1=-2, dim2=-1)[:, size:] = 1
    else:
        result = matrix.clone()
    result.diagonal(dim1=-2, dim2=-1)[:, :size].add_(damping.unsqueeze(-1))
    return result
