"""Scripts end as they say, close() or not, while what they have sent is still under way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from soframe.comm import TorchDistributed, ending
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over
from tests.robustness.ending import TRAVELLING, run_script

pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "how", "ranks", "status"),
    [
        ("comm-opt", "ends", 2, 0),
        pytest.param("comm-opt", "raises", 2, 1, marks=pytest.mark.thorough),
    ],
)
def test_ranks_end_with_the_scripts_own_status(tmp_path, strategy, how, ranks, status):
    for end in run_script(tmp_path, strategy, how, ranks):
        assert TRAVELLING in end.output
        assert end.status == status, end.errors
        assert ("ValueError: the script's own" in end.errors) == (how == "raises")
        assert end.errors.count("Traceback") == (how == "raises"), end.errors


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_whose_peer_has_gone_ends_with_an_error(tmp_path):
    left, gone = run_script(tmp_path, "comm-opt", "one raises", 2)
    assert gone.status == 1
    assert "ValueError: the script's own" in gone.errors
    assert left.status == 1
    assert "RuntimeError" in left.errors


def threads_of_gloo() -> int:
    """How many threads of this process run collectives."""
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
    return names.count("pt_gloo_runloop")


def destroy(rank: int, ranks: int, strategy: str) -> tuple[int, int, str]:
    run = Run(Case({"strategy": strategy, "statistics_every": 1}), rank, ranks, average=mean_over())
    run.train(range(3))
    before = threads_of_gloo()
    dist.destroy_process_group()
    until = time.monotonic() + 10  # a thread that has returned is in /proc for a moment still
    while (after := threads_of_gloo()) and time.monotonic() < until:
        time.sleep(0.01)
    try:
        run.preconditioner.step()
    except RuntimeError as error:
        run.preconditioner.close()
        return before, after, str(error)
    return before, after, "no error"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="names of threads are in /proc")
@pytest.mark.parametrize("strategy", ["comm-opt", "hybrid-opt"])
def test_a_group_that_is_destroyed_ends_its_threads_and_says_so(strategy):
    """Whoever holds a process group keeps them; hybrid-opt makes groups of its own."""
    for before, after, error in run_ranks(destroy, 4, strategy):
        assert before > 0
        assert after == 0
        assert (
            "the process group that this preconditioner was built for has been destroyed" in error
        )


def destroy_but_hold(rank: int, ranks: int) -> str:
    run = Run(Case(), rank, ranks, average=mean_over())
    held = dist.group.WORLD  # as a script may
    dist.destroy_process_group()
    try:
        run.preconditioner.step()
    except RuntimeError as error:
        return f"{held is not None} {error}"
    return "no error"


def test_a_group_that_the_script_still_holds_is_not_used_once_it_is_destroyed():
    for error in run_ranks(destroy_but_hold, 2):
        assert "has been destroyed" in error


def look_at_works(rank: int, ranks: int) -> list[int]:
    """How many works are held along a run; and how many that have ended, after many."""
    works = ending.WORKS
    backend = TorchDistributed()
    handle = backend.all_reduce(torch.ones(3), "reduce")
    found = [len(works.held())]
    handle.wait()
    found.append(len(works.held()))
    for _ in range(100):
        backend.all_reduce(torch.ones(3), "reduce")  # nobody waits
    while not all(work.is_completed() for work in works.held()):
        time.sleep(0.01)
    ended = works.held()
    for _ in range(65):  # they are looked for when 64 are held
        backend.all_reduce(torch.ones(3), "reduce")
    found.append(len({id(work) for work in ended} & {id(work) for work in works.held()}))
    return found


def test_works_under_way_are_held_and_no_others():
    for found in run_ranks(look_at_works, 2, fresh=True):  # others leave works
        assert found == [1, 0, 0]


FREED = """
import atexit, threading, time

@atexit.register  # before soframe's: so it is called after that
def drop():
    print("the end")
    globals().update(travelling=None)
    ending.WORKS.__init__()

from soframe.comm import ending

class Work:
    def __init__(self, name): self.name = name
    def is_completed(self): return True
    def __del__(self): print(self.name, "is freed")

travelling, ended = Work("travelling"), Work("ended")
ending.WORKS.begin(travelling)
ending.WORKS.begin(ended)

pausing, sleep = threading.Event(), time.sleep

def pause(seconds):
    pausing.set()
    sleep(seconds)

def late(work):
    pausing.wait()  # it is dropped after it has told that it is complete

time.sleep = pause
thread = threading.Thread(target=late, args=[ended], daemon=True)
thread.start()
ending.WORKS.end(ended)
ended = None
threading._shutdown = lambda: None  # threads that are not Python's are not waited for
"""


def test_no_work_is_freed_once_the_interpreter_has_ended():
    run = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert run.stdout == "ended is freed\nthe end\n"
