"""Products of rows of half precision, as autocast leaves them, summed in single precision.

They are exact before they are summed: see `widens`. The plain twin is a product of copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soframe.kernels import devices


def widens(rows: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rows of half precision are multiplied as they are, and summed in ``dtype``."""
    # A product of two such numbers has at most 22 bits, so that single precision does not round
    # it, and the tensor cores of an accelerator multiply them ten times faster and add up in it.
    half = rows.dtype in (torch.bfloat16, torch.float16)
    return half and dtype == torch.float32 and devices.on_gpu(rows)


def inner_in(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left^T right`` of ``[rows, m]`` and ``[rows, n]``, summed in another dtype."""
    if left.is_cuda and torch.version.hip is None:  # torch has ``out_dtype`` for CUDA only
        return torch.mm(left.T, right, out_dtype=dtype)
    return left.T.to(dtype) @ right.to(dtype)
