"""Packed triangles: a symmetric matrix as half its elements, without index tensors.

The lower triangle of an n x n matrix is folded into a rectangle (rectangular full packed format:
Gustavson et al., 2010): the trailing triangle fills the unused corner above the leading columns.
So packing is two block copies, where an index tensor would take four times the packed memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(n: int) -> int:
    """Return the elements of the lower triangle of an n x n matrix."""
    return n * (n + 1) // 2


def pack_triangle(matrix: Tensor) -> Tensor:
    """Return the lower triangle of symmetric matrices.

    Args:
        matrix: ``[..., n, n]``; only the lower triangle is read.

    Returns:
        ``[..., n (n + 1) / 2]``.
    """
    n = matrix.shape[-1]
    half, odd = n // 2, n % 2
    leading, trailing = matrix[..., : half + odd], matrix[..., half + odd :, half + odd :]
    # An even n needs one more row, which makes room for the trailing diagonal.
    rows = matrix.new_empty((*matrix.shape[:-2], n + 1 - odd, half + odd))
    rows[..., 1 - odd :, :] = leading
    corner = rows[..., :half, odd:]
    corner.copy_(torch.where(_upper(half, matrix), trailing.mT, corner))
    return rows.flatten(-2)


def unpack_triangle(packed: Tensor, n: int) -> Tensor:
    """Undo `pack_triangle`.

    Args:
        packed: ``[..., n (n + 1) / 2]``.
        n: The size of the matrices.

    Returns:
        ``[..., n, n]``, both triangles filled.
    """
    half, odd = n // 2, n % 2
    rows = packed.unflatten(-1, (n + 1 - odd, half + odd))
    matrix = packed.new_zeros((*packed.shape[:-1], n, n))
    matrix[..., : half + odd] = rows[..., 1 - odd :, :]
    corner = rows[..., :half, odd:]
    upper = _upper(half, packed)
    matrix[..., half + odd :, half + odd :] = torch.where(upper, corner, 0).mT
    lower = matrix.tril()
    return lower + lower.tril(-1).mT


def _upper(n: int, like: Tensor) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=like.device).triu()
