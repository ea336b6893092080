"""Memory for what a kernel needs on its way, kept for the next one.

What is new at every call costs its page faults: as much as writing to it, for copies of an image.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT = 2**23
"""Elements of memory that a thread keeps at most, of each dtype."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.flat: dict[torch.dtype, Tensor] = {}


_kept = _Kept()


def memory(like: Tensor, *shapes: Sequence[int]) -> list[Tensor]:
    """Return tensors without numbers, whose memory the next call on this thread may return again.

    Args:
        like: Its dtype and device are theirs.
        shapes: Their shapes.

    Returns:
        Contiguous tensors; in memory of their own where they are not on the CPU, or too large.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if like.device.type != "cpu" or sum(sizes) > KEPT:
        return [like.new_empty(shape) for shape in shapes]
    flat = _kept.flat.get(like.dtype)
    if flat is None or len(flat) < sum(sizes):
        flat = _kept.flat[like.dtype] = like.new_empty(sum(sizes))
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
