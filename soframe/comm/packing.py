"""Packed triangles: a symmetric matrix as half its elements, without index tensors.

The lower triangle of an n x n matrix is folded into a rectangle (rectangular full packed format:
Gustavson et al., 2010): the trailing triangle fills the unused corner above the leading columns.
So packing is block copies, where an index tensor would take four times the packed memory. Only
blocks on a diagonal need a mask; all others are copied as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""The rows that share a mask: their transposes stay in the cache."""


def packed_size(n: int) -> int:
    """Return the elements of the lower triangle of an n x n matrix."""
    return n * (n + 1) // 2


def pack_triangle(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the lower triangles of ``[..., n, n]``, the only part read: ``[..., n (n + 1) / 2]``.

    ``out`` is contiguous, with as many elements, of any dtype; None for a new tensor.
    """
    *leading, n, _ = matrix.shape
    if out is None:
        out = matrix.new_empty((*leading, packed_size(n)))
    edge, corner = _fold(out.view(*leading, packed_size(n)), n)
    half = n - edge.shape[-1]
    edge.copy_(matrix[..., : n - half])
    trailing = matrix[..., n - half :, n - half :].to(out.dtype)
    for rows, rest in _blocks(half):
        diagonal = corner[..., rows, rows]
        diagonal.copy_(torch.where(_upper(diagonal), trailing[..., rows, rows].mT, diagonal))
        corner[..., rows, rest] = trailing[..., rest, rows].mT
    return out.view(*leading, packed_size(n))


def unpack_triangle(packed: Tensor, n: int) -> Tensor:
    """Undo `pack_triangle`: ``[..., n (n + 1) / 2]`` to symmetric matrices ``[..., n, n]``."""
    matrix = packed.new_empty((*packed.shape[:-1], n, n))
    edge, corner = _fold(packed, n)
    half = n - edge.shape[-1]
    first, last = slice(n - half), slice(n - half, n)
    matrix[..., last, first] = edge[..., last, :]
    matrix[..., first, last] = edge[..., last, :].mT
    _mirror(matrix[..., first, first], edge[..., first, :])
    _mirror(matrix[..., last, last], corner.mT)
    return matrix


def packed_diagonal(packed: Tensor, n: int) -> Tensor:
    """Return the diagonal ``[..., n]`` of packed matrices ``[..., n (n + 1) / 2]``."""
    edge, corner = _fold(packed, n)
    diagonals = (edge.diagonal(dim1=-2, dim2=-1), corner.diagonal(dim1=-2, dim2=-1))
    return torch.cat(diagonals, dim=-1)


def _fold(packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the parts of the rectangle ``[..., n (n + 1) / 2]``, as views.

    The leading columns ``[..., n, n - n // 2]``, whose upper triangle belongs to the other part;
    and the trailing triangle ``[..., n // 2, n // 2]``, transposed, without its lower one.
    """
    half, odd = n // 2, n % 2
    # An even n needs one more row, which makes room for the trailing diagonal.
    rows = packed.unflatten(-1, (n + 1 - odd, half + odd))
    return rows[..., 1 - odd :, :], rows[..., :half, odd:]


def _mirror(matrix: Tensor, lower: Tensor) -> None:
    """Fill symmetric matrices from their lower triangles; the upper ones are not read."""
    for rows, rest in _blocks(lower.shape[-1]):
        diagonal = lower[..., rows, rows]
        matrix[..., rows, rows] = torch.where(_upper(diagonal), diagonal.mT, diagonal)
        matrix[..., rest, rows] = lower[..., rest, rows]
        matrix[..., rows, rest] = lower[..., rest, rows].mT


def _blocks(n: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each block on the diagonal, and the rows below it."""
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        yield slice(start, end), slice(end, n)


def _upper(like: Tensor) -> Tensor:
    return torch.ones(like.shape[-2:], dtype=torch.bool, device=like.device).triu()
