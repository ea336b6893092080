"""EKFAC: the diagonal of the Fisher in K-FAC's eigenbasis (George et al., 2018).

With the eigenvectors ``Q_A`` and ``Q_G`` of K-FAC's factors, the diagonal that is closest to the
Fisher in the basis ``Q_G ⊗ Q_A``, in the Frobenius norm, is not the product of eigenvalues but
(equation 11)

    S = (1/N) sum_n (Q_G^T W_n Q_A)^2        W_n = sum_t g_{n,t} a_{n,t}^T        [out, in]

with the gradient ``W_n`` of sample n, summed over the positions t at which the sample uses the
weights. S belongs to its basis: it is estimated with the second-order data of the last solve, and
restarts after each solve. Until the first estimate the product of eigenvalues is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soframe.kernels.samples import squared_gradients
from soframe.layers.layout import BlockShape
from soframe.methods.base import Addend, Call, Direction, Given
from soframe.methods.kfac import KFAC
from soframe.methods.spectrum import Spectrum
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.solvers.eigen import quotient, turned, with_eigenbasis
from soframe.specs import VALUE, FactorSpec, SecondOrder


@register("method", "ekfac")
@dataclass(frozen=True)
class EKFAC(KFAC):
    """K-FAC with second moments of rotated sample gradients in place of eigenvalue products.

    It needs a solver that computes eigenvectors, ``"eigen"`` or ``"orthogonal-iteration"``. In
    addition to K-FAC's statistics, each row is rotated into the eigenbasis, and samples with
    several positions need their whole gradient (`soframe.kernels.samples`).

    A module that is called several times in one backward pass has a gradient for each call;
    products between calls are left out, as K-FAC leaves out those between positions.

    Attributes:
        max_size: The longest side whose factor is a matrix, see `KFAC`; a longer one is not
            rotated.
    """

    scalings = ("fisher",)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        groups, out, into = shape
        scale = FactorSpec(
            "S", "both", groups, out, kind="elementwise", columns=into, needs=("A", "G")
        )
        return (*super().factors(shape), scale)

    def statistics(self, call: Call) -> Mapping[str, Addend]:
        moments = super().statistics(call)
        if call.inputs is None or not {"A", "G"} <= call.data.keys():
            return moments

        def add(total: Tensor | None, multiplier: float) -> Tensor:
            squares = self._squares(call) * multiplier
            if total is None:
                return squares
            return total.add_(squares)

        return {**moments, "S": add}

    def _squares(self, call: Call) -> Tensor:
        """Return the squared rotated gradients, summed over samples: ``[groups, out, in]``."""
        assert call.inputs is not None
        gradients = _rotated(call.output_rows, call.data["G"])
        if "vectors" not in call.data["A"]:  # A is a diagonal
            return call.helper.squared_gradients(call.inputs, gradients)
        rows = call.helper.block_rows(call.inputs, call.output_rows)
        return squared_gradients(_rotated(rows, call.data["A"]), gradients)

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        if factor.kind == "elementwise":
            return None
        return with_eigenbasis(default, factor, "EKFAC gathers second moments in an eigenbasis")

    def direct(self, step: Given) -> Direction:
        left, right = step.data["G"], step.data["A"]
        if "S" not in step.data:
            matrix = step.solver.apply(step.incoming, left=left, right=right, damping=step.damping)
            return Direction(matrix)
        curvature = step.data["S"][VALUE] + _damping(step)
        rotated = turned(step.incoming, left, right, back=False)
        return Direction(turned(quotient(rotated, curvature), left, right, back=True))

    def spectrum(self, shape: BlockShape, data: SecondOrder) -> Spectrum:
        product = super().spectrum(shape, data)
        if "S" not in data:
            return product
        values = data["S"][VALUE]
        null = _null(values, is_rotated=("vectors" in data["G"], "vectors" in data["A"]))
        return replace(product, values=values, null=null | product.zeros)


def _null(scale: Tensor, *, is_rotated: tuple[bool, bool]) -> Tensor:
    """Return where squares ``[groups, out, in]`` of rotated gradients are zero within rounding.

    A rotation of n numbers rounds to about ``n eps`` of the largest result, and the squares to its
    square. Numbers along a side that is not rotated are rounded by themselves.
    """
    sides = [side for side, rotated in zip((1, 2), is_rotated, strict=True) if rotated]
    if not sides:
        return scale <= 0
    size = max(scale.shape[side] for side in sides)
    rounding = (size * torch.finfo(scale.dtype).eps) ** 2
    return scale <= rounding * scale.amax(sides, keepdim=True)


def _damping(step: Given) -> Tensor | float:
    """Return the damping, multiplied by the mean traces ``[groups, 1, 1]`` if it is relative."""
    damping: Tensor | float = step.damping
    for name in ("A", "G"):
        if (trace := step.data[name].get("mean_trace")) is not None:
            damping = damping * trace[:, None, None]
    return damping


def _rotated(rows: Tensor, data: Mapping[str, Tensor]) -> Tensor:
    """Rotate rows ``[groups, batch, shared, n]`` into the eigenbasis of a factor, if it has one."""
    if "vectors" not in data:
        return rows
    return torch.matmul(rows.flatten(1, 2), data["vectors"]).view(*rows.shape[:3], -1)
