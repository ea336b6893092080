"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al., 2024, algorithm 3).

With the averaged gradient G, ``[out, in]``, the input X of the stage (G itself for the first one),
and the eigenvectors ``Q_L`` and ``Q_R`` of running averages of ``G G^T`` and ``G^T G``::

    m <- b1 m + (1 - b1) X
    v <- b2 v + (1 - b2) (Q_L^T G Q_R)^2
    update = Q_L ((Q_L^T m Q_R) / (sqrt(v) + eps)) Q_R^T, times sqrt(1 - b2^t) / (1 - b1^t)

where t counts the updates with a basis. Statistics and bases are refreshed after the update, so
that a gradient never contributes to the basis into which it is rotated. Both m and v are kept in
the basis, and transferred to a new one. The paper keeps m unrotated and rotates it at every step,
which is equivalent: averages and rotations commute, so only the gradient has to be rotated.

The weight of a convolution is a tensor ``[out, channels, positions]``, each of whose dimensions has
a factor (section 4 there): ``Q_R`` is then the Kronecker product of the bases of channels and of
positions. In the basis columns are by position, then channel.

*SOAP-Muon* takes the Nesterov momentum for X, without a momentum of its own, and orthogonalises. An
orthogonal matrix has one length however small X is. So the update is shorter where gradients cancel
or are much smaller than before: where the root mean square of X over the root of v is smaller than
for independent gradients, in proportion. For these it is, with the momentum b::

    sqrt((1 - b^2)^2 + b^4 (1 - b) / (1 + b))

the norm of Nesterov's weights of the gradients, from the last one back: ``1 - b^2``, then
``(1 - b) b^2``, ``(1 - b) b^3`` and so on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.adam import require_eps
from soframe.methods.base import Direction, Given, Method
from soframe.methods.chain import Chain
from soframe.methods.momentum import Momentum, require_beta, second_moment
from soframe.methods.normuon import NormaliseRows
from soframe.methods.orthogonal import RMS, Coefficients, MatchRMS, Orthogonalise
from soframe.methods.shampoo import gradient_factors, gradient_moments, swapped
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.solvers.basis import Basis
from soframe.specs import FactorSpec, SecondOrder, State, TensorSpec

Carry = Literal["permute", "rotate"]


@register("method", "soap")
@dataclass(frozen=True)
class SOAP(Method):
    """Adam in a slowly changing eigenbasis; alone, or a stage.

    Sides of length one or above ``max_size`` have no factor and are not rotated; without factors
    this is Adam. The sides of a convolution are its outputs, its input channels and the positions
    of its kernel. Bases are recomputed every ``solve_every`` steps: 10 in the paper, while 1
    converges in the fewest steps.

    Attributes:
        betas: The decays of m and v; with a first of 0 no m is kept.
        eps: Added to roots in denominators.
        shampoo_beta: The decay of the factors.
        skip_first: Whether the first gradient only initialises the basis and the update is zero, as
            published. Otherwise the first update is the input at a root mean square of one.
        max_size: The longest side that has a factor; `Blocked` splits larger matrices.
        max_ratio: A side that is at least this many times as long as the other has no factor. Such
            a factor gains only the rank of the short side in each step, at the highest cost; 4
            leaves out the wide side of a transformer's MLPs.
        correct_bias: Whether m and v are bias-corrected.
        normalise: Whether updates are divided by their root mean square, in each group.
        carry: How v is transferred to a new basis: ``"permute"`` reorders its columns (published),
            ``"rotate"`` applies the squared overlaps between old and new columns.
        positions: Of a kernel; set by `of_kernel`.
    """

    joint = False
    clipped = False
    damped = False
    starts_at_once = True
    refreshes_after = True
    options: ClassVar[Mapping[str, str]] = {"betas": "betas", "eps": "eps"}

    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    shampoo_beta: float = 0.95
    skip_first: bool = True
    max_size: int = 10_000
    max_ratio: float = math.inf
    correct_bias: bool = True
    normalise: bool = False
    carry: Carry = "permute"
    positions: int = field(default=1, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_beta(name, "betas", self.betas)
        require_beta(name, "shampoo_beta", self.shampoo_beta)
        require_eps(name, self.eps)
        if self.max_size < 1:
            raise ValueError(f"{name}: max_size must be positive, not {self.max_size!r}")
        if not self.max_ratio > 1:
            raise ValueError(f"{name}: max_ratio must be above 1, not {self.max_ratio!r}")
        if self.carry not in ("permute", "rotate"):
            raise ValueError(f"{name}: carry must be 'permute' or 'rotate', not {self.carry!r}")

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        _, out, into = shape
        if min(out, into) == 1:
            return ()
        channels = into // self.positions
        left = out <= self.max_size and out < self.max_ratio * into
        right = channels <= self.max_size and channels < self.max_ratio * out
        return gradient_factors(
            shape, self.shampoo_beta, left=left, right=right, positions=self.positions
        )

    def of_kernel(self, positions: int) -> Method:
        return self if positions > self.max_size else replace(self, positions=positions)

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        del data
        names = factor_names(self, gradient.shape)
        return gradient_moments(gradient, names, positions=self.positions)

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        names = ("rotated_mean", "square") if self.betas[0] else ("square",)
        return {name: TensorSpec(tuple(shape)) for name in names}

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        del factor, default
        return Basis()

    def direct(self, step: Given) -> Direction:
        names = factor_names(self, step.gradient.shape)
        if self.skip_first and step.updates == 0:
            return Direction(torch.zeros_like(step.incoming))
        if any(name not in step.data for name in names):
            return Direction(_normalised(step.incoming, self.eps))
        first, second = self.betas
        new = into_basis(step.gradient, step.data)
        state = {"square": second_moment(step.state["square"], new, second)}
        alone = step.incoming is step.gradient
        mean = new if alone else into_basis(step.incoming, step.data)
        if "rotated_mean" in step.state:
            mean = state["rotated_mean"] = step.state["rotated_mean"].lerp(mean, 1 - first)
        root = state["square"].sqrt().add_(self.eps)
        matrix = _out_of(torch.div(mean, root, out=root), step.data)
        if self.normalise:
            matrix = _normalised(matrix, 1e-30)  # as in the published code
        if self.correct_bias:
            # The first update has no basis, or is skipped.
            count = max(1, step.updates + (not (names or self.skip_first)))
            matrix = matrix * (math.sqrt(1 - second**count) / (1 - first**count))
        return Direction(matrix, state)

    def rebase(self, state: State, old: SecondOrder, new: SecondOrder) -> State:
        moved = {}
        if "rotated_mean" in state:
            moved["rotated_mean"] = into_basis(_out_of(state["rotated_mean"], old), new)
        # [groups, out, positions, channels]
        square = state["square"].unflatten(-1, (self.positions, -1))
        for name, dim in (("L", 1), ("P", 2), ("R", 3)):
            if name not in old or name not in new:
                continue
            if self.carry == "permute":
                if "order" not in new[name]:
                    continue  # every column stays in its place
                order = new[name]["order"].long()
                sizes = [len(order), 1, 1, 1]
                sizes[dim] = -1
                square = square.gather(dim, order.view(sizes).expand_as(square))
            else:
                overlap = (new[name]["vectors"].mT @ old[name]["vectors"]).square()
                rows = square.movedim(dim, 1)  # [groups, n, ...]
                rows = (overlap @ rows.flatten(2)).view(rows.shape)
                square = rows.movedim(1, dim).contiguous()
        return {**moved, "square": square.flatten(2)}


@functools.lru_cache(maxsize=4096)
def factor_names(method: SOAP, shape: torch.Size) -> tuple[str, ...]:
    """Return the names of the factors of a gradient of shape ``[groups, out, in]``."""
    return tuple(factor.name for factor in method.factors(BlockShape(*shape)))


@register("method", "soap-muon")
@dataclass(frozen=True, init=False)
class SOAPMuon(Chain):
    """SOAP applied to the Nesterov momentum, orthogonalised, scaled by the shape.

    Vectors, embeddings and the head are skipped: use ``auxiliary="adamw"`` for them. The defaults
    are the best of the cheap settings on a byte-level GPT (docs/benchmarks/defaults.md): in the
    bases, where a direction has been divided by its sizes, three iterations are enough.

    Args:
        momentum: The decay of `Momentum`.
        square_beta: The decay of v in `SOAP`, whose m is left out.
        shampoo_beta: The decay of the factors, see `SOAP`.
        eps: Added to the root in the denominator of `SOAP`.
        max_size: The longest side that has a factor, see `SOAP`.
        max_ratio: The largest ratio of sides for a factor of the longer one, see `SOAP`.
        carry: How v is transferred to a new basis, see `SOAP`.
        scale: The scale of `MatchRMS`.
        steps: The Newton-Schulz iterations of `Orthogonalise`.
        coefficients: The coefficients of the iterations, see `Orthogonalise`.
        dtype: The dtype of the iterations, see `Orthogonalise`.
    """

    def __init__(
        self,
        momentum: float = 0.85,
        *,
        square_beta: float = 0.95,
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        max_size: int = 10_000,
        max_ratio: float = 2.0,
        carry: Carry = "permute",
        scale: RMS = "spectral",
        steps: int = 3,
        coefficients: Coefficients = "muon",
        dtype: str | None = None,
    ) -> None:
        soap = SOAP(
            betas=(0.0, square_beta),
            eps=eps,
            shampoo_beta=shampoo_beta,
            skip_first=False,
            max_size=max_size,
            max_ratio=max_ratio,
            carry=carry,
        )
        orthogonalise = Orthogonalise(steps, coefficients, dtype, independent_rms(momentum))
        momenta = Momentum(momentum, nesterov=True)
        super().__init__((momenta, soap, orthogonalise, *self._between(), MatchRMS(scale)))

    def _between(self) -> tuple[Method, ...]:
        """Return the stages between `Orthogonalise` and `MatchRMS`."""
        return ()

    def with_settings(self, settings: Mapping[str, Any]) -> Chain:
        new = super().with_settings(settings)
        momentum = new.stages[0]
        if new is not self and isinstance(momentum, Momentum):
            stages = tuple(_at_momentum(stage, momentum.beta) for stage in new.stages)
            object.__setattr__(new, "stages", stages)
        return new


@register("method", "soap-normuon")
@dataclass(frozen=True, init=False)
class SOAPNorMuon(SOAPMuon):
    """`SOAPMuon` with normalised rows (`NormaliseRows`); arguments as for `SOAPMuon`."""

    def _between(self) -> tuple[Method, ...]:
        return (NormaliseRows(),)


def independent_rms(momentum: float) -> float:
    """Return the root mean square of the Nesterov momentum of independent gradients of size one."""
    last, before = 1 - momentum**2, momentum**4 * (1 - momentum) / (1 + momentum)
    return math.sqrt(last**2 + before)


def _at_momentum(stage: Method, momentum: float) -> Method:
    if isinstance(stage, Orthogonalise):
        return replace(stage, full_rms=independent_rms(momentum))
    return stage


def into_basis(matrix: Tensor, data: SecondOrder) -> Tensor:
    """Rotate ``[groups, out, in]`` into the basis; sides without a factor are not rotated."""
    if "L" in data:
        matrix = data["L"]["vectors"].mT @ matrix
    if "P" in data:
        basis = data["P"]["vectors"]
        matrix = swapped(_times(matrix, basis), basis.shape[-1])
    return _times(matrix, data["R"]["vectors"]) if "R" in data else matrix


def _out_of(matrix: Tensor, data: SecondOrder) -> Tensor:
    """Undo `into_basis`."""
    if "L" in data:
        matrix = data["L"]["vectors"] @ matrix
    if "R" in data:
        matrix = _times(matrix, data["R"]["vectors"].mT)
    if "P" in data:
        basis = data["P"]["vectors"]
        matrix = _times(swapped(matrix, matrix.shape[-1] // basis.shape[-1]), basis.mT)
    return matrix


def _normalised(matrix: Tensor, eps: float) -> Tensor:
    """Divide ``[groups, out, in]`` by the root mean square of each group, and ``eps`` more."""
    return matrix / (matrix.square().mean((-2, -1), keepdim=True).sqrt() + eps)


def _times(matrix: Tensor, right: Tensor) -> Tensor:
    """Multiply runs of n columns of ``[groups, out, in]`` by ``[groups, n, n]``."""
    if right.shape[-1] == matrix.shape[-1]:
        return matrix @ right
    return (matrix.reshape(len(matrix), -1, right.shape[-1]) @ right).view(matrix.shape)
