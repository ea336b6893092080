"""Shampoo: roots of the second moments of the gradient's rows and columns (Gupta et al., 2018).

With the averaged gradient G, ``[out, in]``, and running averages of

    L = G G^T        R = G^T G

the update of ``X`` is ``L^(-1/4) X R^(-1/4)`` (algorithm 1, with averages in place of sums), or
with one side only ``L^(-1/2) X`` or ``X R^(-1/2)``. Its length is unrelated to the gradient's;
*grafting* gives it the length of another method's update (Agarwal et al., 2020), which is also the
update of the first steps, while few gradients leave the factors without full rank (Shi et al.,
2023, arXiv 2309.06497, section 3: ``start_preconditioning_step``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from soframe.checks.values import require_integer
from soframe.layers.layout import BlockShape
from soframe.methods.base import Candidate, Direction, Given, Method
from soframe.methods.graft import at_length
from soframe.methods.momentum import require_beta
from soframe.registry import KINDS, register
from soframe.solvers.base import Solver
from soframe.solvers.root import Root
from soframe.specs import FactorSpec, SecondOrder, TensorSpec

Sides = Literal["both", "left", "right"]
Roots = Mapping[str, Tensor]
"""Factor name -> a root P of a positive semi-definite matrix ``P P^T``, ``[groups, n, n]``."""
NO_ROOTS: Roots = {}


def gradient_factors(
    shape: BlockShape, decay: float, *, left: bool = True, right: bool = True, positions: int = 1
) -> tuple[FactorSpec, ...]:
    """Return L ``[groups, out, out]`` and R ``[groups, in, in]``, or one of them.

    With ``positions`` of a kernel R is ``[groups, channels, channels]``, and there is a third one:
    P ``[groups, positions, positions]``.
    """
    groups, out, into = shape
    size = into // positions
    factors: list[FactorSpec] = []
    if left:
        factors.append(FactorSpec("L", "left", groups, out, reads="gradient", decay=decay))
    if right:
        factors.append(FactorSpec("R", "right", groups, size, reads="gradient", decay=decay))
    if positions > 1:
        factors.append(FactorSpec("P", "right", groups, positions, reads="gradient", decay=decay))
    return tuple(factors)


def gradient_moments(
    gradient: Tensor, names: Collection[str], weights: Roots = NO_ROOTS, positions: int = 1
) -> dict[str, Tensor]:
    """Compute ``G P_R P_R^T G^T`` and ``G^T P_L P_L^T G``; missing roots are the identity.

    With ``positions`` of a kernel, whose columns are ``[channels, positions]``, R is summed over
    positions, and P over channels.
    """
    moments = {}
    if "L" in names:
        rows = gradient
        if "R" in weights:
            rows = gradient @ weights["R"]
        moments["L"] = rows @ rows.mT
    if "R" in names:
        columns = gradient
        if "L" in weights:
            columns = weights["L"].mT @ gradient
        if positions > 1:
            channels = columns.shape[-1] // positions
            columns = swapped(columns, positions).reshape(len(columns), -1, channels)
        moments["R"] = columns.mT @ columns
    if "P" in names:
        rows = gradient.reshape(len(gradient), -1, positions)  # [groups, out * channels, positions]
        moments["P"] = rows.mT @ rows
    return moments


def swapped(matrix: Tensor, inner: int) -> Tensor:
    """Reorder columns: from ``[..., outer * inner]`` to ``[..., inner * outer]``."""
    reordered: Tensor = matrix.unflatten(-1, (-1, inner)).mT.flatten(-2)
    return reordered


@register("method", "shampoo")
@dataclass(frozen=True)
class Shampoo(Method):
    """Precondition with inverse roots of the second moments of the averaged gradient.

    Factors are updated with this step's gradient before the update is computed; roots are
    recomputed every ``solve_every`` steps. With the defaults the learning rate is Adam's. The
    published momentum is a stage before: ``Chain(("momentum", "shampoo"))``.

    Attributes:
        decay: The decay of the factors per step.
        sides: ``"both"``, or the one side that has a factor.
        power: The power of each factor; None for -1/4 with both sides and -1/2 with one.
        epsilon: Added to eigenvalues, relative to the largest, see `soframe.solvers.Root`.
        graft: The method whose length the update has, in each group: a name, class or instance of
            one without factors, by default AdamW; ``"sgd"`` for the length of the input. None for
            the update as it is, whose first roots may multiply gradients by thousands.
        graft_steps: The number of first updates that are ``graft``'s own, so that the roots of one
            gradient are not used; at least ``solve_every``.
        max_size: The longest side that may have a factor; larger matrices are skipped. `Blocked`
            splits them.
    """

    joint = False
    clipped = False
    damped = False

    decay: float = 0.999
    sides: Sides = "both"
    power: float | None = None
    epsilon: float = 1e-6
    graft: Any = "adamw"
    graft_steps: int = 10
    max_size: int = 8192

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_beta(name, "decay", self.decay)
        if self.sides not in ("both", "left", "right"):
            raise ValueError(f"{name}: sides must be 'both', 'left' or 'right', not {self.sides!r}")
        if self.power is not None and not -math.inf < self.power < 0:
            raise ValueError(f"{name}: power must be negative, not {self.power!r}")
        if self.max_size < 1:
            raise ValueError(f"{name}: max_size must be positive, not {self.max_size!r}")
        require_integer(f"{name}: graft_steps", self.graft_steps, 0)
        self._root  # noqa: B018  # checks epsilon
        if self.graft is not None:
            graft: Method = KINDS["method"].build(self.graft, Method)
            if graft.factor_names():
                raise ValueError(f"{name}: graft= is a method without factors, not {graft!r}")
            object.__setattr__(self, "graft", graft)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        left, right = self.sides != "right", self.sides != "left"
        return gradient_factors(shape, self.decay, left=left, right=right)

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        del data
        return gradient_moments(gradient, self._names)

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        if self.graft is None:
            return {}
        state: Mapping[str, TensorSpec] = self.graft.state(shape)
        return state

    def solver(self, factor: FactorSpec, default: Solver) -> Solver:
        del factor, default
        return self._root

    def direct(self, step: Given) -> Direction:
        matrix = step.incoming
        grafted: Direction = Direction(matrix)
        if self.graft is not None:
            grafted = self.graft.direct(step)
            if step.updates < self.graft_steps:
                return grafted
        if self.sides != "right":
            matrix = step.data["L"]["root"] @ matrix
        if self.sides != "left":
            matrix = matrix @ step.data["R"]["root"]
        if self.graft is not None:
            matrix = at_length(matrix, grafted.matrix)
        return Direction(matrix, grafted.state)

    def unsuited(self, candidate: Candidate) -> str | None:
        for factor in self.factors(candidate.shape):
            if factor.size > self.max_size:
                return f"its side of {factor.size} is longer than max_size={self.max_size}"
        return None

    @property
    def _names(self) -> str:
        return {"both": "LR", "left": "L", "right": "R"}[self.sides]

    @property
    def _root(self) -> Root:
        if self.power is not None:
            return Root(self.power, self.epsilon)
        return Root(-1 / (2 * len(self._names)), self.epsilon)
