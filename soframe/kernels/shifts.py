"""Products of shifted copies of the input: patches are never written out.

Copies of the input lie with their positions first, ``[height, width, batch, channels]``, so that a
range of rows is one matrix and every product an ordinary one, with no batch to loop over. Along
the height, blocks share products as in `soframe.kernels.geometry`. Along the width one of two ways
is used:

- `add`: blocks share products here too. A 3 x 3 kernel takes 13 products of
  ``[positions, channels]`` matrices instead of 45, and a few small ones for the borders. For the
  geometries that it serves, `soframe.kernels.rowwise` does that.
- `add_by_rows`: the kernel columns are written out side by side, which makes matrices of kernel
  columns times channels. Fewer, wider products: for inputs of few channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from soframe.kernels import devices, halves, rowwise
from soframe.kernels.geometry import Geometry, Segment, blocks, segments
from soframe.kernels.rowwise import positions_first

Slab = Callable[[int], Tensor]
"""The matrix of the rows of one residue: ``[rows * positions, groups * features]``."""


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches to ``total``, by shifts along both axes."""
    if rowwise.serves(geometry):
        rowwise.add(total, x, geometry, scale)
        return
    grid = positions_first(x)
    step, stride = geometry.rows.stride, geometry.columns.stride
    slabs: dict[tuple[int, int, int], Tensor] = {}
    length = 0

    def slab(start: int, count: int) -> Slab:
        def rows(residue: int) -> Tensor:
            key = (start, count, residue)
            if key not in slabs:
                part = grid[residue::step, start : start + stride * count : stride]
                slabs[key] = part.contiguous().flatten(0, 2)
            return slabs[key]

        return rows

    for columns in segments(geometry.columns):
        if abs(columns.shift) != length:
            # A shift and its opposite share copies, no others do.
            slabs.clear()
            length = abs(columns.shift)
        left = slab(columns.start, columns.count)
        right = slab(columns.start + columns.shift, columns.count)
        _add_products(total, left, right, columns, geometry, scale)


def add_by_rows(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches, by shifts along the height alone; also of half precision."""
    axis, step = geometry.columns, geometry.rows.stride
    # One copy pads, and moves channels last.
    grid = F.pad(x.permute(0, 2, 3, 1), (0, 0, axis.before, axis.after)).contiguous()
    grid = grid.permute(1, 2, 0, 3)
    grid = grid.unflatten(3, (geometry.groups, geometry.channels))
    slabs: dict[int, Tensor] = {}

    def slab(residue: int) -> Tensor:
        if residue not in slabs:
            part = grid[residue::step]
            # [rows, columns, batch, groups, channels, kernel columns]
            part = part.unfold(1, axis.reach + 1, axis.stride)
            part = part[..., :: axis.dilation].transpose(4, 5)
            slabs[residue] = part.reshape(len(part) * axis.out * geometry.batch, -1)
        return slabs[residue]

    _add_products(total, slab, slab, None, geometry, scale)


def _add_products(
    total: Tensor,
    left: Slab,
    right: Slab,
    columns: Segment | None,
    geometry: Geometry,
    scale: float,
) -> None:
    """Add every product over rows of one segment of columns, or of all columns."""
    step = geometry.rows.stride
    positions, column_order = geometry.batch * geometry.columns.out, 0
    if columns is not None:
        positions, column_order = geometry.batch * columns.count, columns.other
    # On an accelerator one long product takes one launch, and no memory for a product per row.
    gpu = devices.on_gpu(total)
    by_row = not gpu and rowwise.serves(geometry)
    for rows in segments(geometry.rows):
        if (rows.other, column_order) > (0, 0):
            continue  # above the diagonal
        length = rows.count * positions
        a = b = _rows_of(left, rows.start, length, step, positions)
        if rows.shift != 0 or left is not right:
            b = _rows_of(right, rows.start + rows.shift, length, step, positions)
        added = blocks(rows, columns, geometry).of(total)
        if a.dtype != total.dtype:
            product = total.new_empty(a.shape[1], b.shape[1])
            halves.add_inner(product, a, b, 1.0, 0.0)
            added.add_(product[None, None, None], alpha=scale)
        elif by_row and rows.count > 1:
            a, b = a.unflatten(0, (rows.count, -1)), b.unflatten(0, (rows.count, -1))
            added.add_(torch.bmm(a.mT, b).sum(0), alpha=scale)
        else:
            is_border = columns is None and rows.count == 1
            _add_product(added, a, b, geometry.groups, scale, once_each=gpu and is_border)


def _add_product(
    added: Tensor, a: Tensor, b: Tensor, groups: int, scale: float, *, once_each: bool
) -> None:
    """Add ``a^T b`` to all blocks, ``once_each`` by a product for each."""
    if groups == 1 and added.shape[1] == added.shape[2] == 1:
        added.view(added.shape[3:]).addmm_(a.mT, b, alpha=scale)
    elif groups == 1 and once_each:
        # The short product of a border, once for each block: one launch instead of two.
        every = (added.shape[1], -1, -1)
        added[0, :, 0].baddbmm_(a.mT.expand(every), b.expand(every), alpha=scale)
    else:
        added.add_(_product(a, b, groups)[:, None, None], alpha=scale)


def _rows_of(slab: Slab, start: int, length: int, step: int, positions: int) -> Tensor:
    """Return a range of rows as one matrix, ``[length, groups * features]``."""
    first = start // step * positions
    return slab(start % step)[first : first + length]


def _product(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """Return ``a^T b`` of each group."""
    if groups == 1:
        return (a.mT @ b).unsqueeze(0)
    if a.shape[1] == groups:
        return (a * b).sum(0).view(groups, 1, 1)
    a, b = a.unflatten(1, (groups, -1)), b.unflatten(1, (groups, -1))
    return torch.bmm(a.permute(1, 2, 0), b.transpose(0, 1))
