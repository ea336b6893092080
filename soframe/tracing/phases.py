"""The phase that a rank is in: a range for ``torch.profiler``, and a clock.

A rank is in one phase at a time. A phase that begins within another one interrupts it: while a
bucket of second-order data is sent, the rank shares and does not solve. So ranges never overlap and
times add up. A collective belongs to its own phase from the buffer to the wait, whoever waits.

Nothing is done unless somebody looks: neither a profiler nor a clock on, a phase costs two calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

NAMES = (
    "accumulate",
    "agree",
    "reduce",
    "average",
    "observe",
    "solve",
    "share",
    "direct",
    "exchange",
    "write",
    "move",
)
"""The phases of a step, in the order of the design. Gradients are averaged when they are first
asked for: before methods observe them, or else after the solves."""

PREFIX = "soframe::"
"""What the names of ranges begin with."""


@dataclass
class Seconds:
    """How long a phase took so far.

    Attributes:
        host: On the host's clock, its waiting included, in seconds.
        device: Between events on the device's stream, in seconds; None where there is none.
    """

    host: float = 0.0
    device: float | None = None


class Phases:
    """The phases of one preconditioner's steps, on this rank.

    Call it with the name of a phase for a context manager.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._clock: Clock | None = None
        self._range: Any = None

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a phase.

        Args:
            name: The phase.
        """
        if self._clock is None and not _profiler_enabled():
            return _UNSEEN
        return _Phase(self, name)

    # -- the clock --------------------------------------------------------------------------------

    def start_clock(self, *, device: bool, event: Callable[[], Any] | None = None) -> None:
        """Time phases from now on, from zero.

        Args:
            device: Whether a stream of a CUDA device is timed besides.
            event: Makes an event of a stream; None for CUDA's.
        """
        self._clock = Clock((event or _cuda_event) if device else None)

    def stop_clock(self) -> None:
        """Time nothing any more, and forget what was timed."""
        self._clock = None

    @property
    def timed(self) -> bool:
        """Whether phases are timed."""
        return self._clock is not None

    def seconds(self) -> dict[str, Seconds]:
        """Return how long each phase took since the clock was started; the device is waited for."""
        return {} if self._clock is None else self._clock.read()

    # -- one at a time ----------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Interrupt the phase that is open, and begin another.

        Args:
            name: The phase.
        """
        self._close()
        self._open.append(name)
        self._resume()

    def end(self) -> None:
        """End the open phase, and go on with the one that it has interrupted."""
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


class _Unseen(AbstractContextManager[None]):
    """The context of a phase that nobody looks at."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


_UNSEEN = _Unseen()


class _Phase(AbstractContextManager[None]):
    """The context of a phase that somebody looks at."""

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        self._phases.begin(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._phases.end()


class Clock:
    """Adds up how long phases take.

    Args:
        event: Makes an event of the device's current stream; None where there is no device.
    """

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._event = event
        self._seconds: dict[str, Seconds] = {}
        self._name: str | None = None
        self._since = 0.0
        self._first: Any = None
        self._pending: deque[tuple[str, Any, Any]] = deque()

    def begin(self, name: str) -> None:
        """Begin a phase.

        Args:
            name: The phase.
        """
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
            # What has ended is added up on the way, so that few events are alive.
            while self._pending and self._pending[0][2].query():
                self._add(*self._pending.popleft())

    def read(self) -> dict[str, Seconds]:
        """Return the seconds of each phase so far, once the device has come to its end."""
        while self._pending:
            name, first, last = self._pending.popleft()
            last.synchronize()
            self._add(name, first, last)
        return {
            name: Seconds(seconds.host, seconds.device) for name, seconds in self._seconds.items()
        }

    def _add(self, name: str, first: Any, last: Any) -> None:
        seconds = self._of(name)
        seconds.device = (seconds.device or 0.0) + first.elapsed_time(last) / 1e3  # milliseconds

    def _of(self, name: str) -> Seconds:
        return self._seconds.setdefault(name, Seconds())


def only(names: Collection[str]) -> list[str]:
    """Return names of phases in the order of a step; others come after them, sorted.

    Args:
        names: The names.
    """
    known = [name for name in NAMES if name in names]
    return [*known, *sorted(set(names) - set(known))]


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)
