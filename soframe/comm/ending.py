"""How a script ends while, or just after, something travels.

Gloo runs collectives in threads. Such a thread lets go of the ``Work`` of a collective a moment
after it has told that it is complete. If Python has let go of it before, the thread is the last
one: it frees the tensors, needs the GIL for it, and aborts the process if the interpreter is ending
(``terminate called without an active exception``, https://github.com/pytorch/pytorch/issues/190489).

So what is under way is held here until it has been waited for; when the interpreter ends, what is
under way still is held for ever. A collective that has ended is let go of at once, since its work
holds its buffer; the thread needs some microseconds more, for which the interpreter's end waits.
"""

from __future__ import annotations

import atexit
import ctypes
import time

import torch.distributed as dist

PAUSE = 0.1
"""Seconds that the end of the interpreter waits for threads, if a collective ended just before."""

RECENT = 1.0
"""Seconds before the end of the interpreter that count as just before."""


class Works:
    """The works that are under way."""

    def __init__(self) -> None:
        self._under_way: dict[int, dist.Work] = {}
        self._last_end = -RECENT

    def begin(self, work: dist.Work) -> None:
        """Hold a work that has begun.

        Args:
            work: The work.
        """
        if len(self._under_way) >= 64:  # handles that nobody has waited for, and never will
            for one in [one for one in self._under_way.values() if one.is_completed()]:
                self.end(one)
        self._under_way[id(work)] = work

    def end(self, work: dist.Work) -> None:
        """Let go of a work that has been waited for.

        Args:
            work: The work.
        """
        if self._under_way.pop(id(work), None) is not None:
            self._last_end = time.monotonic()

    def held(self) -> list[dist.Work]:
        """Return the works that are held."""
        return list(self._under_way.values())

    def drain(self) -> None:
        """Let no thread be the last to let go of a work; when the interpreter ends."""
        for work in self.held():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        if time.monotonic() - self._last_end < RECENT:
            time.sleep(PAUSE)  # other threads have the GIL meanwhile


WORKS = Works()
"""The works of this process."""

atexit.register(WORKS.drain)
