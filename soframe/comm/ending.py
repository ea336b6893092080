"""How a script ends while, or just after, something travels.

Gloo runs collectives in threads. Such a thread lets go of the ``Work`` of a collective a moment
after it has told that it is complete. If Python has let go of it before, the thread is the last
one: it frees the tensors, needs the GIL for it, and aborts the process if the interpreter is ending
(``terminate called without an active exception``, https://github.com/pytorch/pytorch/issues/190489).

So what is under way is held here until it has been waited for, and the last few after that: a group
has as many threads as can be late, two by default. When the interpreter ends they are held for
ever, and no thread is the last to let go of them.
"""

from __future__ import annotations

import atexit
import ctypes
from collections import deque

import torch.distributed as dist

LAST = 4
"""How many works are held after they have ended. Each holds its tensors: a bucket at most."""


class Works:
    """The works that are held."""

    def __init__(self) -> None:
        self._under_way: dict[int, dist.Work] = {}
        self._ended: deque[dist.Work] = deque(maxlen=LAST)

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
        """Hold a work that has been waited for, until others have ended after it.

        Args:
            work: The work.
        """
        if self._under_way.pop(id(work), None) is not None:
            self._ended.append(work)

    def held(self) -> list[dist.Work]:
        """Return the works that are held."""
        return [*self._under_way.values(), *self._ended]

    def keep_for_ever(self) -> None:
        """Let no work be freed any more; when the interpreter ends."""
        for work in self.held():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))


WORKS = Works()
"""The works of this process."""

atexit.register(WORKS.keep_for_ever)
