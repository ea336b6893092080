"""Runs a function on several local processes that talk over Gloo.

Processes come from a fork server that has imported torch once, so that starting them takes a
fraction of a second. An exception in a rank, a rank that dies, the time limit and an interrupt all
end with every process gone and one exception in the parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Imported once by the fork server: imports that cost each process seconds, such as the compiler,
#: which torch imports at the first step of an optimizer.
PRELOAD = ["torch", "torch._dynamo", "sklearn.datasets", "experiments.train"]


class WorkerError(RuntimeError):
    """A process failed. The message holds its rank and its traceback."""


class RefusedError(ValueError):
    """A wrong setting: the parent raises it again as it is, for the user, without a traceback."""


@dataclass(frozen=True)
class Worker:
    """The place of a process; `send` sends a picklable message to the parent, from rank 0 alone."""

    rank: int
    world_size: int
    send: Callable[[object], None]


@dataclass(frozen=True)
class Place:
    """This process among the ranks; `control` is a group on CPUs, None for the default one."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None


def launch(
    function: Callable[Concatenate[Worker, Parameters], Result],
    world_size: int,
    *,
    on_message: Callable[[Any], None] | None = None,
    timeout: float = 600.0,
    threads: int = 1,
) -> Callable[Parameters, list[Result]]:
    """Return a function that calls another one on several processes.

    `launch(train, 2)(config)` calls `train(worker, config)` in two processes, and returns the
    results of all ranks, in order. With more than one, `torch.distributed` is initialised over Gloo
    before the call. It raises `RefusedError` if a rank does, `WorkerError` if a rank raises
    anything else or dies, and `TimeoutError` after `timeout` seconds.

    Args:
        function: A function that can be pickled.
        world_size: The number of processes.
        on_message: Called in the parent with each message that rank 0 sends.
        timeout: Seconds, for the processes altogether.
        threads: The number of torch threads in each process.

    Raises:
        ValueError: If `world_size` or `threads` is less than 1.
    """
    for name, count in (("processes", world_size), ("threads", threads)):
        if count < 1:
            raise ValueError(f"the number of {name} must be at least 1, not {count}")

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> list[Result]:
        _start_fork_server()
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        results: dict[int, Result] = {}

        def listen() -> None:
            while receiver.poll():
                kind, rank, content = receiver.recv()
                if kind == "refusal":
                    raise RefusedError(content)
                if kind == "result":
                    results[rank] = content
                elif on_message is not None:
                    on_message(content)

        with tempfile.TemporaryDirectory(prefix="soframe-") as folder:
            rendezvous = (Path(folder) / "rendezvous").as_uri()
            place = (world_size, threads, rendezvous, timeout, sender, context.Lock())
            group: ProcessContext | None = None
            try:
                with _interrupts_later():
                    group = start_processes(
                        _main,
                        (place, function, args, kwargs),
                        world_size,
                        join=False,
                        daemon=True,
                        start_method="forkserver",
                    )
                _wait(group, listen, timeout)
            finally:
                if group:
                    for process in group.processes:
                        process.kill()
                        process.join()
        return [results[rank] for rank in range(world_size)]

    return call


def _wait(group: ProcessContext, listen: Callable[[], None], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    try:
        while not group.join(timeout=0.05):
            listen()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no result after {timeout:g} s")
    except ProcessException as error:
        listen()  # a refusal goes first
        raise WorkerError(f"rank {error.error_index} failed: {error}") from error
    listen()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Raise an interrupt at the end: processes that are half started could not be ended.

    A signal mask does not do that, since another thread may receive the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts are the main thread's
        return
    interrupted: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


def _start_fork_server() -> None:
    """Start the fork server, if it is not there yet, with interrupts blocked.

    It ignores interrupts itself only after its preloads, whose path it reads from the
    environment alone.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    environment = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main(
    rank: int,
    place: tuple[int, int, str, float, Any, Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run in each process."""
    world_size, threads, rendezvous, timeout, pipe, lock = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers an interrupt

    def send(kind: str, content: object) -> None:
        with lock:
            pipe.send((kind, rank, content))

    torch.set_num_threads(threads)
    if world_size > 1:
        # All ranks are on this machine, whose name need not resolve: use the loopback interface.
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=limit
        )
    worker = Worker(rank, world_size, lambda it: send("message", it) if rank == 0 else None)
    try:
        result = function(worker, *args, **kwargs)
    except RefusedError as error:
        send("refusal", str(error))
        raise
    if world_size > 1:
        dist.barrier()  # no rank may leave while another still reads from it
        dist.destroy_process_group()
    send("result", result)
