"""The quadratic model of the loss along a few directions, exact up to the Gauss-Newton matrix.

    M(c) = h + b^T c + 1/2 c^T C c,    C_ij = d_i^T (F + damping I) d_j,    b_i = gradient^T d_i

F is the generalised Gauss-Newton matrix of the user's own loss, ``(1/N) sum_n J_n^T H_n J_n``: J by
`soframe.trust_region.twice`, H by differentiating the gradient of the loss in the model's outputs
(Martens and Grosse, 2015, sections 6.4 and 7). Only scalars are reduced over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soframe.trust_region.forward import Forward
from soframe.trust_region.twice import Direction


@dataclass(frozen=True)
class Quadratic:
    """The model along k directions.

    Attributes:
        curvature: ``[k, k]``, C.
        slope: ``[k]``, b.
        lengths: ``[k, k]``, the inner products of directions, which change the model's damping;
            None if it is never changed.
    """

    curvature: Tensor
    slope: Tensor
    lengths: Tensor | None = None

    def damped(self, more: float) -> Quadratic:
        """Return the model with ``more`` added to the damping."""
        assert self.lengths is not None
        return Quadratic(self.curvature + more * self.lengths, self.slope, self.lengths)

    def best_of(self, count: int, barred: Sequence[bool] = ()) -> tuple[list[bool], Quadratic]:
        """Choose one of each of ``count`` pairs of directions, for the best predicted reduction."""

        # The search begins with all first or all second ones, and exchanges one pair after another.
        def promised(taken: Sequence[bool]) -> float:
            model = self.of_pairs(taken)
            return model.change(model.minimise())

        free = [not bad for bad in barred] or [True] * count
        # Ties go to the first, so the present one stays.
        best = min(([False] * count, free), key=promised)
        for number in range(count):
            if free[number]:
                other = best.copy()
                other[number] = not best[number]
                best = min((best, other), key=promised)
        return best, self.of_pairs(best)

    def of_pairs(self, taken: Sequence[bool]) -> Quadratic:
        """Return the model along the second of each pair if it is taken, else along the first."""
        # First the first of each pair, then the second of each, then directions of every step.
        count = len(taken)
        which = list(range(count))
        for number, is_second in enumerate(taken):
            if is_second:
                which[number] += count
        which += range(2 * count, len(self.slope))
        return self.along(which)

    def along(self, which: Sequence[int]) -> Quadratic:
        """Return the model along the directions with these indices."""
        lengths = None if self.lengths is None else self.lengths[which][:, which]
        return Quadratic(self.curvature[which][:, which], self.slope[which], lengths)

    def finite(self) -> bool:
        """Return whether every entry is finite."""
        return bool(self.curvature.isfinite().all() and self.slope.isfinite().all())

    def finite_directions(self) -> list[bool]:
        """Return for each direction whether its slope and its own curvature are finite."""
        good: list[bool] = (self.curvature.diagonal().isfinite() & self.slope.isfinite()).tolist()
        return good

    def minimise(self) -> Tensor:
        """Return the coefficients of the minimum, ``[k]``, float64.

        If directions are zero or linearly dependent, the coefficients have the least norm.
        """
        scale = self.curvature.diagonal().clamp(min=0).sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        # Scale to a unit diagonal, so that a short direction does not count as singular.
        scaled = self.curvature / scale / scale.unsqueeze(1)
        inverse: Tensor = torch.linalg.pinv(scaled, hermitian=True, rtol=1e-10)
        minimum: Tensor = -(inverse @ (self.slope / scale)) / scale
        return minimum

    def shortened(self, coefficients: Tensor, most: float) -> Tensor:
        """Return the shortest step along the same line with a predicted reduction of ``most``."""
        slope = float(self.slope @ coefficients)
        half = 0.5 * float(coefficients @ self.curvature @ coefficients)
        # The smaller root of half t^2 + slope t + most = 0, written without a cancellation.
        root = math.sqrt(max(0.0, slope**2 - 4 * half * most))
        return coefficients * (2 * most / (root - slope))

    def change(self, coefficients: Tensor) -> float:
        """Return the predicted change of the loss, ``M(c) - M(0)``."""
        quadratic = 0.5 * coefficients @ self.curvature @ coefficients
        return float(self.slope @ coefficients + quadratic)


def curvature_along(
    forwards: Sequence[Forward], parameters: Sequence[nn.Parameter], directions: Sequence[Direction]
) -> Tensor:
    """Return ``d_i^T F d_j`` of the sum of this rank's losses, ``[k, k]``, float64, on the CPU."""
    total = torch.zeros(len(directions), len(directions), dtype=torch.float64, device="cpu")
    for forward in forwards:
        tangents = forward.jacobian_products(parameters, directions)
        precise = [tuple(map(_at_least_single, tangent)) for tangent in tangents]
        for i, tangent in enumerate(tangents):
            products = forward.hessian_product(tangent)
            # One by one: copies of outputs into one matrix would cost more than the products.
            for product, *vectors in zip(products, *precise[: i + 1], strict=True):
                flat = _at_least_single(product).flatten()
                row = torch.stack([flat @ vector.flatten() for vector in vectors]).double().cpu()
                total[i, : i + 1] += row
                total[:i, i] += row[:i]
    return total


def _at_least_single(tensor: Tensor) -> Tensor:
    """Return outputs under autocast in single precision: their sums may overflow, or cancel."""
    return tensor.float() if tensor.itemsize < torch.float32.itemsize else tensor


@torch.no_grad()
def inner_products(directions: Sequence[Direction]) -> Tensor:
    """Return the inner products of every two of k directions, ``[k, k]``, float64, on the CPU."""
    total = torch.zeros(len(directions), len(directions), dtype=torch.float64, device="cpu")
    # Few parts share parameters: each group of directions has rows and columns of its own.
    products: dict[Any, Tensor] = {}
    for tensors in zip(*directions, strict=True):
        present = {i: t.reshape(-1) for i, t in enumerate(tensors) if t is not None}
        if present:
            rows = torch.stack(list(present.values()))
            product, key = rows @ rows.T, (tuple(present), rows.device)
            if key in products:
                products[key].add_(product)
            else:
                products[key] = product.double()
    for (which, _), product in products.items():
        at = torch.tensor(which, device="cpu")
        total[at.unsqueeze(1), at] += product.cpu()
    return total


def combine(
    parameters: Sequence[Tensor], directions: Sequence[Direction], coefficients: Tensor
) -> list[Tensor]:
    """Return a linear combination of directions, in new tensors of the parameters' shapes."""
    total = list(map(torch.zeros_like, parameters))
    for direction, coefficient in zip(directions, coefficients, strict=True):
        sums: list[Tensor] = []
        addends: list[Tensor] = []
        for tensor, addend in zip(total, direction, strict=True):
            if addend is not None:
                sums.append(tensor)
                addends.append(addend)
        if sums:
            torch._foreach_add_(sums, addends, alpha=float(coefficient))
    return total
