"""Functions that tests run in other processes, and records made by hand."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from experiments import launch
from experiments.config import RunConfig
from experiments.records import Row, RunRecord


def record(
    optimizer="sgd", losses=(3.0, 2.0, 0.9, 1.1, 0.4), targets=(1.0, 0.5), seconds=0.5, **fields
):
    """A record whose evaluations are 10 steps and `seconds` apart."""
    config = RunConfig("digits-autoencoder", optimizer, lr=0.1, steps=40)
    values = {
        "config": config,
        "processes": 2,
        "parameters": 7,
        "targets": targets,
        "rows": tuple(Row(10 * i, seconds * i, loss) for i, loss in enumerate(losses)),
        "milliseconds_per_step": 50.0,
        "sent_bytes_per_step": {"gradients": 1000.0, "reduce": 548.0},
        "curvature_bytes": (100, 2048),
    }
    return RunRecord(**(values | fields))


def sum_of_ranks(worker, factor):
    total = torch.tensor(float(worker.rank + 1))
    if worker.world_size > 1:
        dist.all_reduce(total)
    worker.send({"rank": worker.rank, "threads": torch.get_num_threads()})
    return worker.rank, factor * total.item()


def fail_on_rank_1(worker, folder):
    """Rank 1 raises; rank 0 leaves its process id and would wait for minutes."""
    if worker.rank == 1:
        while not (Path(folder) / "pid").exists():
            time.sleep(0.01)
        raise ArithmeticError("rank 1 divides by zero")
    leave_pid(folder)
    time.sleep(300)


def die_on_rank_1(worker):
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def sleep(worker, folder):
    leave_pid(folder)
    time.sleep(300)


def leave_pid(folder):
    path = Path(folder) / "writing"
    path.write_text(str(os.getpid()))
    path.rename(Path(folder) / "pid")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one, as Linux has them."""
    try:
        threads = [*Path(f"/proc/{pid}/task").glob("*/children")]
        found = [int(child) for children in threads for child in children.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return
    for child in found:
        yield child
        yield from descendants(child)


def interrupt(ready: Callable[[], object]) -> tuple[threading.Thread, set[int]]:
    """Interrupt this process when it is ready and has started others.

    Returns:
        The thread that does so, and what will be these other processes.
    """
    launch._start_fork_server()  # it stays
    before, started = {*descendants(os.getpid())}, set[int]()

    def act() -> None:
        while not (ready() and started):
            time.sleep(0.01)
            started.clear()
            started.update({*descendants(os.getpid())} - before)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread, started
