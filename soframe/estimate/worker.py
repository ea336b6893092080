"""One thread that solves while training goes on, on a CUDA stream of its own.

The worker starts no collective, and its inputs are copies, which no other thread changes. Its
results have the same bits as in the training thread. With ``threaded=False`` it solves at once in
that very thread, as a reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

Solve = Callable[[], list[Tensor] | None]


class Results(NamedTuple):
    """The results of a solve, and an event behind their computation on a CUDA stream."""

    tensors: list[Tensor] | None
    ended: Any


class Work:
    """A solve that was handed to a worker: its future results, and the device of its tensors."""

    def __init__(self, future: Future[Results], device: torch.device):
        self._future, self._device = future, device

    @property
    def done(self) -> bool:
        """Whether the solve has ended."""
        return self._future.done()

    @property
    def made(self) -> list[Tensor]:
        """The results so far, to be counted and not computed with: no stream waits for them."""
        results = self._future.result().tensors if self.done else None
        return results or []

    def cancel(self) -> None:
        """Cancel the solve; if it has begun, wait for its end."""
        if not self._future.cancel():
            self._future.result()

    def result(self) -> list[Tensor] | None:
        """Wait for the results, on the host and on the present stream, and return them."""
        tensors, ended = self._future.result()
        if ended is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(ended)
            for tensor in tensors or ():
                # The allocator must not reuse this memory before the present stream has read it.
                tensor.record_stream(here)
        return tensors


class Worker:
    """Runs solves in the order of `submit`: in a thread, or at once with ``threaded=False``."""

    def __init__(self, *, threaded: bool = True) -> None:
        self._threaded = threaded
        self._executor: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def submit(self, solve: Solve, uses: Sequence[Tensor]) -> Work:
        """Submit a solve, and return the work under way.

        ``uses`` are the tensors that it reads, all on one device; they must not change until it
        ends.
        """
        device = uses[0].device
        run = functools.partial(self._run, solve, uses, device, self._after(device))
        if self._threaded:
            # The thread starts with the first solve: most runs have none in the background.
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="soframe")
            return Work(self._executor.submit(run), device)
        future: Future[Results] = Future()
        future.set_result(run())
        return Work(future, device)

    def _after(self, device: torch.device) -> Any:
        """Return an event for the work that this thread has queued so far on a CUDA device."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.current_stream(device).record_event()

    def _run(
        self, solve: Solve, uses: Sequence[Tensor], device: torch.device, begin: Any
    ) -> Results:
        # Grad mode and autocast are per thread, so both are turned off in this one.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if begin is None:
                return Results(solve(), None)
            stream = self._streams[device]
            with torch.cuda.stream(stream):
                stream.wait_event(begin)
                for tensor in uses:  # which may be freed meanwhile
                    tensor.record_stream(stream)
                tensors = solve()
                return Results(tensors, stream.record_event())

    def close(self) -> None:
        """End the thread, after the solves that were submitted and not cancelled."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
