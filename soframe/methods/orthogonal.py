"""Muon: the momentum's nearest semi-orthogonal matrix (Jordan et al., 2024).

For ``X = U S V^T``, ``[groups, out, in]``, the nearest semi-orthogonal matrix is ``U V^T``, the
steepest descent under the spectral norm (Bernstein and Newhouse, 2024). Newton-Schulz iterations
approximate it by matrix products: with ``X`` divided by its Frobenius norm,

    X <- a X + (b (X X^T) + c (X X^T)^2) X

which maps every singular value ``s`` to ``a s + b s^3 + c s^5``. Muon uses the same coefficients in
all steps, which leave singular values between about 0.7 and 1.2. Polar Express (Amsel et al., 2025,
appendix A) uses the optimal coefficients of each step.

Every step multiplies by a polynomial of the Gram matrix ``X X^T``. For an elongated matrix the
iteration can run on Gram matrices, ``A <- P A P`` with the polynomial ``P``, so that the long side
enters two products altogether rather than two in every step. Gram matrices square the condition
number, so this is limited to float32 and float64, where the rounding errors remain far below the
error of the iteration.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from soframe.checks.values import require_integer, require_numbers
from soframe.kernels import devices
from soframe.kernels.precision import within
from soframe.layers.layout import BlockShape
from soframe.methods.base import MAX_SIZE, Candidate, Direction, Given, Method, WithoutFactors
from soframe.methods.chain import Chain
from soframe.methods.foof import FOOF
from soframe.methods.graft import norms
from soframe.methods.kfac import KFAC
from soframe.methods.momentum import Momentum
from soframe.registry import register

Coefficients = Literal["muon", "polar-express"]
RMS = Literal["spectral", "rms"]

MUON = (3.4445, -4.7750, 2.0315)
"""The coefficients of every step (Jordan et al., 2024)."""

POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The coefficients of each step; the last are repeated (Amsel et al., 2025, appendix A)."""

LONG = 2
"""The aspect ratio from which the iteration runs on Gram matrices."""

_HALF = 128  # the side from which bfloat16 is faster on a processor with its instructions
_LONGEST = 8  # the aspect ratio from which Gram matrices in float32 are faster there

_NEGATIVE = 3e-3  # the largest tolerated error of eigenvalues of a Gram matrix
_PRECISE = (torch.float32, torch.float64)
_SAFETY = 1.01  # Polar Express: margin for rounding of the largest singular value
_TINY = 1e-7  # added to the norm before the division, as in Muon


def coefficients(kind: Coefficients, steps: int) -> list[tuple[float, float, float]]:
    """Return ``(a, b, c)`` of each Newton-Schulz iteration."""
    if kind == "muon":
        return list(itertools.repeat(MUON, steps))
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]]
    return [*safe[:steps], *itertools.repeat(POLAR_EXPRESS[-1], steps - len(safe))]


def nearest_orthogonal(
    matrix: Tensor,
    norm: Tensor | None = None,
    *,
    kind: Coefficients = "muon",
    steps: int = 5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix of each ``[out, in]`` by Newton-Schulz.

    ``norm`` is its Frobenius norm, if that is known; products and result have the ``dtype``.
    """
    if norm is None:
        norm = norms(matrix)
    if kind == "polar-express":
        norm = norm * _SAFETY
    norm = norm + _TINY
    # Divided in the dtype of the matrix, and rounded in the same pass; by rows, as torch multiplies
    # bfloat16 into other layouts a hundred times slower on a processor.
    scaled = matrix.new_empty(matrix.shape, dtype=dtype)
    torch.div(matrix, norm, out=scaled)
    short, long = sorted(scaled.shape[-2:])
    by_gram = long >= LONG * short and scaled.dtype in _PRECISE
    iterate = _by_gram_matrices if by_gram else _by_products
    return iterate(scaled, coefficients(kind, steps))


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


def _gram(matrix: Tensor) -> Tensor:
    """Return ``A = X X^T``, or ``X^T X`` of a tall matrix."""
    # `@` copies a single transposed matrix.
    return torch.bmm(matrix.mT, matrix) if _is_tall(matrix) else torch.bmm(matrix, matrix.mT)


def _polynomial(gram: Tensor, b: float, c: float) -> Tensor:
    """Return ``b A + c A^2``."""
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)


def _by_products(matrix: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    for a, b, c in steps:
        polynomial = _polynomial(_gram(matrix), b, c)  # [groups, short, short]
        if _is_tall(matrix):
            matrix = torch.baddbmm(matrix, matrix, polynomial, beta=a)
        else:
            matrix = torch.baddbmm(matrix, polynomial, matrix, beta=a)
    return matrix


def _by_gram_matrices(matrix: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    """Compute the result of `_by_products` with Gram matrices of the shorter side."""
    # An eigenvalue that rounding made negative grows by a^2 in each step instead of converging to
    # one. So the Gram matrix is recomputed before the error is visible: with Muon's five steps
    # this never happens.
    gram, product, growth = _gram(matrix), None, 1.0
    for number, (a, b, c) in enumerate(steps, 1):
        polynomial = _polynomial(gram, b, c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else polynomial @ product
        growth *= a * a
        error = growth * torch.finfo(matrix.dtype).eps
        if number == len(steps) or error > _NEGATIVE:
            matrix = matrix @ product if _is_tall(matrix) else product @ matrix
            if number < len(steps):
                gram, product, growth = _gram(matrix), None, 1.0
        else:
            gram = polynomial @ gram @ polynomial
    return matrix


def _fastest(matrix: Tensor) -> torch.dtype:
    """Return the dtype of the products for ``[groups, out, in]``.

    By the sides alone, so that a block is rounded alike in any stack, on any rank.
    """
    if matrix.is_cuda:
        return torch.bfloat16
    short, long = sorted(matrix.shape[-2:])
    pays = short >= _HALF and long < _LONGEST * short
    single = matrix.dtype == torch.float32 and not devices.on_gpu(matrix)
    if pays and single and devices.fast_bfloat16():
        return torch.bfloat16
    return matrix.dtype


@register("method", "orthogonalise")
@dataclass(frozen=True)
class Orthogonalise(WithoutFactors):
    """The nearest semi-orthogonal matrix, a stage; for hidden matrices of the model.

    Vectors, embeddings and the head are skipped.

    Attributes:
        steps: The number of Newton-Schulz iterations.
        coefficients: ``"muon"`` for the same coefficients in all steps, or ``"polar-express"`` for
            the optimal ones of each step.
        dtype: The name of the dtype of the products. None for bfloat16 on CUDA, and for float32 on
            processors with its instructions (AVX-512 BF16) where it is faster: for sides of 128 and
            more, the longer one less than 8 times the other. Elsewhere the dtype of the factors.
        full_rms: The root mean square of an input from which its update has the full length; below,
            updates are shorter in proportion. 0 for the full length throughout.
    """

    joint = False

    steps: int = 5
    coefficients: Coefficients = "muon"
    dtype: str | None = None
    full_rms: float = 0.0

    def __post_init__(self) -> None:
        require_integer("Orthogonalise: steps", self.steps, 1)
        if self.coefficients not in ("muon", "polar-express"):
            raise ValueError(
                f"Orthogonalise: coefficients must be 'muon' or 'polar-express', not "
                f"{self.coefficients!r}"
            )
        if self.dtype not in (None, "float64", "float32", "bfloat16", "float16"):
            raise ValueError(f"Orthogonalise: dtype must name a float dtype, not {self.dtype!r}")
        require_numbers("Orthogonalise", full_rms=self.full_rms)
        if not 0 <= self.full_rms < math.inf:
            raise ValueError(f"Orthogonalise: full_rms is at least 0, not {self.full_rms!r}")

    def direct(self, step: Given) -> Direction:
        matrix = step.incoming
        dtype = _fastest(matrix) if self.dtype is None else getattr(torch, self.dtype)
        norm = norms(matrix)
        # The iteration on Gram matrices needs float32 in full.
        with within("full"):
            nearest = nearest_orthogonal(
                matrix, norm, kind=self.coefficients, steps=self.steps, dtype=dtype
            )
        if self.full_rms:
            full = self.full_rms * math.sqrt(matrix.shape[-2] * matrix.shape[-1])
            nearest = nearest * (norm / full).clamp(max=1)  # in the wider dtype of the two
        return Direction(nearest.to(matrix.dtype))

    def effort(self, shape: BlockShape) -> float:
        groups, out, into = shape
        return float(groups * out * into * min(out, into))

    def unsuited(self, candidate: Candidate) -> str | None:
        _, out, into = candidate.shape
        if min(out, into) == 1:
            return "a vector has no directions to be made orthogonal"
        if isinstance(candidate.module, nn.Embedding | nn.EmbeddingBag):
            return "an embedding is a table of rows rather than a matrix that multiplies"
        if candidate.last:
            return "it is the model's head, or tied to an embedding"
        return None


def orthogonalises(method: Method) -> bool:
    """Return whether a method has a stage that orthogonalises."""
    return any(isinstance(stage, Orthogonalise) for stage in getattr(method, "stages", (method,)))


@register("method", "match-rms")
@dataclass(frozen=True)
class MatchRMS(WithoutFactors):
    """Multiply by a factor that depends on the shape, a stage after `Orthogonalise`.

    Attributes:
        scale: ``"spectral"`` for ``sqrt(max(1, out / in))``, which controls the size of the change
            of the layer's outputs (Jordan et al., 2024); ``"rms"`` for ``0.2 sqrt(max(out, in))``,
            which matches the root mean square of AdamW's updates (Liu et al., 2025, section 2.2),
            so that AdamW's learning rates can be used.
    """

    scale: RMS = "spectral"

    def __post_init__(self) -> None:
        if self.scale not in ("spectral", "rms"):
            raise ValueError(f"MatchRMS: scale must be 'spectral' or 'rms', not {self.scale!r}")

    @property
    def auxiliary_ratio(self) -> float:  # type: ignore[override]
        """See `Method`: AdamW's own rate suits its root mean square, or a fifth of the spectral."""
        return 0.2 if self.scale == "spectral" else 1.0

    def direct(self, step: Given) -> Direction:
        _, out, into = step.incoming.shape
        scale = max(1.0, out / into) if self.scale == "spectral" else 0.04 * max(out, into)
        if scale == 1:  # of wide matrices
            return Direction(step.incoming)
        return Direction(step.incoming * math.sqrt(scale))


@register("method", "muon")
@dataclass(frozen=True, init=False)
class Muon(Chain):
    """Momentum, orthogonalised, scaled by the shape (Jordan et al., 2024).

    Vectors, embeddings and the head are skipped: use ``auxiliary="adamw"`` for them.

    Args:
        momentum: The decay of `Momentum`.
        nesterov: Whether the momentum is Nesterov's.
        scale: The scale of `MatchRMS`.
        steps: The Newton-Schulz iterations of `Orthogonalise`.
        coefficients: The coefficients of the iterations, see `Orthogonalise`.
        dtype: The dtype of the iterations, see `Orthogonalise`.
    """

    def __init__(
        self,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        scale: RMS = "spectral",
        steps: int = 5,
        coefficients: Coefficients = "muon",
        dtype: str | None = None,
    ) -> None:
        orthogonalise = Orthogonalise(steps, coefficients, dtype)
        super().__init__((Momentum(momentum, nesterov), orthogonalise, MatchRMS(scale)))


@register("method", "newton-muon")
@dataclass(frozen=True, init=False)
class NewtonMuon(Muon):
    """Muon of the gradient times the damped inverse of the inputs' second moment.

    The stages are `FOOF`, momentum and Muon's last ones. It accepts the hidden weights of layers
    that K-FAC supports, without biases.

    Args:
        momentum: The decay of `Momentum`.
        max_size: The longest side whose factor is a matrix, see `FOOF`.
        **settings: As for `Muon`.
    """

    _curvature: ClassVar[type[FOOF | KFAC]] = FOOF

    def __init__(
        self, momentum: float = 0.95, *, max_size: int = MAX_SIZE, **settings: Any
    ) -> None:
        super().__init__(momentum, **settings)
        Chain.__init__(self, (self._curvature(max_size), *self.stages))


@register("method", "kfac-muon")
@dataclass(frozen=True, init=False)
class KFACMuon(NewtonMuon):
    """Muon of the gradient that K-FAC has preconditioned.

    The stages are `KFAC`, momentum and Muon's last ones; arguments as for `NewtonMuon`.
    """

    _curvature: ClassVar[type[FOOF | KFAC]] = KFAC
