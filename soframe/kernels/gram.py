"""Sums of outer products, added in place to the lower triangle of a running sum.

Cholesky factorisations, eigendecompositions and packing read one triangle; `mirror` fills the
other one. A large product is done by blocks of columns, each against the columns up to its own: for
little more than half the arithmetic, with no matrix other than the sum.

``beta`` is torch's: 1 adds to a sum, 0 writes to uninitialised memory.
On an accelerator launches dominate, so blocks are few, and images are multiplied all at once:
torch multiplies the images of a batch into one matrix one after the other there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from soframe.kernels import devices, halves

# Blocks of columns by the size of the matrix: 1, 2, 4 and 8 from these sizes on. Narrow blocks
# waste less of the upper triangle, wide ones use the processor better.
BLOCKS = (0, 128, 256, 896)
SMALL = BLOCKS[1]
ONE_PRODUCT = 10_000  # numbers of narrow rows, which one product multiplies sooner than two
# 1, 2 and 4 blocks on an accelerator, where a launch takes as long as tensor cores save below.
GPU_BLOCKS = (0, 1280, 3072)
ALIGNMENT = 64  # bytes
HUGE = 2**20  # numbers; larger sums gain from huge pages
TILE = 256  # of `mirror`: both tiles of a transposed copy stay in the cache


def widened(rows: Tensor) -> Tensor:
    """Return a tensor in the accumulation dtype of rows: float32 for half precision."""
    return rows if rows.dtype.itemsize >= 4 else rows.new_empty(0, dtype=torch.float32)


def new_sum(groups: int, size: int, like: Tensor, *, zero: bool) -> Tensor:
    """Return ``[groups, size, size]`` in the dtype and on the device of ``like``.

    Zeros, or without ``zero`` uninitialised memory, to be written with ``beta=0``.
    """
    count, name = groups * size * size, str(like.dtype).removeprefix("torch.")
    is_huge = count >= HUGE and name in ("float32", "float64")
    if not is_huge or devices.on_gpu(like):
        new = like.new_zeros if zero else like.new_empty
        return new(groups, size, size)
    # NumPy's allocator uses huge pages; its zeros come from the system and are not written.
    # Its memory is aligned here as torch's is: products into other memory take up to a quarter
    # longer.
    allocate = np.zeros if zero else np.empty
    memory = allocate(count + ALIGNMENT // like.element_size(), name)
    skipped = -memory.ctypes.data % ALIGNMENT // like.element_size()
    return torch.from_numpy(memory)[skipped : skipped + count].view(groups, size, size)


@lru_cache(maxsize=256)
def column_blocks(size: int, *, gpu: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the column blocks of a symmetric product, in order."""
    bounds = GPU_BLOCKS if gpu else BLOCKS
    number = 2 ** (bisect_right(bounds, size) - 1)
    edges = [size * i // number for i in range(number + 1)]
    return tuple(pairwise(edges))


def add(total: Tensor, product: Tensor, scale: float, beta: float) -> None:
    """Write ``beta total + scale product`` to ``total``; a ``beta`` of 0 ignores its numbers."""
    if beta == 0:
        torch.mul(product, scale, out=total)
    else:
        total.add_(product, alpha=scale)


@lru_cache(maxsize=256)
def takes_one_product(size: int, numbers: int) -> bool:
    """Return whether so many numbers of rows are multiplied at once, not by blocks of columns."""
    return size < SMALL or (size < BLOCKS[2] and numbers < ONE_PRODUCT)


def add_rows(total: Tensor, rows: Tensor, scale: float = 1.0, beta: float = 1.0) -> None:
    """Add ``scale rows^T rows`` to the lower triangle of ``[n, n]``, of rows ``[m, n]``.

    Entries above the diagonal are undefined afterwards. Rows of half precision are summed in the
    dtype of the total (`halves.widens`).
    """
    if rows.dtype != total.dtype:
        halves.add_inner(total, rows, rows, scale, beta)
        return
    size = rows.shape[1]
    if takes_one_product(size, rows.numel()):
        total.addmm_(rows.mT, rows, beta=beta, alpha=scale)
        return
    for start, stop in column_blocks(size, gpu=devices.on_gpu(rows)):
        left, right = rows[:, start:stop].mT, rows[:, :stop]
        total[start:stop, :stop].addmm_(left, right, beta=beta, alpha=scale)


def add_maps(total: Tensor, maps: Tensor, scale: float = 1.0, beta: float = 1.0) -> None:
    """Add ``scale sum_b maps[b] maps[b]^T``, of images ``[batch, n, positions]``."""
    batch, size, positions = maps.shape
    gpu = devices.on_gpu(maps)
    if size < SMALL or (gpu and size <= positions):
        products = torch.bmm(maps, maps.mT)
        if gpu and total.is_contiguous():  # by one operator: a product with ones
            flat, every = products.flatten(1).T, ones(batch, total.device, total.dtype)
            total.view(-1).addmv_(flat, every, beta=beta, alpha=scale)
        else:
            add(total, products.sum(0), scale, beta)
    elif gpu or positions < size:
        # Many short products into one large matrix: its memory traffic costs more than a copy, of
        # whole maps rather than of their transposes.
        rows = maps.transpose(0, 1).reshape(size, batch * positions).T
        add_rows(total, rows, scale, beta)
    else:
        for start, stop in column_blocks(size):
            left, right = maps[:, start:stop], maps[:, :stop].mT
            total[start:stop, :stop].addbmm_(left, right, beta=beta, alpha=scale)


def add_moment(total: Tensor | None, rows: Tensor, scale: float = 1.0, beta: float = 1.0) -> Tensor:
    """Add the outer products of ``[groups, batch, shared, n]`` to ``[groups, n, n]``.

    None makes a new sum. Rows that lie in memory like an image, channels first or last, are not
    copied.
    """
    groups, batch, shared, size = rows.shape
    if total is None:
        total, beta = new_sum(groups, size, widened(rows), zero=False), 0.0
    if groups > 1 and size < SMALL:
        if size == 1:
            add(total, rows.square().sum((1, 2, 3)).view(groups, 1, 1), scale, beta)
            return total
        flat = rows.flatten(1, 2)
        return total.baddbmm_(flat.mT, flat, beta=beta, alpha=scale)
    _, _, along, across = rows.stride()
    add_part: Callable[[Tensor, Tensor, float, float], None] = add_rows
    if across != 1 and along == 1 and rows.dtype == total.dtype:
        parts, add_part = rows.mT, add_maps
    else:
        parts = rows.reshape(groups, batch * shared, size)
    for group in range(groups):
        add_part(total.select(0, group), parts.select(0, group), scale, beta)
    return total


def add_squares(
    total: Tensor | None, rows: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Add the diagonals of `add_moment` to ``[groups, n]``; None makes a new tensor."""
    # Norms take no memory for the squares of rows as wide as a vocabulary.
    norms: Tensor = torch.linalg.vector_norm(rows, dim=(1, 2), dtype=dtype)
    squares = norms.square_().mul_(scale)
    return squares if total is None else total.add_(squares)


@lru_cache(maxsize=64)
def ones(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ones, ``[count]``, which must not be changed."""
    # A plan of a GPU, on the meta device, prices a step: these are made before it.
    with _disable_current_modes() if device.type == "meta" else nullcontext():
        return torch.ones(count, device=device, dtype=dtype)


def with_ones(rows: Tensor) -> Tensor:
    """Append a column of ones to ``[..., n]``."""
    if not devices.on_gpu(rows):
        return F.pad(rows, (0, 1), value=1.0)
    # Tensor cores multiply rows that begin at multiples of 16 bytes.
    size = rows.shape[-1]
    columns = ones(8 - size % 8, rows.device, rows.dtype).expand(*rows.shape[:-1], -1)
    return torch.cat([rows, columns], -1)[..., : size + 1]


def add_bias(
    total: Tensor, sums: Tensor, count: int, scale: float = 1.0, beta: float = 1.0
) -> None:
    """Add the bias's row of ``[groups, n + 1, n + 1]``: the sums of rows and their number."""
    add(total[:, -1, :-1], sums, scale, beta)
    corner = total[:, -1, -1]
    if beta == 0:
        corner.fill_(count * scale)
    else:
        corner.add_(count * scale)


def mirror(matrix: Tensor) -> Tensor:
    """Copy the lower triangles of ``[..., n, n]`` over the upper ones, in place; return it."""
    size = matrix.shape[-1]
    tile = max(size, 1) if devices.on_gpu(matrix) else TILE
    tiles = [slice(start, start + tile) for start in range(0, size, tile)]
    for number, rows in enumerate(tiles):
        corner = matrix[..., rows, rows].tril_()
        corner.add_(corner.tril(-1).mT)
        for columns in tiles[:number]:
            matrix[..., columns, rows] = matrix[..., rows, columns].mT
    return matrix
