"""The choice of a path for a convolution's factor: a geometry in, the name of a path out.

All paths give the same factor up to rounding. On a CPU copies and multiplications count, on a GPU
also kernel launches; the predicted times need to be right within a factor of two, by which the
paths mostly differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from soframe.kernels import pointwise, rowwise, shifts, unfold
from soframe.kernels.geometry import Geometry, segments

Path = Literal["pointwise", "shifts", "rows", "unfold"]
Kernel = Callable[[Tensor, Tensor, Geometry, float], None]

PATHS: Mapping[str, Kernel] = MappingProxyType(
    {
        "pointwise": pointwise.add,
        "shifts": shifts.add,
        "rows": shifts.add_by_rows,
        "unfold": unfold.add,
    }
)

# Seconds on an AVX2 server, in float32.
MULTIPLY_ADD = 3e-11  # of large products
READ = 3e-10  # one element, read by a product or copied
MOVE = 1.5e-9  # one element, copied as one of at most NARROW channels
CALL = 1.5e-5  # a product and the operators around it
WRITTEN_OUT = 10  # copies, as long as writing out patches takes
SIDE_BY_SIDE = 2  # copies, as long as writing kernel columns side by side takes
NARROW = 16  # columns of a product: fewer take as long
WIDE = 64  # columns of a product: threads share wider ones only

# Seconds on an H200.
GPU_MULTIPLY_ADD = 4.5e-14
GPU_READ = 2e-12  # one element, read and written
GPU_PATCH = 5e-12  # one element of a patch that is written out; an estimate
GPU_ROWS = (6e-5, 6e-5)  # calls, and calls for each product
GPU_UNFOLD = 1e-4  # calls


@lru_cache(maxsize=1024)
def choose(geometry: Geometry, threads: int = 1, *, gpu: bool = False) -> Path:
    """Return the path that is predicted to be the fastest.

    Kernels of one position are ``"pointwise"``. On a CPU ``"shifts"`` is mostly the fastest,
    ``"rows"`` for few channels, ``"unfold"`` for maps so small that patches share nothing; on a GPU
    ``"rows"``, or ``"unfold"`` for few channels.
    """
    if geometry.rows.kernel == geometry.columns.kernel == 1:
        return "pointwise"
    times: dict[Path, float] = {}
    if gpu:
        times = {"rows": _gpu_rows(geometry), "unfold": _gpu_unfold(geometry)}
    else:
        times["shifts"] = _shifts(geometry, threads)
        times["rows"] = _rows(geometry, threads)
        times["unfold"] = _unfold(geometry, threads)
    return min(times, key=times.__getitem__)


def _shifts(geometry: Geometry, threads: int) -> float:
    rows, columns, channels = geometry.rows, geometry.columns, geometry.channels
    by_row = rowwise.serves(geometry)
    pairs = itertools.product(segments(rows), segments(columns))
    counts = [r.count * c.count for r, c in pairs if (r.other, c.other) <= (0, 0)]
    copies = 2 if by_row else 1 + len({s.shift for s in segments(columns)})
    copied = rows.size * columns.size * geometry.batch * channels * geometry.groups
    products = [_product(n * geometry.batch, channels, geometry, threads, by_row) for n in counts]
    return copied * copies * _copy(channels * geometry.groups) + sum(products)


def _rows(geometry: Geometry, threads: int) -> float:
    rows, columns, batch = geometry.rows, geometry.columns, geometry.batch
    width = columns.kernel * geometry.channels
    copied = rows.size * columns.out * batch * width * geometry.groups
    counts = _row_counts(geometry)
    by_row = rowwise.serves(geometry)
    products = [_product(batch * n, width, geometry, threads, by_row) for n in counts]
    return SIDE_BY_SIDE * copied * _copy(geometry.channels) + sum(products)


def _row_counts(geometry: Geometry) -> list[int]:
    """Return the positions of an image in each product over rows."""
    columns = geometry.columns
    return [s.count * columns.out for s in segments(geometry.rows) if s.other <= 0]


def _unfold(geometry: Geometry, threads: int) -> float:
    copied = geometry.positions * geometry.features * geometry.groups
    product = _product(geometry.positions, geometry.features, geometry, threads, by_row=False)
    return WRITTEN_OUT * copied * READ + product / 2  # one triangle


def _product(length: int, size: int, geometry: Geometry, threads: int, by_row: bool) -> float:
    """Predict ``[size, length] @ [length, size]`` for all groups."""
    groups = geometry.groups
    if size == 1 < groups:
        return CALL + length * groups * 2 * READ
    by_width = max(size, NARROW) ** 2 * MULTIPLY_ADD + size * READ
    # A few columns take as long as copies of them.
    work = groups * length * (by_width if size > NARROW else min(by_width, size * MOVE))
    apart = 2 * length * size * groups * _copy(size) if groups > 1 else 0.0  # groups are copied
    if by_row or size >= WIDE:
        work /= threads
    return CALL + apart + work


def _copy(size: int) -> float:
    """Return the time of copying an element, as one of ``size`` contiguous ones."""
    return READ if size > NARROW else MOVE


def _gpu_unfold(geometry: Geometry) -> float:
    elements = float(geometry.positions * geometry.features * geometry.groups)
    return GPU_UNFOLD + elements * (GPU_PATCH + geometry.features * GPU_MULTIPLY_ADD)


def _gpu_rows(geometry: Geometry) -> float:
    start, per_product = GPU_ROWS
    rows, columns, groups = geometry.rows, geometry.columns, geometry.groups
    counts = _row_counts(geometry)
    width = columns.kernel * geometry.channels
    copied = float(rows.size * columns.out * geometry.batch * width * groups)
    multiplied = float(sum(counts) * geometry.batch * width**2 * groups)
    apart = 1.5 if groups > 1 else 1.0  # groups are copied
    return (
        start
        + apart * per_product * len(counts)
        + copied * GPU_READ
        + multiplied * GPU_MULTIPLY_ADD
    )
