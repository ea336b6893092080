"""Runs a function on W real processes that form one Gloo group, in a tenth of a second.

    def mean_rank(rank: int, world_size: int, scale: float) -> Tensor:  # at module level
        total = torch.tensor(scale * rank)
        dist.all_reduce(total)
        return total / world_size

    results = run_ranks(mean_rank, 2, 3.0)  # one result per rank

Why a fork server: spawning imports torch once per rank (seconds), and forking the test process
hangs once autograd has started its threads there. The server imports torch once, starts no
threads, and forks a rank in milliseconds. It lives as long as the test process.

A process serves as a rank of one run after another, each with a process group of its own: most of
what a short run costs is what torch sets up at its first use in a process. One that failed, or that
left settings or attributes of modules changed (`_changed`), serves no other run.

A rank finds the function by the name of its module, so tests are a package (``tests/__init__.py``)
whose root is on ``sys.path``; ranks inherit that path. They do not inherit later changes to
``os.environ`` or monkey-patches: pass what they need as arguments.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
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
    "torch.distributed.pipelining",
    "numpy",
    "pytest",
    "hypothesis",
    "sklearn.datasets",
    "soframe.planning.planner",
    "soframe.testing",
    "soframe.trust_region",
    "tests.curvature",
    "tests.distributed.harness",
    "tests.distributed.frozen",
]
# After one rank fails, its peers often fail of it: wait so long to report them together.
_GRACE = 0.5
# A rank whose parent was killed ends by itself, so long after the time-out.
_ORPHAN = 30.0
# Runs that one process serves at most, so that nothing which torch never frees adds up.
_RUNS = 40
# Whose attributes a run must leave as they were.
_WATCHED = ("torch", "torch.linalg", "torch.distributed", "torch.nn.functional")
_GONE = object()


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
    rank: int
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
    fresh: bool = False,
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
        fresh: Whether processes are started for this run, and end with it.

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
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                task = _Task(
                    payload, rank, world_size, folder, timeout, group_timeout or timeout, backend
                )
                ranks.append(_Rank(task, _Process.new() if fresh else _Process.waiting()))
            _collect(ranks, timeout, check)
        finally:
            _part(ranks, fresh)
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


def _part(ranks: Sequence[_Rank], fresh: bool) -> None:
    """Keep the processes for other runs if every rank left its own clean, else end them."""
    if not fresh and all(one.clean for one in ranks):
        _IDLE.extend(one.process for one in ranks)
        return
    for one in ranks:
        one.process.connection.close()
    for one in ranks:
        one.process.end(leaves=one.done and not isinstance(one.outcome, RankFailure))


class _Process:
    """A process of the fork server, and the parent's end of its connection."""

    def __init__(self, connection: Connection, process: ForkServerProcess) -> None:
        self.connection, self.process, self.runs = connection, process, 0

    @classmethod
    def new(cls) -> _Process:
        context = _context()
        connection, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs,))
        process.start()
        theirs.close()  # so that the rank's death is the end of the stream here
        return cls(connection, process)

    @classmethod
    def waiting(cls) -> _Process:
        """A process that waits for a run, or a new one."""
        while _IDLE:
            if (one := _IDLE.pop()).runs < _RUNS and one.process.is_alive():
                return one
            one.connection.close()
            one.end(leaves=True)
        return cls.new()

    def end(self, leaves: bool) -> None:
        """Let a process whose connection is closed leave, or kill it; return when it is gone."""
        if leaves:
            self.process.join(5)
        self.process.kill()
        self.process.join()
        self.process.close()


_IDLE: list[_Process] = []


@atexit.register
def _end_all() -> None:
    for one in _IDLE:
        one.connection.close()
    while _IDLE:
        _IDLE.pop().end(leaves=True)


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, task: _Task, process: _Process) -> None:
        self.rank, self.process = task.rank, process
        self.outcome: Any = None
        self.done = self.clean = False
        self.stack_file = Path(task.folder) / f"stack-{task.rank}"
        self.connection = process.connection
        process.runs += 1
        self.connection.send_bytes(pickle.dumps(task))

    def receive(self) -> None:
        """Take the rank's report; the end of its stream without one is its death."""
        self.done = True
        try:
            self.outcome, self.clean = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            process = self.process.process
            process.join(5)
            code = process.exitcode
            what = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
            self.outcome = RankFailure(
                self.rank, "died", f"died ({what})", exitcode=code, when=time.monotonic()
            )

    def signal(self, number: signal.Signals) -> None:
        process = self.process.process
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


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


def _main(connection: Connection) -> None:
    before: dict[str, Any] | None = None
    meshes: list[object] = []
    # Until the parent closes its end. The group stays until every rank of a run has reported.
    while (told := _receive(connection)) is not None:
        task: _Task = pickle.loads(told)
        if before is None:
            _use_loopback()
            traces()  # if another fork server started this process
            before, meshes = _settings(), _note_meshes()
        else:
            _leave_group()
        with (Path(task.folder) / f"stack-{task.rank}").open("w") as stack_file:
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
            faulthandler.dump_traceback_later(task.timeout + _ORPHAN, exit=True, file=stack_file)
            try:
                result = _call(task)
                clean = not meshes and not _changed(before)
                report = pickle.dumps((result, clean))
            except BaseException as error:  # also SystemExit and pytest's outcomes
                connection.send_bytes(pickle.dumps((_failure(task.rank, error), False)))
                _leave(1)
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGUSR1)
        del result
        connection.send_bytes(report)
        del report
    _leave(0)


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # models of the last run, whose hooks and buckets are in circles


def _note_meshes() -> list[object]:
    """Note every DeviceMesh: torch caches its groups by names, which the next run uses again."""
    from torch.distributed.device_mesh import DeviceMesh

    made: list[object] = []
    init = DeviceMesh.__init__

    @functools.wraps(init)
    def noted(self: Any, *arguments: Any, **others: Any) -> None:
        made.append(None)
        init(self, *arguments, **others)

    DeviceMesh.__init__ = noted
    return made


@dataclass(frozen=True)
class _Traces:
    """The modules that a run may leave changed, as they were.

    Attributes:
        spaces: Modules, their attributes and their classes' ones, which are compared by identity.
        sizes: The sizes of containers among these attributes, by space and name.
    """

    spaces: dict[str, _Space]
    sizes: dict[tuple[str, str], int]


@dataclass(frozen=True)
class _Space:
    """The attributes of a module or a class, as they are and as they were: no copy at each run."""

    now: Mapping[str, Any]
    before: dict[str, Any]


def _settings() -> dict[str, Any]:
    """Settings and threads, which are compared by value."""
    import torch

    return {
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "warnings": list(warnings.filters),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": threading.active_count(),
        "main": sys.modules["__main__"],
        "thread state": torch.is_grad_enabled(),
    }


@functools.cache
def traces() -> _Traces:
    """Note the modules: once, by the fork server, before there are ranks (`frozen`)."""
    names = [name for name in sys.modules if name in _WATCHED or name.split(".")[0] == "soframe"]
    modules = {name: sys.modules[name] for name in names}
    spaces = {"sys.modules": _Space(sys.modules, modules)}
    sizes: dict[tuple[str, str], int] = {}
    for name, module in modules.items():
        spaces[name] = _Space(vars(module), dict(vars(module)))
        for key, value in vars(module).items():
            kind = type(value)  # not isinstance, at which a deprecated object of torch warns
            if issubclass(kind, type) and value.__module__ == name:
                spaces[f"{name}.{key}"] = _Space(vars(value), dict(vars(value)))
            elif issubclass(kind, (dict, list, set)) and not key.startswith("__"):
                sizes[name, key] = len(value)
    return _Traces(spaces, sizes)


def _changed(before: dict[str, Any]) -> list[str]:
    """The names of what is other than before, or gone; imports add names.

    Args:
        before: The settings.
    """
    settings, modules = _settings(), traces()
    found = [name for name, value in before.items() if settings[name] != value]
    for name, space in modules.spaces.items():
        for key, value in space.before.items():
            other = space.now.get(key, _GONE)
            # torch marks what it hooks, at a first optimizer.
            if other is not value and not getattr(other, "hooked", False):
                found.append(f"{name}.{key}")
    for (name, key), size in modules.sizes.items():
        if len(modules.spaces[name].before[key]) != size:
            found.append(f"len({name}.{key})")
    return found


def _call(task: _Task) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if task.backend is not None:
        # The type stubs of torch.distributed leave the name out.
        store = dist.FileStore(str(Path(task.folder) / "store"), task.world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            task.backend,
            store=store,
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.group_timeout),
        )
        # Without this a rank may run its function, and even die of it, while others still connect.
        if store.add("joined", 1) == task.world_size:
            store.set("all joined", "")
        store.wait(["all joined"])
    fn, args = pickle.loads(task.payload)
    return fn(task.rank, task.world_size, *args)


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
