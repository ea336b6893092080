"""Runs a function on several local processes that talk over Gloo.

Processes come from a fork server that has imported torch once, so that starting them takes a
fraction of a second. Rank r sends messages and its result to the parent through its own pipe.
The parent owns their lives: whatever goes wrong (an exception in a rank, a rank that dies, the
time limit, an interrupt) ends with every process gone and one exception in the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Imported once by the fork server, for seconds that each process would spend: the compiler,
#: which torch imports at the first step of an optimizer, scikit-learn, which holds the data, and
#: what trains, with all of soframe.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "sklearn.datasets",
    "soframe.experiments.train",
)

#: How long a process may take to end by itself, in seconds, before it is killed.
GRACE = 2.0


class WorkerError(RuntimeError):
    """A process failed. The message holds its rank and its traceback."""


class RefusedError(ValueError):
    """What a process is asked to do cannot be done: its message is for the user, in one line.

    A function that `launch` runs raises it for a wrong setting, and the parent raises it again as
    it is. Whatever else a process raises is a `WorkerError` in the parent, with the traceback.
    """


@dataclass(frozen=True)
class Worker:
    """What a process knows of its place.

    Attributes:
        rank: This process, from 0.
        world_size: The number of processes.
        send: Sends one picklable message to the parent. Only rank 0 is heard, so that every rank
            can run the same code.
    """

    rank: int
    world_size: int
    send: Callable[[object], None]


@dataclass(frozen=True)
class _Message:
    kind: str  # "message", "result", "refusal" or "error"
    content: Any


@dataclass(frozen=True)
class _Task:
    """What a process is started with."""

    rank: int
    world_size: int
    threads: int
    rendezvous: str
    timeout: float
    call: bytes  # the pickled (function, args, kwargs): a failure to load it is reported as such


@dataclass
class _Group:
    """The processes of one launch, and what they have said so far."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)


def launch(
    function: Callable[Concatenate[Worker, Parameters], Result],
    world_size: int,
    *,
    on_message: Callable[[Any], None] | None = None,
    timeout: float = 600.0,
    threads: int = 1,
) -> Callable[Parameters, list[Result]]:
    """Prepares a call of a function on several processes.

    `launch(train, 2)(config)` calls `train(worker, config)` in two processes. With more than one,
    `torch.distributed` is initialised over Gloo before the call; with one, it is not.

    Args:
        function: A function that can be pickled: of a module, not of a block.
        world_size: The number of processes, at least 1.
        on_message: Called in the parent with each message that rank 0 sends.
        timeout: The time limit in seconds, for the processes altogether.
        threads: The number of torch threads in each process.

    Returns:
        A function of the remaining arguments that returns the results of all ranks, in order. It
        raises `RefusedError` if a rank does, `WorkerError` if a rank raises anything else or dies,
        and `TimeoutError` after `timeout`.

    Raises:
        ValueError: If `world_size` or `threads` is less than 1.
    """
    if world_size < 1:
        raise ValueError(f"the number of processes must be at least 1, not {world_size}")
    if threads < 1:
        raise ValueError(f"the number of threads must be at least 1, not {threads}")

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> list[Result]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        _start_fork_server()
        group = _Group()
        with tempfile.TemporaryDirectory(prefix="soframe-") as folder:
            task = _Task(
                rank=0,
                world_size=world_size,
                threads=threads,
                rendezvous=(Path(folder) / "rendezvous").as_uri(),
                timeout=timeout,
                call=pickle.dumps((function, args, kwargs)),
            )
            try:
                for rank in range(world_size):
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_main, args=(replace(task, rank=rank), sender), daemon=True
                    )
                    group.pipes.append(receiver)
                    group.processes.append(process)
                    process.start()
                    # The child holds the only other end: its death then reads as end of file.
                    sender.close()
                _listen(group, on_message, time.monotonic() + timeout, timeout)
            finally:
                _end(group)
        return [cast(Result, group.results[rank]) for rank in range(world_size)]

    return call


def _start_fork_server() -> None:
    """Starts the fork server, if it is not there yet, so that no interrupt reaches it.

    It ignores interrupts itself only once it has imported what it preloads. A mask of signals is
    inherited, in any thread, and an interrupt in between is delivered here afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(
    group: _Group, on_message: Callable[[Any], None] | None, deadline: float, timeout: float
) -> None:
    """Receives until every rank has given its result.

    Raises:
        RefusedError: If a rank did.
        WorkerError: If a rank raised anything else, or died without a word.
        TimeoutError: If the deadline passed.
    """
    rank_of = {pipe: rank for rank, pipe in enumerate(group.pipes)}
    while len(group.results) < len(group.pipes):
        waiting = [pipe for pipe, rank in rank_of.items() if rank not in group.results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(group.pipes))) - set(group.results))
            raise TimeoutError(f"no result after {timeout:g} s from rank(s) {missing}")
        for pipe in cast(Sequence[Connection], ready):
            rank = rank_of[pipe]
            try:
                message: _Message = pipe.recv()
            except EOFError as error:
                process = group.processes[rank]
                process.join(GRACE)
                raise WorkerError(
                    f"rank {rank} died without a result, exit code {process.exitcode}"
                ) from error
            if message.kind == "refusal":
                raise RefusedError(message.content)
            if message.kind == "error":
                raise WorkerError(f"rank {rank} failed:\n{message.content}")
            if message.kind == "result":
                group.results[rank] = message.content
            elif on_message is not None and rank == 0:
                on_message(message.content)


def _end(group: _Group) -> None:
    """Leaves no process behind: those that gave a result may end by themselves."""
    finished = len(group.results) == len(group.processes)
    started = [process for process in group.processes if process.pid is not None]
    for process in started:
        if finished:
            process.join(GRACE)
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    for pipe in group.pipes:
        pipe.close()


def _main(task: _Task, pipe: Connection) -> None:
    """What each process runs."""
    # An interrupt reaches the whole foreground group; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(message: object) -> None:
        if task.rank == 0:
            pipe.send(_Message("message", message))

    try:
        torch.set_num_threads(task.threads)
        function, args, kwargs = pickle.loads(task.call)
        worker = Worker(task.rank, task.world_size, send)
        if task.world_size > 1:
            _join_group(task)
        result = function(worker, *args, **kwargs)
        if task.world_size > 1:
            # No rank may leave while another still reads from it.
            dist.barrier()
            dist.destroy_process_group()
        pipe.send(_Message("result", result))
    except BrokenPipeError:
        pass  # the parent was interrupted as this process started: nobody waits for a result
    except RefusedError as error:
        pipe.send(_Message("refusal", str(error)))
    except Exception:  # raised again in the parent, with its traceback
        pipe.send(_Message("error", traceback.format_exc()))
    finally:
        pipe.close()


def _join_group(task: _Task) -> None:
    # All ranks are on this machine, whose name need not resolve: use the loopback interface.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    dist.init_process_group(
        "gloo",
        init_method=task.rendezvous,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.timeout),
    )
