"""Denormal numbers: many processors compute with them in microcode, far slower.

Saturated units may give factors with entries near zero, whose eigenvectors and products are full of
denormals. torch can flush them to zero for good; here that is done for soframe's own arithmetic and
undone afterwards, so that a user's code computes what it always did.

The mode is a thread's own, and a new thread has that of its maker. So torch's threads are started
before: else they would keep it for good. They stay in the user's mode, and what they compute of
soframe's arithmetic is not flushed; who wants that calls ``torch.set_flush_denormal(True)`` first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

GRAIN = 2**15  # numbers that torch gives to one thread at least
_ours = threading.local()


def are_flushed() -> bool:
    """Return whether this thread flushes denormals now: torch has a setter only."""
    smallest_normal = torch.tensor(torch.finfo(torch.float32).tiny, device="cpu")
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
    _start_threads(torch.get_num_threads())
    torch.set_flush_denormal(True)
    _ours.flushed = True
    try:
        yield
    finally:
        _ours.flushed = False
        torch.set_flush_denormal(False)


@contextmanager
def users_mode() -> Iterator[None]:
    """Within `flushed_denormals`, compute as outside of it: for code that is the user's.

    Yields:
        Nothing.
    """
    if not getattr(_ours, "flushed", False):
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)


@lru_cache(maxsize=8)
def _start_threads(number: int) -> None:
    torch.ones(number * GRAIN, device="cpu").add_(1)
