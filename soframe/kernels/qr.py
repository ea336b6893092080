"""The orthogonal factor of a QR decomposition, by Householder reflections or by Cholesky.

Householder's reflections are a long sequence of small kernels, of one matrix after the other. With
``X^T X = R^T R`` by Cholesky, ``Q = X R^-1`` takes three batched calls, and loses as many digits as
``X^T X`` has: so columns are scaled first, the first pass is shifted, and two more follow
(Fukaya et al., 2020, shifted CholeskyQR3). This is orthogonal up to condition numbers of 1e12. In
float64 it takes no longer than in float32 on GPUs that have tensor cores for it, and depends on no
setting for TF32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soframe.kernels import devices


def orthonormal(matrix: Tensor) -> Tensor:
    """Return Q of ``matrix = Q R``, ``[groups, n, n]``, up to the signs of columns.

    On a GPU groups that fail are NaN.
    """
    if not devices.fast_double(matrix.device):
        reflected: Tensor = torch.linalg.qr(matrix)[0]
        return reflected
    return torch.cat([_by_cholesky(part) for part in devices.batches(matrix)])


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
