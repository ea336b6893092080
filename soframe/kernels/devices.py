"""Device helpers: is a tensor on an accelerator, and copies that the host does not wait for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2**27  # numbers of a batch


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on an accelerator, where launches count rather than copies."""
    return x.device.type != "cpu"


def memory_of(x: Tensor) -> int:
    """Return a number that tensors share if they share memory."""
    # Not its address, which tensors of a plan do not have.
    number: int = x.untyped_storage()._cdata
    return number


def batches(matrices: Tensor) -> Sequence[Tensor]:
    """Split ``[groups, ...]`` so that work on copies takes a few gigabytes at once."""
    parts: Sequence[Tensor] = matrices.split(max(1, MOST // max(1, matrices[:1].numel())))
    return parts


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, and zeros for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def fast_double(device: torch.device) -> bool:
    """Return whether a GPU has tensor cores for float64: NVIDIA's A100, H100, H200, B200."""
    return capability(device) in {(8, 0), (9, 0), (10, 0)}


class Reading:
    """Numbers on their way from a device to the host.

    The host waits for the device's work before them, and not for the work behind.

    Args:
        numbers: A tensor, ``[n]``.
    """

    def __init__(self, numbers: Tensor) -> None:
        # Into pinned memory, so that the call returns at once.
        self._here = numbers.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def numbers(self) -> list[float]:
        """Wait for the numbers, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._here.tolist()
        return found


def sent(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return the host's numbers in the dtype and on the device of a tensor, without waiting."""
    here = torch.tensor(numbers, dtype=like.dtype, device="cpu")
    # CUDA reads pageable memory before the call returns, so it may be freed at once.
    return here.to(like.device, non_blocking=like.is_cuda)
