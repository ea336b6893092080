"""Products of rows of half precision, as autocast leaves them, summed in single precision.

They are exact before they are summed: see `widens`. The plain twin is a product of copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soframe.kernels import devices


def widens(rows: Tensor, dtype: torch.dtype) -> bool:
    """Return whether products of rows of half precision pay, and are as exact as of their copies.

    A product of two such numbers has at most 22 bits, so that single precision does not round it,
    and the tensor cores of an accelerator multiply them ten times faster and add up in it.

    Args:
        rows: The rows.
        dtype: What they are summed in.
    """
    half = rows.dtype in (torch.bfloat16, torch.float16)
    return half and dtype == torch.float32 and devices.on_gpu(rows)


def inner_in(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left^T right`` of rows of half precision, summed in another dtype: see `widens`.

    Args:
        left: ``[rows, m]``.
        right: ``[rows, n]``.
        dtype: The dtype.

    Returns:
        ``[m, n]``.
    """
    if left.is_cuda and torch.version.hip is None:  # which torch has such products for
        return torch.mm(left.T, right, out_dtype=dtype)
    return left.T.to(dtype) @ right.to(dtype)
