"""Products of shifted positions, one for each row of the image: views of one copy of the input.

The copy has its positions first, ``[height, width, batch, channels]``. Every range of columns,
shifted or not, is then a batch of matrices, one for each row. Threads share such a batch where they
would not share one product of the same few columns; and the rows of the border, which fewer blocks
contain, are the first and last matrices of the same batch.

Operands and blocks depend on the geometry alone and are planned once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from soframe.kernels.geometry import Blocks, Geometry, Segment, blocks, segments

Numbers = tuple[int, ...]


def serves(geometry: Geometry) -> bool:
    """Return whether this pays: not for groups, nor for more channels than a row has positions."""
    # There the products of all rows would take more memory than their operands.
    row = geometry.batch * geometry.columns.out
    return geometry.groups == 1 and geometry.channels <= row


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches of one group, by shifts along both axes."""
    grid = positions_first(x)
    stride = geometry.columns.stride
    # Columns of one residue side by side, so that a range of them is contiguous.
    phases = [grid[:, first::stride].contiguous() for first in range(stride)]
    for product in plan(geometry):
        sums = torch.bmm(product.left.of(phases), product.right.of(phases))
        for part in product.parts:
            part.blocks.of(total).add_(sums[part.first : part.stop].sum(0), alpha=scale)


def positions_first(x: Tensor) -> Tensor:
    """Return ``[height, width, batch, channels]`` of an image."""
    if x.is_contiguous():
        # The transpose of one matrix, which torch copies by tiles.
        batch, channels, height, width = x.shape
        return x.flatten(0, 1).flatten(1).T.contiguous().view(height, width, batch, channels)
    return x.contiguous(memory_format=torch.channels_last).permute(2, 3, 0, 1)


@dataclass(frozen=True)
class Operand:
    """A range of columns of every row."""

    phase: int  # the residue of the columns
    view: tuple[Numbers, Numbers, int]  # size, strides, offset: ``[rows, positions, channels]``

    def of(self, phases: Sequence[Tensor]) -> Tensor:
        """Return the view of the contiguous columns of its residue."""
        image, (size, strides, offset) = phases[self.phase], self.view
        # An image that need not be copied, such as one in channels_last, may begin anywhere.
        return image.as_strided(size, strides, image.storage_offset() + offset)


@dataclass(frozen=True)
class Part:
    """The rows ``first`` to ``stop`` of a product, which the same blocks contain."""

    first: int
    stop: int
    blocks: Blocks


@dataclass(frozen=True)
class Product:
    """The products of all rows with shifted ones, and the blocks they are added to."""

    left: Operand  # transposed
    right: Operand
    parts: tuple[Part, ...]


@lru_cache(maxsize=256)
def plan(geometry: Geometry) -> tuple[Product, ...]:
    """Return the products of a geometry of one group."""
    together: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for rows in segments(geometry.rows):
        if rows.other <= 0:
            together[rows.other, rows.start % geometry.rows.stride].append(rows)
    products: list[Product] = []
    for columns in segments(geometry.columns):
        for (other, _), row_segments in together.items():
            if (other, columns.other) <= (0, 0):  # not above the diagonal
                products.append(_product(row_segments, columns, geometry))
    return tuple(products)


def _product(row_segments: list[Segment], columns: Segment, geometry: Geometry) -> Product:
    """Return the product of some segments of rows, of one shift and residue."""
    step, start = geometry.rows.stride, min(rows.start for rows in row_segments)
    number = max((rows.start - start) // step + rows.count for rows in row_segments)
    left = _operand(start, columns.start, number, columns.count, geometry)
    shifted = columns.start + columns.shift
    right = _operand(start + row_segments[0].shift, shifted, number, columns.count, geometry)
    (count, length, channels), (down, along, across), offset = left.view
    left = Operand(left.phase, ((count, channels, length), (down, across, along), offset))
    parts = []
    for rows in row_segments:
        first = (rows.start - start) // step
        parts.append(Part(first, first + rows.count, blocks(rows, columns, geometry)))
    return Product(left, right, tuple(parts))


def _operand(row: int, column: int, number: int, count: int, geometry: Geometry) -> Operand:
    stride, channels = geometry.columns.stride, geometry.channels
    phase, pixel = column % stride, geometry.batch * channels
    line = len(range(phase, geometry.columns.size, stride)) * pixel
    size = (number, count * geometry.batch, channels)
    strides = (geometry.rows.stride * line, channels, 1)
    return Operand(phase, (size, strides, row * line + column // stride * pixel))
