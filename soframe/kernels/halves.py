"""Half precision: products of rows, as autocast leaves them, and rounding of states.

Products are summed in single precision. They are exact before they are summed: see `widens`. The
plain twin is a product of copies.
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


def dithered(values: Tensor, dtype: torch.dtype, period: int, turn: int) -> Tensor:
    """Round to bfloat16 up or down, so that the errors of many turns cancel; else convert.

    A slow average moves by less than a step of bfloat16, so rounded to nearest it would stand
    still. The threshold of an element runs through a Weyl sequence over turns. It depends on the
    element's index modulo ``period`` alone: blocks round alike in any stack, on any rank.
    """
    if dtype != torch.bfloat16 or values.dtype == dtype:
        return values.to(dtype)
    single = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    noise = torch.arange(period, dtype=torch.int32, device=values.device).bitwise_and_(0xFFFF)
    noise.mul_(30_011).add_(40_503 * turn & 0xFFFF).bitwise_and_(0xFFFF)
    # The upper half of the bits is bfloat16; the noise carries into it as often as it should.
    single.view(torch.int32).view(-1, period).add_(noise).bitwise_and_(-(2**16))
    return torch.where(values.isfinite(), single, values).to(dtype)


def add_inner(total: Tensor, left: Tensor, right: Tensor, scale: float, beta: float) -> None:
    """Write ``beta total + scale left^T right`` to ``[m, n]``, of rows of half precision."""
    if left.is_cuda and torch.version.hip is None:  # torch has ``out_dtype`` for CUDA only
        kind = total.dtype
        torch.addmm(total, left.T, right, kind, beta=beta, alpha=scale, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype), beta=beta, alpha=scale)
