"""Device helpers: is a tensor on an accelerator, and copies that the host does not wait for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2**27  # numbers of a batch
_LARGE = 32_000_000  # bytes, just below the 32 MiB from which glibc keeps its threshold


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


@functools.cache
def fast_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def keep_memory() -> None:
    """Let the C library keep the memory that a step frees for the next step.

    glibc returns free memory to the system beyond twice the largest block that it has seen freed,
    and requests it again page by page: up to a third of a step on a processor.
    """
    torch.UntypedStorage(_LARGE, device="cpu")


def on_host(x: Tensor) -> Tensor:
    """Return a tensor in the host's memory; from a CUDA device the copy may be under way.

    Its stream's later work finds it there; the host itself does not, unless it waits.
    """
    return x.to("cpu", non_blocking=x.is_cuda)  # pinned, for CUDA


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; a tensor that is there stays."""
    return x.to(device, non_blocking=device.type == "cuda")


class Reading:
    """Numbers ``[n]`` on their way from a device to the host.

    The host waits for the work before them on the device, and not for later work.
    """

    def __init__(self, numbers: Tensor) -> None:
        # CUDA's copy to pinned memory returns at once; other devices' copies are waited for.
        self._here = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def numbers(self) -> list[float]:
        """Wait for the numbers, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._here.tolist()
        return values


def sent(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return the host's numbers in the dtype and on the device of a tensor, without waiting."""
    here = torch.tensor(numbers, dtype=like.dtype, device="cpu")
    # CUDA reads pageable memory before the call returns, so it may be freed at once.
    return here.to(like.device, non_blocking=like.is_cuda)


def along_first(numbers: Tensor, like: Tensor) -> Tensor:
    """Return a view of ``[n]`` with as many dimensions as a tensor ``[n, ...]``."""
    return numbers.view(-1, *[1] * (like.dim() - 1))
