"""What the parts say to each other about factors and second-order data: shapes, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor

SecondOrder = Mapping[str, Mapping[str, Tensor]]
"""Second-order data of a block: factor name -> tensor name -> tensor."""


@dataclass(frozen=True)
class FactorSpec:
    """One positive semi-definite matrix of a block.

    Attributes:
        name: For K-FAC ``"A"`` or ``"G"``.
        side: Which side of the gradient matrix ``[groups, out, in]`` it acts on.
        groups: The leading dimension of the factor.
        size: The factor is ``[groups, size, size]``.
    """

    name: str
    side: Literal["left", "right"]
    groups: int
    size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The factor's shape."""
        return (self.groups, self.size, self.size)

    @property
    def packed_numel(self) -> int:
        """Elements of its lower triangle."""
        return self.groups * self.size * (self.size + 1) // 2


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of second-order data.

    Attributes:
        shape: Its shape.
        symmetric: Whether its last two dimensions form symmetric matrices, of which only the
            lower triangle needs to travel and to be saved.
    """

    shape: tuple[int, ...]
    symmetric: bool = False

    @property
    def packed_numel(self) -> int:
        """Elements that travel."""
        if not self.symmetric:
            return prod(self.shape)
        *leading, size, _ = self.shape
        return prod(leading) * size * (size + 1) // 2
