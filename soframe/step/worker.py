"""One thread that solves while training goes on, on a stream of its own where the device has any.

The worker starts no collective and touches nothing that others change: it is given copies. What it
computes has the bits that the thread that trains would have computed. Its plain twin is that very
thread (``beside=False``), which solves at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Solve = Callable[[], list[Tensor] | None]


class Work:
    """A solve that was handed to a worker.

    Args:
        future: Its result.
        device: Where its tensors live.
    """

    def __init__(self, future: Future[tuple[list[Tensor] | None, Any]], device: torch.device):
        self._future, self._device = future, device

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    @property
    def made(self) -> list[Tensor]:
        """What it has made so far, not to be computed with."""
        return (self._future.result()[0] or []) if self.done else []

    def cancel(self) -> None:
        """Give it up; if it has begun, wait for its end."""
        if not self._future.cancel():
            self._future.result()

    def result(self) -> list[Tensor] | None:
        """Wait for what it returns; this thread may compute with that."""
        made, ended = self._future.result()
        if ended is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(ended)
            for tensor in made or ():
                tensor.record_stream(here)
        return made


class Worker:
    """Solves one thing after the other, in the order in which they are handed in.

    Args:
        beside: Whether in a thread of its own; otherwise at once, in the thread that hands in.
    """

    def __init__(self, *, beside: bool = True) -> None:
        self._beside = beside
        self._executor: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def submit(self, solve: Solve, uses: Sequence[Tensor]) -> Work:
        """Hand a solve in.

        Args:
            solve: Called without gradients and without autocast.
            uses: The tensors on one device that it reads, which nobody writes to any more.

        Returns:
            The work under way.
        """
        device = uses[0].device
        run = functools.partial(self._run, solve, uses, device, self._after(device))
        if self._beside:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="soframe")
            return Work(self._executor.submit(run), device)
        future: Future[tuple[list[Tensor] | None, Any]] = Future()
        future.set_result(run())
        return Work(future, device)

    def _after(self, device: torch.device) -> Any:
        """Return the event after which what this thread has computed so far is there."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.current_stream(device).record_event()

    def _run(
        self, solve: Solve, uses: Sequence[Tensor], device: torch.device, begin: Any
    ) -> tuple[list[Tensor] | None, Any]:
        # Whether there are gradients or autocast is a matter of each thread; here never.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if begin is None:
                return solve(), None
            with _on(self._streams[device], begin, uses):
                made = solve()
                return made, self._streams[device].record_event()

    def close(self) -> None:
        """End the thread, once it has ended what it has begun."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


@contextmanager
def _on(stream: Any, begin: Any, uses: Sequence[Tensor]) -> Iterator[None]:
    """Compute on a stream, after an event, with tensors that may be freed meanwhile."""
    with torch.cuda.stream(stream):
        stream.wait_event(begin)
        for tensor in uses:
            tensor.record_stream(stream)
        yield
