"""Denormal numbers: arithmetic on them is up to a hundred times slower on CPUs.

Saturated units give factors with entries near zero, whose eigenvectors and products are full of
denormals. torch can flush them to zero, per process and for good; here that is done for soframe's
own arithmetic and undone afterwards, so that a user's code computes what it always did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def are_flushed() -> bool:
    """Return whether this thread flushes denormals now: torch has a setter only."""
    smallest_normal = torch.tensor(torch.finfo(torch.float32).tiny)
    return bool(smallest_normal * 0.5 == 0)


@contextmanager
def flushed_denormals(active: bool = True) -> Iterator[None]:
    """Flush denormals within this context.

    Args:
        active: Whether to do anything.

    Yields:
        Nothing.
    """
    if not active or are_flushed():
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
