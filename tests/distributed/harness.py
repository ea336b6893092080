"""Runs a function on W real processes that form one Gloo group, in a tenth of a second.

    def mean_rank(rank: int, world_size: int, scale: float) -> Tensor:  # at module level
        total = torch.tensor(scale * rank)
        dist.all_reduce(total)
        return total / world_size

    results = run_ranks(mean_rank, 2, 3.0)  # one result per rank

Why a fork server: spawning imports torch once per rank (seconds), and forking the test process
hangs once autograd has started its threads there. The server imports torch once, starts no
threads, and forks a rank in milliseconds. It lives as long as the test process.

A rank finds the function by the name of its module, so tests are a package (``tests/__init__.py``)
whose root is on ``sys.path``; ranks inherit that path. They do not inherit later changes to
``os.environ`` or monkey-patches: pass what they need as arguments.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal, NoReturn

# pytest's default import mode has put the root of the test package there; importlib mode has not.
_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)
# Test modules import pytest and hypothesis: preloaded, a rank need not pay for them.
# DistributedDataParallel imports torch._dynamo: 2 s that no rank need pay. The ranks of
# `experiments.launch` come from the same server, and need the data of scikit-learn.
_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "numpy",
    "pytest",
    "hypothesis",
    "sklearn.datasets",
    "soframe.testing",
    "tests.curvature",
    "tests.distributed.harness",
    "tests.distributed.frozen",
]
# After one rank fails, its peers often fail of it: wait so long to report them together.
_GRACE = 0.5
# A rank whose parent was killed ends by itself, so long after the time-out.
_ORPHAN = 30.0


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: The rank.
        reason: It raised, it ended without a word (signal, ``os._exit``), or it did not finish.
        summary: One line.
        details: The traceback, or the stacks of its threads when it was killed.
        exitcode: For ``"died"``: the exit status, or minus the signal.
        exception: For ``"raised"``: the exception, unless it cannot be pickled.
    """

    rank: int
    reason: Literal["raised", "died", "timeout"]
    summary: str
    details: str = ""
    exitcode: int | None = None
    exception: BaseException | None = None
    when: float = field(default=0.0, repr=False, compare=False)


@dataclass(frozen=True)
class _Task:
    """What every rank is told."""

    payload: bytes
    world_size: int
    folder: str
    timeout: float
    group_timeout: float
    backend: str | None


class RankError(RuntimeError):
    """At least one rank failed.

    Attributes:
        failures: Every failure seen, the probable cause first.
    """

    def __init__(self, failures: Sequence[RankFailure], killed: Sequence[int] = ()) -> None:
        """Compose the message.

        Args:
            failures: The failures, in any order.
            killed: Ranks that were still running and were killed.
        """
        # A rank that dies makes its peers raise, hardly ever the other way round.
        order = sorted(failures, key=lambda failure: (failure.reason != "died", failure.when))
        self.failures = tuple(order)
        lines = [f"rank {f.rank}: {f.summary}" for f in order]
        if killed:
            lines.append(f"ranks {list(killed)} were still running and were killed")
        lines += [f"--- rank {f.rank} ---\n{f.details.rstrip()}" for f in order if f.details]
        super().__init__("\n".join(lines))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 200.0,
    group_timeout: float | None = None,
    backend: str | None = "gloo",
    check: bool = True,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank, each a process, and collect the results.

    Each rank runs one torch thread, with torch seeded by 0, so that ranks begin alike. It stays
    until all have finished: no rank pulls its connections from under a slower one. Arguments and
    results are pickled by value; no memory is shared. Keyword arguments: ``functools.partial``.

    Args:
        fn: A function at the top level of an importable module.
        world_size: The number of processes.
        *args: Passed to every rank.
        timeout: Seconds from the start of the last rank; then all are killed.
        group_timeout: The process group's: seconds after which a collective raises. By default
            ``timeout``, so that a hang is killed. Where ranks are to survive a death, make it
            short: survivors stay connected, so one that waits for another survivor only learns
            of the death by it.
        backend: The process group's, on the loopback device; None makes no process group.
        check: Whether the first failure kills the others and raises. If False, a rank that fails
            (which may be the point of the test) has a ``RankFailure`` for a result, and the others
            go on until they end or time out.

    Returns:
        The results, by rank.

    Raises:
        TypeError: If ``fn`` or an argument cannot be pickled.
        RankError: If a rank fails and ``check`` is true.
    """
    try:
        payload = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{fn!r} must be at module level, its arguments picklable") from error
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        task = _Task(payload, world_size, folder, timeout, group_timeout or timeout, backend)
        ranks = []
        with contextlib.ExitStack() as stack:
            for rank in range(world_size):
                ranks.append(_Rank(task, rank))
                stack.callback(ranks[-1].end)
            _collect(ranks, timeout, check)
    failures = [one.outcome for one in ranks if isinstance(one.outcome, RankFailure)]
    if check and failures:
        report = RankError(failures, [one.rank for one in ranks if not one.done])
        raise report from report.failures[0].exception
    return [one.outcome for one in ranks]


def _collect(ranks: Sequence[_Rank], timeout: float, check: bool) -> None:
    """Wait until every rank has an outcome, or with ``check`` one has failed."""
    deadline = time.monotonic() + timeout
    failed = False
    while waiting := [one for one in ranks if not one.done]:
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait([one.connection for one in waiting], max(left, 0.0))
        for one in waiting:
            if one.connection in ready:
                one.receive()
                if check and not failed and isinstance(one.outcome, RankFailure):
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if not ready:
            if not failed:
                _time_out([one for one in ranks if not one.done], timeout)
            return


def _time_out(ranks: Sequence[_Rank], timeout: float) -> None:
    for one in ranks:
        one.signal(signal.SIGUSR1)  # faulthandler's: every thread's stack into the rank's file
    time.sleep(0.3)
    names = [one.rank for one in ranks]
    for one in ranks:
        stack = one.stack_file.read_text() if one.stack_file.exists() else ""
        one.outcome = RankFailure(
            one.rank,
            "timeout",
            f"did not finish in {timeout:g} s (nor did the others of {names})",
            stack or "no stack: the rank had not begun",
        )
        one.done = True


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, task: _Task, rank: int) -> None:
        self.rank = rank
        self.outcome: Any = None
        self.done = False
        self.stack_file = Path(task.folder) / f"stack-{rank}"
        context = _context()
        self.connection, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_main,
            args=(theirs, task, rank),
            name=f"rank {rank}",
        )
        self.process.start()
        theirs.close()  # so that the rank's death is the end of the stream here

    def receive(self) -> None:
        """Take the rank's report; the end of its stream without one is its death."""
        self.done = True
        try:
            self.outcome = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            what = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
            self.outcome = RankFailure(
                self.rank, "died", f"died ({what})", exitcode=code, when=time.monotonic()
            )

    def signal(self, number: signal.Signals) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def end(self) -> None:
        """Let a rank that has reported leave, kill any other; return when the process is gone."""
        self.connection.close()
        if self.done and not isinstance(self.outcome, RankFailure):
            self.process.join(5)
        self.process.kill()
        self.process.join()
        self.process.close()


@functools.cache
def _context() -> ForkServerContext:
    """Start the fork server, once per process."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # The server learns sys.path from the environment only; without it soframe is not preloaded.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


# -- in the rank -------------------------------------------------------------------------------


def _main(connection: Connection, task: _Task, rank: int) -> None:
    stack_file = (Path(task.folder) / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    faulthandler.dump_traceback_later(task.timeout + _ORPHAN, exit=True, file=stack_file)
    try:
        result = _call(task, rank)
        report = pickle.dumps(result)
    except BaseException as error:  # also SystemExit and pytest's outcomes: the parent must know
        connection.send_bytes(pickle.dumps(_failure(rank, error)))
        _leave(1)
    connection.send_bytes(report)
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()  # the parent closes its end when every rank has reported
    _leave(0)


def _call(task: _Task, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if task.backend is not None:
        _use_loopback()
        # The type stubs of torch.distributed leave the name out.
        store = dist.FileStore(str(Path(task.folder) / "store"), task.world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            task.backend,
            store=store,
            rank=rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.group_timeout),
        )
        # Without this a rank may run its function, and even die of it, while others still connect.
        if store.add("joined", 1) == task.world_size:
            store.set("all joined", "")
        store.wait(["all joined"])
    fn, args = pickle.loads(task.payload)
    return fn(rank, task.world_size, *args)


def _use_loopback() -> None:
    # Gloo would otherwise resolve the host's name, which fails on machines without a network.
    for name in ("lo", "lo0"):
        if name in {interface for _, interface in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _failure(rank: int, error: BaseException) -> RankFailure:
    picklable: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception class may fail in any way here; its text is enough then
        picklable = None
    return RankFailure(
        rank,
        "raised",
        "".join(traceback.format_exception_only(error)).strip(),
        "".join(traceback.format_exception(error)),
        exception=picklable,
        when=time.monotonic(),
    )


def _leave(code: int) -> NoReturn:
    # Not by way of interpreter shutdown: a group with work pending may wait there for its peers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
