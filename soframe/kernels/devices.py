"""Where a tensor is: what is fast there, and what the host need not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on an accelerator, where other ways are fast than on the CPU.

    Args:
        x: An operand.
    """
    return x.device.type != "cpu"


def sent(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return the host's numbers where a tensor is, in its dtype; the host does not wait for that.

    Args:
        numbers: The numbers.
        like: The tensor.
    """
    here = torch.tensor(numbers, dtype=like.dtype, device="cpu")
    # CUDA has read what is not pinned when the call returns, so that nobody can change it.
    return here.to(like.device, non_blocking=like.is_cuda)
