"""One convolution of the image with itself, for strides of one.

Where a position ``u`` is met by every kernel position, the block ``(k, k')`` gets
``x[u] x[u + shift]^T`` from it, whatever ``k`` and ``k'`` are besides their distance. So over these
positions, the core of the image, all blocks follow from one correlation of the core with the image,
which is how the gradient of a convolution's weight is computed: the core is the gradient of the
output, the distances, half of all, are the kernel's positions. That is a single call for which
libraries have primitives that use all threads.

What is left are strips as wide as the kernel is, less one: rows above and below the core, with the
kernel columns side by side, and columns beside it, with the distances of rows side by side. They
are added, so that a border much larger than the rest costs no digits.

The primitive adds up one position after another, in single precision with an error that grows with
their number: so it gets `CHUNK` positions at a time. The largest error of an entry, relative to the
largest entry, was then 6e-7 to 1.5e-6 for the shapes of ResNet-20, against 1e-7 to 9e-7 on other
paths, and 6e-7 to 1.4e-5 in one piece.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from soframe.kernels import products, shifts
from soframe.kernels.geometry import Axis, Geometry

Range = tuple[int, int]
CHUNK = 8192
"""Positions that are added up by one call."""


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches; strides and images without a core go by shifts.

    Args:
        total: ``[groups, features, features]``; the lower triangle is added to.
        x: ``[batch, channels, height, width]``.
        geometry: Its geometry.
        scale: The multiplier.
    """
    if not serves(geometry):
        shifts.add(total, x, geometry, scale)
        return
    rows, columns = geometry.rows, geometry.columns
    # Above the core is what the distances of rows reach, beside it what those of columns do.
    (top, bottom), (left, right) = core(rows), core(columns)
    reach, span = rows.reach, columns.reach
    beside = (span - left, span - (columns.size - right))
    image = _framed(x[:, :, :bottom], reach - top, *beside)
    lines = _lines(_correlation(image, geometry), geometry)
    for start, stop in ((0, left), (right, columns.size)):
        if start < stop:
            _add_columns(lines, image, (start, stop), geometry)
    kernels = total.unflatten(2, (rows.kernel, -1)).unflatten(1, (rows.kernel, -1))
    for back in range(rows.kernel):
        blocks = kernels.diagonal(-back, 1, 3)
        blocks.add_(lines[-1 - back].flatten(3, 4).flatten(1, 2).unsqueeze(-1), alpha=scale)
    for start, stop in ((0, top), (bottom, rows.size)):
        if start < stop:
            _add_rows(kernels, x, (start, stop), geometry, scale)


def serves(geometry: Geometry) -> bool:
    """Return whether there is a core, and the stride is one.

    Args:
        geometry: The geometry.
    """
    axes = (geometry.rows, geometry.columns)
    return all(axis.stride == 1 and core(axis)[0] < core(axis)[1] for axis in axes)


def core(axis: Axis) -> Range:
    """Return the positions of the input that every kernel position meets, for a stride of one.

    Args:
        axis: The axis.

    Returns:
        ``start, stop``; empty where ``stop <= start``.
    """
    reach = axis.reach
    return max(0, reach - axis.before), min(axis.size, axis.size + axis.after - reach)


def _framed(x: Tensor, above: int, before: int, after: int) -> Tensor:
    """Return an image with zeros around it, channels last: primitives are fastest with these."""
    batch, channels, height, width = x.shape
    shape = (batch, channels, height + above, width + before + after)
    image = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    image[:, :, :above] = 0
    image[:, :, above:, :before] = 0
    image[:, :, above:, before + width :] = 0
    image[:, :, above:, before : before + width] = x
    return image


def _correlation(image: Tensor, geometry: Geometry) -> Tensor:
    """Return the products of the core with the image around it.

    Returns:
        ``[groups * channels, channels, rows, columns]``: by the distance of rows, the last of
        which is none and those before are upwards, and of columns, the middle one of which is none.
    """
    reach = geometry.rows.reach
    high = max(1, min(image.shape[2] - reach, CHUNK // geometry.columns.size))
    number = max(1, CHUNK // (high * geometry.columns.size))
    parts = [
        some[:, :, start : start + high + reach]
        for some in image.split(number)
        for start in range(0, image.shape[2] - reach, high)
    ]
    correlation = _weight_gradient(parts[0], geometry)
    for part in parts[1:]:
        correlation += _weight_gradient(part, geometry)
    return correlation


def _weight_gradient(image: Tensor, geometry: Geometry) -> Tensor:
    """Do the same in one call."""
    rows, columns = geometry.rows, geometry.columns
    reach, span = rows.reach, columns.reach
    shape = (image.shape[1], geometry.channels, rows.kernel, 2 * columns.kernel - 1)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        image[:, :, reach:, span : image.shape[3] - span],
        image,
        image.new_empty(1).expand(shape),
        None,
        [1, 1],
        [0, 0],
        [rows.dilation, columns.dilation],
        False,
        [0, 0],
        geometry.groups,
        [False, True, False],
    )[1]
    return gradient


def _lines(sums: Tensor, geometry: Geometry) -> Tensor:
    """Return the blocks of two kernel rows, by their distance.

    Returns:
        ``[rows, groups, kernel columns, channels, kernel columns, channels]``, in new memory.
    """
    number, channels = geometry.columns.kernel, geometry.channels
    by_distance = sums.unflatten(0, (geometry.groups, channels)).permute(3, 0, 1, 4, 2)
    shape = (*by_distance.shape[:2], number, channels, number, channels)
    lines = sums.new_empty(shape)
    for k in range(number):
        lines[:, :, k] = by_distance[:, :, :, number - 1 - k : 2 * number - 1 - k]
    return lines


def _add_columns(lines: Tensor, image: Tensor, strip: Range, geometry: Geometry) -> None:
    """Add the products of columns outside the core, in the rows of the core."""
    axis, step = geometry.columns, geometry.columns.dilation
    reach, span = geometry.rows.reach, axis.reach
    offset = span - core(axis)[0]  # of the image within what is padded
    first, last = max(0, strip[0] - span), min(axis.size, strip[1] + span)
    part = _positions_first(image[:, :, :, first + offset : last + offset], (2, 0, 3), geometry)
    height = part.shape[1] - reach
    for u in range(*strip):
        met = _met(axis, u)
        lower = max(-met[-1], -(u // step))
        upper = min(axis.kernel - 1 - met[0], (axis.size - 1 - u) // step)
        column = part[:, reach:, :, u - first].flatten(1, 2)
        others = part[:, :, :, u - first + lower * step : u - first + upper * step + 1 : step]
        number = upper + 1 - lower
        sums = lines.new_empty((len(lines), len(column), column.shape[2], number, column.shape[2]))
        for i in range(len(lines)):
            start = i * geometry.rows.dilation
            shifted = others[:, start : start + height].flatten(1, 2).flatten(2)
            _product(column, shifted, sums[i].flatten(2))
        for k in met:
            a, b = max(-k, lower), min(axis.kernel - 1 - k, upper) + 1
            lines[:, :, k, :, k + a : k + b] += sums[:, :, :, a - lower : b - lower]


def _add_rows(kernels: Tensor, x: Tensor, strip: Range, geometry: Geometry, scale: float) -> None:
    """Add the products of rows outside the core."""
    axis, columns, step = geometry.rows, geometry.columns, geometry.rows.dilation
    first = max(0, strip[0] - axis.reach)
    part = F.pad(x[:, :, first : strip[1]], (columns.before, columns.after))
    part = _positions_first(part, (3, 0, 2), geometry)
    part = part.unfold(1, columns.reach + 1, 1)[..., :: columns.dilation].mT
    # [groups, positions, rows, features of a kernel row]
    part = part.contiguous().flatten(1, 2).flatten(3)
    for u in range(*strip):
        met = _met(axis, u)
        back = min(met[-1], u // step)
        row = part[:, :, u - first]
        others = part[:, :, u - first - back * step : u - first + 1 : step]
        sums = row.new_empty((len(row), row.shape[2], back + 1, row.shape[2]))
        _product(row, others.flatten(2), sums.flatten(2))
        for k in met:
            number = min(k, back) + 1
            blocks = kernels[:, k, :, k + 1 - number : k + 1]
            blocks.add_(sums[:, :, back + 1 - number :], alpha=scale)


def _positions_first(x: Tensor, order: tuple[int, int, int], geometry: Geometry) -> Tensor:
    """Return ``[groups, ..., channels]``, three dimensions of a batch in an order between."""
    last: Tensor = x.permute(*order, 1).contiguous()
    by_group: Tensor = last.unflatten(3, (geometry.groups, geometry.channels))
    return by_group.permute(3, 0, 1, 2, 4)


def _met(axis: Axis, u: int) -> list[int]:
    """Return the kernel positions that meet a position of the input."""
    outputs = range(axis.out)
    return [k for k in range(axis.kernel) if u + axis.before - axis.dilation * k in outputs]


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``left^T right`` of each group."""
    if len(left) == 1 and products.pays(left[0], right[0]):
        out[0] = products.inner(left[0], right[0])
    elif len(left) == 1:
        torch.mm(left[0].T, right[0], out=out[0])
    else:
        torch.bmm(left.mT, right, out=out)
