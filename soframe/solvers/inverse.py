"""Cholesky inverses with factored damping.

``(A + pi sqrt(damping) I)^-1`` and ``(G + sqrt(damping) / pi I)^-1``, where
``pi = sqrt((tr A / dim A) / (tr G / dim G))`` minimises the trace of the residual of factoring the
damping (Martens and Grosse, 2015, section 6.3). Half the work of an eigendecomposition or less,
and two products per gradient where that takes four; the damping is that of the solve.

Factors may have any scale, gradients are tiny or huge at times. With mean traces a and g, what the
damping adds to a factor is ``sqrt(damping / (a g))`` times its mean trace, for both of them. Where
that is so much that neither factor is seen beside it, the block is ``damping I`` to the last digit,
however the damping is split. From there on pi stays as close to one as still hides both, since more
would only lead to numbers that cannot be represented. A factor that has underflowed to zero is the
limit of that: the other one must not be seen either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from soframe.kernels.devices import on_gpu
from soframe.kernels.gram import mirror
from soframe.kernels.products import times
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, TensorSpec

FRAMED = 512  # the size from which matrices are enlarged for LAPACK


@register("solver", "inverse")
@dataclass(frozen=True)
class Inverse(Solver):
    """Damped inverses.

    Attributes:
        split: How the damping is shared: ``"pi"`` by the factors' mean traces, ``"sqrt"`` equally,
            ``"full"`` the whole damping to each factor (what kfac-pytorch does; not a splitting of
            the damping of the block).
    """

    damps_factors: ClassVar[bool] = True
    diagonals = True
    split: Literal["pi", "sqrt", "full"] = "pi"

    def __post_init__(self) -> None:
        if self.split not in ("pi", "sqrt", "full"):
            raise ValueError(f"Inverse: split must be 'pi', 'sqrt' or 'full', not {self.split!r}")

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        """See `Solver.unsupported`: it shares the damping between two factors of as many groups."""
        if self.split == "full" or len(factors) == 1:
            return super().unsupported(factors)
        if len(factors) == 2 and factors[0].groups == factors[1].groups:
            return super().unsupported(factors)
        listed = ", ".join(f"{f.name} of {f.groups} group(s)" for f in factors)
        return (
            f"split={self.split!r} shares the damping between two factors of as many groups, and "
            f"these are {listed}; pass split='full', or a solver such as 'eigen' that damps their "
            f"product"
        )

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        """See `Solver.tensors`; a diagonal factor has a diagonal inverse."""
        return {"inverse": TensorSpec(factor.shape, symmetric=factor.kind == "psd")}

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        """See `Solver.shares`.

        Args:
            mean_traces: ``[groups]`` for each of the two factors, that of the inputs first; or
                for the only one, which takes the whole damping.
            damping: The damping of this step; ``[groups]`` where each group has one of its own.

        Returns:
            ``[groups]`` for each factor.

        Raises:
            ValueError: If the block has more than two factors.
        """
        if self.split == "full" or len(mean_traces) == 1:
            return super().shares(mean_traces, damping)
        if len(mean_traces) != 2:
            raise ValueError(
                f"Inverse(split={self.split!r}) shares the damping between two factors, not "
                f"{len(mean_traces)}; use split='full'"
            )
        like = mean_traces[0]
        limits = torch.finfo(like.dtype)
        first, second = (trace.tolist() for trace in mean_traces)
        each = damping.tolist() if isinstance(damping, Tensor) else [damping] * len(first)
        # One number for each group: as tensors these would be thirty tiny operations.
        rows = [
            share(
                whole,
                pi_of(a, b, whole, limits.eps) if self.split == "pi" else 1.0,
                largest=limits.max**0.94,
            )
            for a, b, whole in zip(first, second, each, strict=True)
        ]
        return [
            torch.tensor(column, dtype=torch.float64, device="cpu").to(like)
            for column in zip(*rows, strict=True)
        ]

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        """See `Solver.solve`."""
        if matrix.dim() == 2:
            return {"inverse": 1 / (matrix.clamp(min=0) + damping.unsqueeze(-1))}
        size, gpu = matrix.shape[-1], on_gpu(matrix)
        framed = damped(matrix, damping, 0 if gpu else frame(size))
        # LAPACK's is symmetric to the last bit, and stored by columns: its transpose needs no copy.
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(framed)).mT
        inverse = inverse[..., :size, :size].contiguous()
        # CUDA's is not: ranks that are sent a triangle would differ from the one that has solved.
        return {"inverse": mirror(inverse) if gpu else inverse}

    def usable(self, data: Mapping[str, Tensor]) -> bool:
        """See `Solver.usable`: not if an inverse is zero, since the factor was too large."""
        inverse = data["inverse"]
        return float((inverse if inverse.dim() == 2 else diagonal_of(inverse)).amin()) > 0

    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        """See `Solver.apply`; the damping is in the inverses already."""
        one = left["inverse"]
        halved = one.unsqueeze(2) * gradient if one.dim() == 2 else times(one, gradient)
        return self.apply_right(halved, right=right, damping=damping)

    def apply_right(
        self, gradient: Tensor, *, right: Mapping[str, Tensor], damping: float
    ) -> Tensor:
        """See `Solver.apply_right`; the damping is in the inverse already."""
        inverse = right["inverse"]
        return gradient * inverse.unsqueeze(1) if inverse.dim() == 2 else times(gradient, inverse)


def diagonal_of(matrix: Tensor) -> Tensor:
    """Return the diagonals of matrices.

    Args:
        matrix: ``[groups, n, n]``.

    Returns:
        ``[groups, n]``.
    """
    return matrix.diagonal(dim1=-2, dim2=-1)


def pi_of(first: float, second: float, damping: float, precision: float) -> float:
    """Return the pi of the pi-correction, of one group.

    Args:
        first: The mean trace of the first factor.
        second: That of the second.
        damping: The block's damping.
        precision: That of the factors' dtype; what is a sixteenth of it is not seen beside one.

    Returns:
        ``sqrt(first / second)``, or as close to one as leaves both factors unseen beside their
        shares of the damping, where that is possible. One where neither has a scale.
    """
    least = precision / 16 * math.sqrt(damping)
    # Roots first: a product or quotient of what the roots are of may be out of range.
    first_root, second_root = math.sqrt(max(first, 0.0)), math.sqrt(max(second, 0.0))
    if first_root * second_root < least:
        high = least / second if second > 0 else math.inf
        return min(max(1.0, first / least), high)
    return first_root / second_root if first > 0 and second > 0 else 1.0


def share(damping: float, pi: float, largest: float) -> tuple[float, float]:
    """Return two shares of a damping that can be represented, and their reciprocals too.

    Args:
        damping: The block's damping.
        pi: The first share over the root of the damping.
        largest: The largest share; its reciprocal is the least.

    Returns:
        The shares; both zero where the damping is. Their product is the damping wherever there are
        two such numbers.
    """
    root = math.sqrt(damping)
    if not root > 0:
        return 0.0, 0.0
    low = max(1 / (largest * root), root / largest)
    high = min(largest / root, root * largest)
    pi = min(max(pi, low), high)
    return (
        min(max(root * pi, 1 / largest), largest),
        min(max(root / pi, 1 / largest), largest),
    )


def frame(size: int) -> int:
    """Return by how many rows and columns a matrix is best enlarged before LAPACK gets it.

    Rows whose length is a multiple of 1024 bytes meet in few lines of the cache, and those of odd
    lengths lie across vectors. With 16 rows more, 1024 took 0.56 of the time with one thread and
    0.64 with two, 512 and 2048 0.8 to 0.9; 1025 as 1040 0.82; smaller ones as long as they are.

    Args:
        size: The size.

    Returns:
        What is missing to the next multiple of 16 that is none of 256.
    """
    if size < FRAMED:
        return 0
    return -size % 16 if (size + -size % 16) % 256 else -size % 16 + 16


def damped(matrix: Tensor, damping: Tensor, extra: int = 0) -> Tensor:
    """Return matrices with the damping on their diagonals.

    Args:
        matrix: ``[groups, n, n]``.
        damping: ``[groups]``.
        extra: Rows and columns of the identity matrix to add.

    Returns:
        ``[groups, n + extra, n + extra]``, block-diagonal: the inverse is that of the blocks.
    """
    size = matrix.shape[-1]
    if extra:
        result = matrix.new_zeros(len(matrix), size + extra, size + extra)
        result[:, :size, :size] = matrix
        result.diagonal(dim1=-2, dim2=-1)[:, size:] = 1
    else:
        result = matrix.clone()
    result.diagonal(dim1=-2, dim2=-1)[:, :size].add_(damping.unsqueeze(-1))
    return result
