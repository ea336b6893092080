"""Inner products of tangents after a last layer that is linear, without the tangents themselves.

With inputs ``a`` of the layer, their tangents ``x_i``, and tangents ``D_i`` of its weight ``W`` and
bias (then ``a`` has a column of ones), those of the outputs are ``T_i = x_i W^T + a D_i^T``, and

    <T_i, T_j> = <x_i W^T W, x_j> + <a D_i^T W, x_j> + <x_i, a D_j^T W> + <D_i a^T a, D_j>

takes products with matrices of the width of the inputs only. Where the outputs are wider, as those
of a decoder, that is less; nothing as large as the outputs is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels import products


@dataclass(frozen=True)
class LinearEnd:
    """A last layer ``a W^T + b``, and what moves before it.

    Attributes:
        inputs: ``[rows, in]``.
        weight: ``[out, in]``.
        tangents: For each direction those of the inputs ``[rows, in]``, of the weight
            ``[out, in]`` and of the bias ``[out]``; None for zero.
    """

    inputs: Tensor
    weight: Tensor
    tangents: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]]

    def gram(self) -> Tensor:
        """Return the inner products of the tangents of the outputs.

        Returns:
            ``[k, k]``, float64, on the CPU.
        """
        moving = {i: x for i, (x, _, _) in enumerate(self.tangents) if x is not None}
        extended = {i: self._extended(w, b) for i, (_, w, b) in enumerate(self.tangents)}
        weights = {i: tangent for i, tangent in extended.items() if tangent is not None}
        ones = self.inputs.new_ones(len(self.inputs), 1)
        inputs = torch.cat([self.inputs, ones], 1) if weights else self.inputs
        terms: list[tuple[int, int, float, Tensor]] = []
        square = self.weight.T @ self.weight
        for i, x in moving.items():
            image = products.times(x, square)
            terms += [(i, j, 1.0, _inner(image, other)) for j, other in moving.items() if j <= i]
        for i, tangent in weights.items():
            if not moving:
                break
            image = products.times(inputs, tangent.T @ self.weight)
            # Both (i, j) and (j, i): the lower triangle counts.
            terms += [
                (max(i, j), min(i, j), 2.0 if i == j else 1.0, _inner(image, x))
                for j, x in moving.items()
            ]
        if weights:
            moment = products.inner(inputs, inputs)
            for i, tangent in weights.items():
                image = tangent @ moment
                terms += [
                    (i, j, 1.0, _inner(image, other)) for j, other in weights.items() if j <= i
                ]
        size = len(self.tangents)
        total = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        if terms:
            rows, columns, factors, inner = zip(*terms, strict=True)
            values = torch.stack(inner).double().cpu() * total.new_tensor(factors)
            at = torch.tensor([rows, columns], device="cpu")
            total.index_put_(tuple(at), values, accumulate=True)
        return total + total.tril(-1).T

    def _extended(self, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """Return the tangent of the weight with the bias's for a last column."""
        if weight is None and bias is None:
            return None
        columns = torch.zeros_like(self.weight) if weight is None else weight
        last = columns.new_zeros(len(columns)) if bias is None else bias
        return torch.cat([columns, last.unsqueeze(1)], 1)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return one.flatten() @ other.flatten()
