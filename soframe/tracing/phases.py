"""The current phase of a rank: a range for ``torch.profiler``, and a clock.

A rank is in one phase at a time: a phase that begins within another one interrupts it, so that
ranges never overlap and times sum to the step's. A collective belongs to its own phase from the
buffer to the wait. Without a profiler or a clock a phase costs two calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

PREFIX = "soframe::"  # of the names of ranges


@dataclass
class Seconds:
    """The duration of a phase so far, in seconds."""

    host: float = 0.0  # waiting included
    device: float | None = None  # between events on the device's stream; None on a CPU


class Phases:
    """The phases of one preconditioner's steps; a call with a name is a context manager."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._clock: Clock | None = None
        self._range: Any = None

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a phase."""
        if self._clock is None and not _profiler_enabled():
            return _UNSEEN
        return self._phase(name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    # -- the clock --------------------------------------------------------------------------------

    def start_clock(self, *, device: bool) -> None:
        """Time phases from zero, on the host and by events of a CUDA device's stream."""
        event = partial(torch.cuda.Event, enable_timing=True)
        self._clock = Clock(event if device else None)

    def stop_clock(self) -> None:
        """Stop timing, and forget all times."""
        self._clock = None

    @property
    def timed(self) -> bool:
        """Whether phases are timed."""
        return self._clock is not None

    def seconds(self) -> dict[str, Seconds]:
        """Return the seconds of each phase since the clock was started; waits for the device."""
        return {} if self._clock is None else self._clock.read()

    # -- one at a time ----------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Interrupt the open phase, and begin another."""
        self._close()
        self._open.append(name)
        self._resume()

    def end(self) -> None:
        """End the open phase, and resume the interrupted one."""
        self._close()
        self._open.pop()
        self._resume()

    def _resume(self) -> None:
        if not self._open:
            return
        name = self._open[-1]
        if _profiler_enabled():
            self._range = record_function(PREFIX + name)
            self._range.__enter__()
        if self._clock is not None:
            self._clock.begin(name)

    def _close(self) -> None:
        if self._clock is not None:
            self._clock.end()
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


_UNSEEN = nullcontext()


class Clock:
    """Sums the times of phases, on the host and by events of the device's current stream."""

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._event = event
        self._seconds: dict[str, Seconds] = {}
        self._name: str | None = None
        self._since = 0.0
        self._first: Any = None
        self._pending: deque[tuple[str, Any, Any]] = deque()

    def begin(self, name: str) -> None:
        """Begin a phase."""
        self._name = name
        if self._event is not None:
            self._first = self._event()
            self._first.record()
        self._since = time.perf_counter()

    def end(self) -> None:
        """End the phase that has begun, if one has."""
        if self._name is None:
            return
        name, self._name = self._name, None
        self._of(name).host += time.perf_counter() - self._since
        if self._event is not None:
            last = self._event()
            last.record()
            self._pending.append((name, self._first, last))
            # Sum finished events at once, so that few are alive.
            while self._pending and self._pending[0][2].query():
                self._add(*self._pending.popleft())

    def read(self) -> dict[str, Seconds]:
        """Return the seconds of each phase so far; waits for the device."""
        while self._pending:
            name, first, last = self._pending.popleft()
            last.synchronize()
            self._add(name, first, last)
        return {name: replace(seconds) for name, seconds in self._seconds.items()}

    def _add(self, name: str, first: Any, last: Any) -> None:
        seconds = self._of(name)
        seconds.device = (seconds.device or 0.0) + first.elapsed_time(last) / 1e3  # milliseconds

    def _of(self, name: str) -> Seconds:
        return self._seconds.setdefault(name, Seconds())
