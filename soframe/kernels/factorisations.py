"""Factorisations of batches of matrices, in the way that is fastest on a GPU.

Measured on an H200 with torch 2.11 for CUDA 13.0.

For a QR decomposition Householder's reflections are a long sequence of small kernels, of one matrix
after the other. With ``X^T X = R^T R`` by Cholesky, ``Q = X R^-1`` takes three batched calls, and
loses as many digits as ``X^T X`` has: so columns are scaled first, the first pass is shifted, and
two more follow (Fukaya et al., 2020, shifted CholeskyQR3). This is orthogonal up to condition
numbers of 1e12. In float64 it takes no longer than in float32 on GPUs that have tensor cores for
it, and depends on no setting for TF32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soframe.kernels import devices

ALONE = 2304
"""Above this side cuSOLVER's batched Cholesky takes longer than one matrix after the other."""
JACOBI = 512
"""Up to this side torch decomposes float32 by Jacobi rotations, for 3 times as long as float64."""
FEW = 128
"""Up to this side they are as fast."""


def cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower factors of ``[groups, n, n]``, and ``[groups]`` errors, zero for none."""
    if matrices.shape[-1] <= ALONE or not devices.on_gpu(matrices):
        lower, info = torch.linalg.cholesky_ex(matrices)
        return lower, info
    lower, info = zip(*map(torch.linalg.cholesky_ex, matrices.split(1)), strict=True)
    return torch.cat(lower), torch.cat(info)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues ``[groups, n]``, ascending, and eigenvectors ``[groups, n, n]``."""
    dtype, between = matrices.dtype, FEW < matrices.shape[-1] <= JACOBI
    if dtype == torch.float32 and between and devices.fast_double(matrices.device):
        matrices = matrices.double()
    values, vectors = torch.linalg.eigh(matrices)
    return values.to(dtype), vectors.to(dtype)


def half_inverse(lower: Tensor, eye: Tensor) -> Tensor:
    """Return half the inverse of ``L L^T``, given L, ``[groups, n, n]``, and the identity.

    Where float64 is fast L should be float64: these products depend on settings for TF32.
    """
    if devices.fast_double(lower.device):
        root = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
        return torch.baddbmm(root, root.mT, root, beta=0, alpha=0.5)
    inverse: Tensor = torch.cholesky_inverse(lower)
    return inverse.mT / 2


def orthonormal(matrix: Tensor) -> Tensor:
    """Return Q of ``matrix = Q R``, ``[groups, n, n]``, up to the signs of columns.

    On a GPU groups that fail are NaN.
    """
    if not devices.fast_double(matrix.device):
        reflected: Tensor = torch.linalg.qr(matrix)[0]
        return reflected
    return torch.cat(list(map(_by_cholesky, devices.batches(matrix))))


def _by_cholesky(matrix: Tensor) -> Tensor:
    size, columns, infos = matrix.shape[-1], matrix.double(), []
    norms = torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    # A factor of zeros, as before the first gradient, gives the identity, as Householder's does.
    eye = torch.eye(size, dtype=columns.dtype, device=columns.device)
    columns = torch.where(norms == 0, eye, columns / norms)
    for step in range(3):
        gram = columns.mT @ columns
        if step == 0:  # by more than its rounding
            gram.diagonal(dim1=-2, dim2=-1).add_(10 * size * torch.finfo(gram.dtype).eps)
        lower, info = torch.linalg.cholesky_ex(gram)
        columns = torch.linalg.solve_triangular(lower.mT, columns, upper=True, left=False)
        infos.append(info)
    failed = torch.stack(infos).any(0)[:, None, None]
    return columns.masked_fill_(failed, math.nan).to(matrix.dtype)
