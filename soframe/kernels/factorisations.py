"""Factorisations of batches of matrices, in the way that is fastest on a GPU.

Measured on an H200 with torch 2.11 for CUDA 13.0.
"""

from __future__ import annotations

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
    parts = [matrices]
    if devices.on_gpu(matrices) and matrices.shape[-1] > ALONE:
        parts = list(matrices.split(1))
    lower, info = zip(*map(torch.linalg.cholesky_ex, parts), strict=True)
    return (lower[0], info[0]) if len(parts) == 1 else (torch.cat(lower), torch.cat(info))


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
