"""Which way a convolution's factor is computed: a geometry in, the name of a path out.

All paths are exact up to rounding, so only speed decides. It is predicted from the figures of
this file, measured on an AVX2 server with MKL and oneDNN: they need to be right within a factor of
two, since that is by how much the paths mostly differ. Kernels of 3 x 3 positions at a stride of
one, channels first, ms with one thread and with two; predictions in parentheses:

======================  ======================  ======================  ======================
batch, channels, map    correlation             shifts                  rows
======================  ======================  ======================  ======================
64, 3, 32 x 32          3.7, 3.1 (4.4, 3.3)     4.3, 3.0 (5.2, 3.1)     4.5, 3.4 (2.3, 1.6)
64, 16, 32 x 32         12.1, 9.8 (14.2, 8.6)   10.4, 7.2 (10.9, 6.0)   19.6, 10.0 (16.9, 9.0)
64, 32, 16 x 16         10.7, 7.3 (12.7, 7.9)   7.3, 4.4 (8.1, 4.4)     15.5, 7.8 (14.6, 7.6)
64, 64, 8 x 8           10.2, 6.7 (11.2, 7.7)   5.6, 4.2 (6.1, 3.4)     10.9, 7.1 (12.8, 6.6)
8, 64, 56 x 56          59.9, 56.9 (76.9, 41.1) 50.0, 30.5 (45.8, 23.6) 84.5, 47.8 (87.5, 44.5)
8, 256, 14 x 14         84.4, 47.2 (68.2, 39.9) 44.9, 30.1 (36.2, 18.7) 86.7, 65.7 (78.7, 39.6)
8, 32 of 4, 28 x 28     16.0, 11.5 (10.3, 10.3) 58.3, 32.9 (43.9, 43.9) 32.5, 15.3 (29.2, 29.2)
8, 96 of 1, 28 x 28     12.2, 9.6 (7.8, 7.8)    6.0, 5.0 (5.8, 5.8)     23.5, 14.3 (27.6, 27.6)
======================  ======================  ======================  ======================

They are lower quartiles of 14 turns on a machine with other work, so between rows they compare less
well than within. Where oneDNN multiplies much faster than torch's products do, on AMD's Zen 5
(`soframe.kernels.products`), maps of 64 and 128 channels take a correlation as well. There
`benchmarks/paths.py` says, of the chosen path and the next best:

======================  ====================================  ====================================
batch, channels, map    with one thread                       with two
======================  ====================================  ====================================
64, 16, 32 x 32         correlation   6.1, shifts 7.1         correlation   4.4, shifts 3.8
64, 32, 16 x 16         correlation   6.6, shifts 5.9         shifts        3.3, correlation 4.8
64, 64, 8 x 8           shifts        4.4, correlation 5.6    shifts        2.5, correlation 3.8
8, 64, 56 x 56          correlation  20.3, shifts 32.4        correlation  10.5, shifts 15.5
8, 128, 28 x 28         correlation  19.5, shifts 29.6        correlation  11.3, shifts 14.8
8, 256, 14 x 14         shifts       17.5, correlation 24.7   shifts        9.9, correlation 12.7
8, 512, 7 x 7           shifts       29.2, correlation 55.6   shifts       15.0, correlation 25.6
======================  ====================================  ====================================

A transform (`soframe.kernels.fourier`) pays where a batch is large. On Zen 4, medians of 7 turns
and predictions:

======================  ==================================  ==================================
batch, channels, map    with one thread                     with two
======================  ==================================  ==================================
64, 3, 32 x 32          fourier 2.1 (2.6), shifts 4.1 (5.2) fourier 1.5 (2.2), shifts 2.5 (3.1)
128, 64, 32 x 32        fourier  94 (93), shifts 254 (230)  fourier 45 (56), shifts 131 (118)
128, 128, 16 x 16       fourier  67 (78), shifts 160 (197)  fourier 36 (42), shifts  83 (100)
128, 256, 8 x 8         fourier  79 (104), shifts 126 (161) fourier 43 (53), shifts  66 (81)
32, 64, 56 x 56         fourier  86 (116), shifts 155 (182) fourier 49 (70), shifts  82 (93)
32, 256, 14 x 14        fourier  70 (97), shifts 118 (142)  fourier 41 (50), shifts  64 (72)
8, 256, 14 x 14         shifts   29 (36), fourier 41 (65)   shifts  16 (19), fourier 25 (33)
======================  ==================================  ==================================

On a GPU launches count, and patches that are written out: kernel rows side by side are mostly the
best, and shifts are never much better. ms on an NVIDIA H200 in float32, and predictions:

======================  ==================  ==================  ======
batch, channels, map    rows                unfold              shifts
======================  ==================  ==================  ======
64, 3, 32 x 32          0.42 (0.36)         0.44 (0.38)           1.16
64, 64, 8 x 8           0.39 (0.38)         0.47 (0.44)           1.07
8, 3, 224 x 224, 7 / 2  1.41 (1.41)         0.46 (0.47)          24.92
8, 512, 7 x 7           0.43 (0.47)         0.43 (0.61)           1.48
8, 32 of 4, 28 x 28     0.54 (0.52)         0.32 (0.30)           2.04
128, 128, 16 x 16       1.19 (1.00)         2.44 (2.85)           1.12
32, 64, 56 x 56         0.86 (0.89)         2.30 (2.36)           1.17
32, 256, 14 x 14        0.76 (0.83)         1.27 (1.92)           1.08
======================  ==================  ==================  ======

Threads share a convolution without groups, the rows of an image where these have products of their
own (`soframe.kernels.rowwise`), and products of wide matrices; others, of fewer than `WIDE`
columns, are counted as if they were not shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from soframe.kernels import correlation, fourier, pointwise, rowwise, shifts, unfold
from soframe.kernels.devices import on_gpu
from soframe.kernels.geometry import Geometry, segments
from soframe.kernels.products import are_exact, has_primitives, prefers_onednn

Path = Literal["pointwise", "correlation", "fourier", "shifts", "rows", "unfold"]
Kernel = Callable[[Tensor, Tensor, Geometry, float], None]

PATHS: Mapping[str, Kernel] = MappingProxyType(
    {
        "pointwise": pointwise.add,
        "correlation": correlation.add,
        "fourier": fourier.add,
        "shifts": shifts.add,
        "rows": shifts.add_by_rows,
        "unfold": unfold.add,
    }
)

MULTIPLY_ADD = 3e-11  # seconds: of large products
READ = 3e-10  # seconds: of one element, read by a product or copied
WRITTEN_OUT = 16  # copies, as long as writing patches out takes
CONVOLUTION = 5e-11  # seconds: a multiplication and addition in the gradient of a weight
WIDE_CONVOLUTION = 1.5e-11  # where oneDNN is preferred
FASTER = 2  # times, by which `soframe.kernels.products` then multiplies faster than torch
NARROW = 12  # columns of a product: fewer take as long
VECTORS = 16  # channels that the primitive takes at least
MOVE = 1.5e-9  # seconds: of one element of fewer than NARROW channels, when it is copied
CALL = 1.5e-5  # seconds: a product and what is around it
SKINNY = 1.5  # times, by which a product with a small matrix takes longer
WRITTEN_TWICE = 14  # accesses to a product of a frequency, of which there are two
FOURIER_CALLS = 100  # what its many small tensors take, and passing images on between threads
SIDE_BY_SIDE = 2  # copies, as long as writing kernel columns side by side takes
WIDE = 64  # columns of a matrix: products of narrower ones stay on one thread

GPU_MULTIPLY_ADD = 4.5e-14  # seconds: of a large product in float32
GPU_READ = 2e-12  # seconds: of one element, read and written
GPU_SCATTERED = 1e-11  # seconds: of one element of a patch that is written out
GPU_ROWS = (6e-5, 6e-5)  # seconds: of calls, and of those for each product
GPU_UNFOLD = (2e-4, 2.5e-6)  # seconds: of calls, and of those for each image


@dataclass(frozen=True)
class Processor:
    """What multiplies an image.

    Attributes:
        threads: How many there are.
        primitive: Whether the gradient of a convolution's weight has a fast and exact primitive
            (`soframe.kernels.products.has_primitives`).
        wide: Whether that is much faster than products are
            (`soframe.kernels.products.prefers_onednn`).
        transform: Whether products of channels are fast and of full precision
            (`soframe.kernels.products.are_exact`).
        gpu: Whether it is an accelerator, of which nothing else is asked.
    """

    threads: int = 1
    primitive: bool = False
    wide: bool = False
    transform: bool = False
    gpu: bool = False

    @classmethod
    def of(cls, x: Tensor) -> Processor:
        """Return that of a tensor.

        Args:
            x: An operand.
        """
        return cls(
            threads=torch.get_num_threads(),
            primitive=has_primitives(x),
            wide=prefers_onednn(),
            transform=are_exact(x),
            gpu=on_gpu(x),
        )


ONE_THREAD = Processor()


def candidates(geometry: Geometry, processor: Processor = ONE_THREAD) -> tuple[Path, ...]:
    """Return the paths that may be the fastest.

    Args:
        geometry: The geometry.
        processor: What multiplies.
    """
    if geometry.rows.kernel == geometry.columns.kernel == 1:
        return ("pointwise",)
    if processor.gpu:
        return ("rows", "unfold")
    found: tuple[Path, ...] = ("shifts", "rows", "unfold")
    if processor.primitive and correlation.serves(geometry):
        found += ("correlation",)
    if processor.transform and fourier.serves(geometry):
        found += ("fourier",)
    return found


@lru_cache(maxsize=1024)
def choose(geometry: Geometry, processor: Processor = ONE_THREAD, *, planes: bool = True) -> Path:
    """Return the path that is expected to be fastest.

    Args:
        geometry: The geometry.
        processor: What multiplies.
        planes: Whether the image has its channels first, as a transform takes it.

    Returns:
        ``"pointwise"`` for every kernel of one position. Otherwise, by the predicted time:
        ``"shifts"`` mostly; ``"correlation"`` for groups of a few channels at a stride of one, and
        for large maps where the primitive is much faster; ``"fourier"`` for many small maps at a
        stride of one; ``"rows"`` for inputs of fewer channels still, and on a GPU mostly;
        ``"unfold"`` for maps so small that there is nothing to share.
    """
    first, *others = candidates(geometry, processor)
    if not others:
        return first
    return min((first, *others), key=lambda path: seconds(path, geometry, processor, planes=planes))


def seconds(
    path: Path, geometry: Geometry, processor: Processor = ONE_THREAD, *, planes: bool = True
) -> float:
    """Predict the time of a path.

    Args:
        path: One of `candidates`, but for ``"pointwise"``.
        geometry: The geometry.
        processor: What multiplies.
        planes: As for `choose`.

    Returns:
        Seconds, on the machine where the constants were measured.
    """
    if processor.gpu:
        return _on_gpu(path, geometry)
    threads, wide = processor.threads, processor.wide
    rows, columns, batch = geometry.rows, geometry.columns, geometry.batch
    channels, groups = geometry.channels, geometry.groups
    # Threads share rows, however narrow these are; of such batches there are no faster products.
    by_row = path != "unfold" and rowwise.serves(geometry)
    product = partial(
        _product, groups=groups, threads=threads, by_row=by_row, faster=wide and not by_row
    )
    if path == "unfold":
        copied = geometry.positions * geometry.features * groups
        return WRITTEN_OUT * copied * READ + product(geometry.positions, geometry.features) / 2
    if path == "rows":
        width = columns.kernel * channels
        copied = rows.size * columns.out * batch * width * groups
        counts = [s.count * columns.out for s in segments(rows) if s.other <= 0]
        copy = _copy(channels)
        return SIDE_BY_SIDE * copied * copy + sum(product(batch * n, width) for n in counts)
    copied = rows.size * columns.size * batch * channels * groups
    if path == "correlation":
        return _correlation(geometry, copied, threads, wide)
    if path == "fourier":
        return _fourier(geometry, copied, threads) + (0.0 if planes else copied * MOVE)
    counts = [
        r.count * c.count
        for r in segments(rows)
        for c in segments(columns)
        if (r.other, c.other) <= (0, 0)
    ]
    copies = 2 if by_row else 1 + len({s.shift for s in segments(columns)})
    copy = copied * copies * _copy(channels * groups)
    return copy + sum(product(batch * n, channels) for n in counts)


def _on_gpu(path: Path, geometry: Geometry) -> float:
    """Predict ``"rows"`` and ``"unfold"`` there: launches, what is written out, and products."""
    rows, columns, batch = geometry.rows, geometry.columns, geometry.batch
    channels, groups = geometry.channels, geometry.groups
    if path == "unfold":
        start, each = GPU_UNFOLD
        elements = float(geometry.positions * geometry.features * groups)
        multiplied = geometry.features * GPU_MULTIPLY_ADD
        return start + each * batch + elements * (GPU_SCATTERED + multiplied)
    start, each = GPU_ROWS
    counts = [s.count * columns.out for s in segments(rows) if s.other <= 0]
    width = columns.kernel * channels
    copied = float(rows.size * columns.out * batch * width * groups)
    multiplied = float(sum(counts) * batch * width**2 * groups)
    apart = 1.5 if groups > 1 else 1.0  # the groups of an image are copied apart
    return start + apart * each * len(counts) + copied * GPU_READ + multiplied * GPU_MULTIPLY_ADD


def _correlation(geometry: Geometry, copied: int, threads: int, wide: bool) -> float:
    """Predict `soframe.kernels.correlation`: the convolution, and the strips around it."""
    rows, columns, batch = geometry.rows, geometry.columns, geometry.batch
    channels, groups = geometry.channels, geometry.groups
    (top, bottom), (left, right) = correlation.core(rows), correlation.core(columns)
    above, beside = rows.size - (bottom - top), columns.size - (right - left)
    line = columns.kernel * channels
    width = max(channels, VECTORS)
    distances = rows.kernel * (2 * columns.kernel - 1)
    core = batch * (bottom - top) * (right - left)
    convolution = distances * core * width * channels * float(groups)
    convolution *= WIDE_CONVOLUTION if wide and groups == 1 else CONVOLUTION
    convolution /= threads if groups == 1 else 1
    strips = above * columns.out * batch * line**2 * rows.kernel
    strips += beside * (bottom - top) * batch * line * channels * rows.kernel
    gathered = (above + rows.kernel) * columns.out * batch * line
    calls = 20 + above * (4 + rows.kernel) + beside * (4 + columns.kernel + rows.kernel)
    calls += 3 * core // correlation.CHUNK
    return (
        convolution
        + strips * groups * MULTIPLY_ADD / 1.5
        + (3 * copied + 2 * gathered * groups) * _copy(channels * groups)
        + calls * CALL
    )


def _fourier(geometry: Geometry, copied: int, threads: int) -> float:
    """Predict `soframe.kernels.fourier`: transforms, products of channels, and calls."""
    rows, columns, channels = geometry.rows, geometry.columns, geometry.channels
    high, wide = (axis.size + axis.reach for axis in (rows, columns))
    half = wide // 2 + 1
    lines = geometry.batch * channels * rows.size
    transforms = copied * 2.0 * half + lines * 4.0 * half * high
    squares = float(half * high * channels**2)
    lags = rows.kernel * columns.kernel + (rows.kernel - 1) * (columns.kernel - 1)
    products = squares * (3.0 * geometry.batch + 2 * SKINNY * lags)
    multiplied = (products + fourier.border_work(geometry)) * MULTIPLY_ADD
    moved = (WRITTEN_TWICE * squares + geometry.features**2) * READ
    # Threads wait for memory, and share transforms less well than products.
    transforms *= SKINNY * MULTIPLY_ADD / math.sqrt(threads)
    return transforms + (multiplied + moved) / threads + FOURIER_CALLS * CALL


def _product(
    length: int, size: int, groups: int, threads: int, by_row: bool, faster: bool
) -> float:
    """Predict ``[size, length] @ [length, size]`` for all groups."""
    if size == 1 < groups:
        return CALL + length * groups * 2 * READ
    rate = MULTIPLY_ADD / (FASTER if faster and groups == 1 else 1)
    shared = groups * (length * max(size, NARROW) ** 2 * rate + length * size * READ)
    # The groups of an image are copied apart.
    apart = 2 * length * size * groups * _copy(size) if groups > 1 else 0.0
    return CALL + apart + shared / (threads if by_row or size >= WIDE else 1)


def _copy(size: int) -> float:
    """Return the time of copying an element, as one of so many that lie together."""
    return READ if size > NARROW else MOVE
