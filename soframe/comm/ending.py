"""Interpreter exit while, or just after, a collective runs.

Gloo runs collectives in threads. Such a thread drops the ``Work`` of a collective a moment after it
has signalled completion. If Python has dropped it before, the thread frees the tensors, needs the
GIL for it, and aborts the process if the interpreter is ending (``terminate called without an
active exception``, https://github.com/pytorch/pytorch/issues/190489).

So a work is held here until it has been waited for, and works still running at exit are held for
ever. A finished work is dropped at once, since it holds its buffer; its thread needs some
microseconds more, for which the exit waits.
"""

from __future__ import annotations

import atexit
import ctypes
import time

import torch.distributed as dist

PAUSE = 0.1
"""Seconds that the exit waits for threads, if a collective ended just before."""

RECENT = 1.0
"""Seconds before the exit that count as just before."""


class Works:
    """The works under way."""

    def __init__(self) -> None:
        self._under_way: dict[int, dist.Work] = {}
        self._last_end = -RECENT

    def begin(self, work: dist.Work) -> None:
        """Hold a started work."""
        if len(self._under_way) >= 64:  # handles that were dropped without a wait
            for completed in [w for w in self._under_way.values() if w.is_completed()]:
                self.end(completed)
        self._under_way[id(work)] = work

    def end(self, work: dist.Work) -> None:
        """Release a work after its wait."""
        if self._under_way.pop(id(work), None) is not None:
            self._last_end = time.monotonic()

    def held(self) -> list[dist.Work]:
        """Return the works that are held."""
        return list(self._under_way.values())

    def drain(self) -> None:
        """At exit, keep threads from releasing a work last."""
        for work in self.held():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        if time.monotonic() - self._last_end < RECENT:
            time.sleep(PAUSE)  # other threads have the GIL meanwhile


WORKS = Works()
"""The works of this process."""

atexit.register(WORKS.drain)
