"""Sums of outer products, added in place to the lower triangle of a running sum.

Cholesky factorisations, eigendecompositions and packing read one triangle, and `mirror` fills the
other where somebody reads both. A large product is done in parts, for little more than half the
arithmetic, in one of three ways, of which `benchmarks/bench_kernels.py` times each:

- by blocks of columns, each against the columns up to its own, with no matrix besides the sum;
- by halves, which are wider, and which threads share better: with two of them 2048 rows of 1024
  columns take 21 ms instead of 27, of 768 columns 12 instead of 14, of 2048 columns 68 instead of
  78, and of 512 columns the same 5.5 (an AVX2 machine). One thread takes no less by halves;
- transposed, by blocks of lines, where `soframe.kernels.products` multiplies by other means than
  torch does.

On an accelerator launches count, so there are few blocks, and images are multiplied all at once:
torch multiplies the images of a batch into one matrix one after the other there.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from soframe.kernels import devices, halves, products

# Blocks of columns by the size of the matrix: 1, 2, 4 and 8 from these sizes on. Narrow blocks
# waste less of the upper triangle, wide ones use the processor better.
BLOCKS = (0, 128, 256, 896)
SMALL = BLOCKS[1]
GPU_BLOCKS = (0, 768, 1536)  # likewise 1, 2 and 4 on an accelerator
LEAST = 96  # columns of a half
TRANSPOSED = 2**20  # numbers that are transposed at once, about
LEAST_ROWS = 2048  # that are
APART = 128  # columns of a block of transposed rows, at most
ALIGNMENT = 64  # bytes
HUGE = 2**20  # numbers of a sum that huge pages pay for
TILE = 256  # of `mirror`: what a transposed copy reads and writes stays in the cache


def zeros(groups: int, size: int, like: Tensor) -> Tensor:
    """Return an empty sum.

    Args:
        groups: The leading dimension.
        size: The size of the matrices.
        like: Its dtype and device are those of the sum.

    Returns:
        ``[groups, size, size]``. Large ones on the CPU from NumPy's allocator: it gets zeros from
        the system, in huge pages where there are any, so that they are not written twice.
        They begin where vectors do, as torch's own do: products into others take up to a quarter
        longer.
    """
    if groups * size * size < HUGE or devices.on_gpu(like):
        return like.new_zeros(groups, size, size)
    name = str(like.dtype).removeprefix("torch.")
    if name not in ("float32", "float64"):
        return like.new_zeros(groups, size, size)
    memory = np.zeros(groups * size * size + ALIGNMENT // like.element_size(), name)
    skipped = -memory.ctypes.data % ALIGNMENT // like.element_size()
    flat = torch.from_numpy(memory)[skipped : skipped + groups * size * size]
    return flat.view(groups, size, size)


def column_blocks(size: int, *, gpu: bool = False) -> list[tuple[int, int]]:
    """Return the column blocks of a symmetric product.

    Args:
        size: The size of the matrix.
        gpu: Whether it is on an accelerator.

    Returns:
        Their ranges, in order.
    """
    number = 2 ** (sum(size >= bound for bound in (GPU_BLOCKS if gpu else BLOCKS)) - 1)
    edges = [size * i // number for i in range(number + 1)]
    return list(pairwise(edges))


def halvings(size: int) -> int:
    """Return how often a matrix is halved: until halves are odd or have fewer than `LEAST` columns.

    Args:
        size: The size of the matrix.
    """
    number = 0
    while size % 2 == 0 and size >= 2 * LEAST:
        size, number = size // 2, number + 1
    return number if size < 2 * LEAST else 0


def add_rows(total: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """Add ``scale rows^T rows`` to the lower triangle.

    Args:
        total: ``[n, n]``, changed in place; what is above the diagonal is undefined afterwards.
        rows: ``[m, n]``; of half precision where `halves.widens` says so.
        scale: The multiplier.
    """
    if rows.dtype != total.dtype:
        total.add_(halves.inner_in(rows, rows, total.dtype), alpha=scale)
        return
    if products.pays(rows, rows):
        if rows.shape[1] > SMALL:
            for part in rows.split(_at_once(rows.shape[1])):
                add_by_lines(total, part.T.contiguous(), scale)
        else:
            products.add_inner(total, rows, rows, scale)
        return
    shared = torch.get_num_threads() > 1 and not devices.on_gpu(rows)
    shared = shared and rows.shape[1] >= 4 * SMALL
    way = add_by_halves if shared and halvings(rows.shape[1]) else add_by_columns
    way(total, rows, scale)


def add_by_halves(total: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """Do the same: the second half of the columns against the first, and so within each half.

    Args:
        total: See `add_rows`.
        rows: ``[m, n]``, where `halvings` of ``n`` is not 0.
        scale: The multiplier.
    """
    size, number = rows.shape[1], halvings(rows.shape[1])
    down, right = total.stride()
    for level in range(number + 1):
        count = 2**level
        width = size // count
        if level == number:  # what is left on the diagonal
            by_part = rows.unflatten(1, (count, width)).permute(1, 0, 2)
            first, second, offset = by_part, by_part, 0
        else:
            width //= 2
            halves = rows.unflatten(1, (count, 2, width)).permute(1, 2, 0, 3)
            first, second, offset = halves[:, 0], halves[:, 1], width * down
        step = size // count * (down + right)
        begin = total.storage_offset() + offset
        blocks = total.as_strided((count, width, width), (step, down, right), begin)
        if count == 1:
            blocks[0].addmm_(second[0].T, first[0], alpha=scale)
        else:
            blocks.add_(torch.bmm(second.mT, first), alpha=scale)


def _at_once(size: int) -> int:
    """Return how many rows are transposed at once: copies of all would be as large as they are."""
    return max(LEAST_ROWS, TRANSPOSED // size)


def add_by_lines(total: Tensor, lines: Tensor, scale: float = 1.0) -> None:
    """Do the same from transposed rows: each block of columns against what is not above it.

    Args:
        total: See `add_rows`.
        lines: ``[n, m]``.
        scale: The multiplier.
    """
    size = len(lines)
    number = -(-size // APART)
    for start, stop in pairwise(size * i // number for i in range(number + 1)):
        block = products.times(lines[start:], lines[start:stop].T)
        total[start:, start:stop].add_(block, alpha=scale)


def add_by_columns(total: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """Do the same by blocks of columns.

    Args:
        total: See `add_rows`.
        rows: ``[m, n]``.
        scale: The multiplier.
    """
    if rows.shape[1] < SMALL:  # one block
        total.addmm_(rows.T, rows, alpha=scale)
        return
    for start, stop in column_blocks(rows.shape[1], gpu=devices.on_gpu(rows)):
        left, right = rows[:, start:stop].T, rows[:, :stop]
        total[start:stop, :stop].addmm_(left, right, alpha=scale)


def add_maps(total: Tensor, maps: Tensor, scale: float = 1.0) -> None:
    """Add ``scale sum_b maps[b] maps[b]^T`` to the lower triangle: images, channels first.

    Args:
        total: ``[n, n]``, as for `add_rows`.
        maps: ``[batch, n, positions]``.
        scale: The multiplier.
    """
    batch, size, positions = maps.shape
    if size >= SMALL and products.serves(maps, batch * positions * size**2):
        for part in maps.split(max(1, _at_once(size) // positions)):
            add_by_lines(total, part.transpose(0, 1).reshape(size, -1), scale)
    elif size < SMALL or (devices.on_gpu(maps) and size <= positions):
        total.add_(torch.bmm(maps, maps.mT).sum(0), alpha=scale)
    elif positions < size or devices.on_gpu(maps):
        # Many short products into one large matrix: its memory traffic costs more than a copy, of
        # whole maps rather than of their transposes.
        add_rows(total, maps.transpose(0, 1).reshape(size, batch * positions).T, scale)
    else:
        for start, stop in column_blocks(size):
            left, right = maps[:, start:stop], maps[:, :stop].mT
            total[start:stop, :stop].addbmm_(left, right, alpha=scale)


def add_moment(total: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """Add ``scale`` times the sum of the outer products of rows to the lower triangles.

    Rows that lie in memory like an image, channels first or last, are not copied.

    Args:
        total: ``[groups, n, n]``, as for `add_rows`.
        rows: ``[groups, batch, shared, n]``; of half precision, with one group, where
            `halves.widens` says so.
        scale: The multiplier.
    """
    groups, batch, shared, size = rows.shape
    if groups > 1 and size < SMALL:
        if size == 1:
            total.add_(rows.square().sum((1, 2, 3)).view(groups, 1, 1), alpha=scale)
            return
        flat = rows.flatten(1, 2)
        total.baddbmm_(flat.mT, flat, alpha=scale)
        return
    for group in range(groups):
        moment, part = total[group], rows[group]
        if part.stride(2) != 1 and part.stride(1) == 1 and part.dtype == total.dtype:
            add_maps(moment, part.mT, scale)
        else:
            add_rows(moment, part.reshape(batch * shared, size), scale)


def add_bias(total: Tensor, sums: Tensor, count: int, scale: float = 1.0) -> None:
    """Add what an input of one has in common with the others, and with itself, as the last row.

    Args:
        total: ``[groups, n + 1, n + 1]``.
        sums: ``[groups, n]``, the sums of the rows.
        count: The number of rows.
        scale: The multiplier.
    """
    total[:, -1, :-1].add_(sums, alpha=scale)
    total[:, -1, -1].add_(count * scale)


def mirror(matrix: Tensor) -> Tensor:
    """Copy the lower triangle over the upper one, in place.

    Args:
        matrix: ``[..., n, n]``.

    Returns:
        The same tensor, symmetric to the last bit.
    """
    size = matrix.shape[-1]
    tile = max(size, 1) if devices.on_gpu(matrix) else TILE
    tiles = [slice(start, start + tile) for start in range(0, size, tile)]
    for number, rows in enumerate(tiles):
        corner = matrix[..., rows, rows].tril_()
        corner.add_(corner.tril(-1).mT)
        for columns in tiles[:number]:
            matrix[..., columns, rows] = matrix[..., rows, columns].mT
    return matrix
