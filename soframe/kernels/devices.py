"""Device helpers: is a tensor on an accelerator, and asynchronous copies from the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on an accelerator, where launches count rather than copies."""
    return x.device.type != "cpu"


@functools.cache
def fast_double(device: torch.device) -> bool:
    """Return whether a GPU has tensor cores for float64: NVIDIA's A100, H100, H200, B200."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in {(8, 0), (9, 0), (10, 0)}


def sent(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return the host's numbers in the dtype and on the device of a tensor, without waiting."""
    here = torch.tensor(numbers, dtype=like.dtype, device="cpu")
    # CUDA reads pageable memory before the call returns, so it may be freed at once.
    return here.to(like.device, non_blocking=like.is_cuda)
