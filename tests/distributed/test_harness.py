"""The harness itself: results, errors, deaths and hangs of real processes."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.harness import RankError, RankFailure, run_ranks

pytestmark = pytest.mark.distributed


def all_reduce(rank: int, world_size: int, values: Tensor) -> tuple[Tensor, int, int]:
    mine = values * (rank + 1)
    dist.all_reduce(mine)
    return mine, dist.get_world_size(), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce(world_size: int) -> None:
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    factor = sum(range(1, world_size + 1))
    results = run_ranks(all_reduce, world_size, values)
    assert len(results) == world_size
    for total, size, threads in results:
        assert torch.equal(total, factor * values)
        assert size == world_size
        assert threads == 1
    assert torch.equal(values, torch.tensor([1.0, 2.0], dtype=torch.float64))


def backward(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    weight = torch.nn.Parameter(torch.randn(3))
    loss = (weight * (rank + 1)).sum()
    torch.autograd.backward(loss)
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.detach(), weight.grad


def test_works_after_autograd_ran_in_the_parent() -> None:
    torch.autograd.backward(torch.ones(3, requires_grad=True).sum())
    (weight, gradient), (other, _) = run_ranks(backward, 2)
    assert torch.equal(gradient, torch.full((3,), 3.0))
    assert torch.equal(weight, other), "ranks begin with the same seed"


def without_group(rank: int, world_size: int, *, power: int) -> tuple[int, bool, int]:
    return rank**power, dist.is_initialized(), os.getpid()


def test_without_a_process_group_and_with_keywords() -> None:
    results = run_ranks(partial(without_group, power=2), 3, backend=None)
    assert [(value, group) for value, group, _ in results] == [(0, False), (1, False), (4, False)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == 4


def large(rank: int, world_size: int) -> Tensor:
    return torch.full((1 << 20,), float(rank))


def test_results_larger_than_a_pipe() -> None:
    for rank, result in enumerate(run_ranks(large, 2, backend=None)):
        assert result.shape == (1 << 20,)
        assert (result == rank).all()


def fail_on(rank: int, world_size: int, bad: int, folder: str) -> int:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    while len(list(Path(folder).iterdir())) < world_size:
        time.sleep(0.01)
    if rank == bad:
        raise KeyError("the reason")
    while True:
        time.sleep(60)


def assert_gone(folder: Path, ranks: int) -> None:
    pids = [int(path.read_text()) for path in folder.iterdir()]
    assert len(pids) == ranks
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_exception_is_raised_with_rank_and_traceback_and_kills_the_others(tmp_path: Path) -> None:
    begin = time.monotonic()
    # No group, so that rank 0 does not fail of itself: it must be killed.
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on, 2, 1, str(tmp_path), backend=None)
    assert time.monotonic() - begin < 30
    message = str(caught.value)
    assert "rank 1: KeyError: 'the reason'" in message
    assert "in fail_on" in message
    assert "Traceback" in message
    assert isinstance(caught.value.__cause__, KeyError)
    assert [(f.rank, f.reason) for f in caught.value.failures] == [(1, "raised")]
    assert "ranks [0] were still running and were killed" in message
    assert_gone(tmp_path, 2)


def hang(rank: int, world_size: int, folder: str) -> int:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    if rank != 1:
        dist.all_reduce(torch.ones(1))  # rank 1 never comes
    return rank


@pytest.mark.slow
def test_hang_is_killed_and_names_the_ranks_and_where_they_stood(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(hang, 3, str(tmp_path), timeout=2)
    failures = caught.value.failures
    assert [(f.rank, f.reason) for f in failures] == [(0, "timeout"), (2, "timeout")]
    assert "rank 0: did not finish in 2 s" in str(caught.value)
    for failure in failures:
        assert "all_reduce" in failure.details
        assert "in hang" in failure.details
    assert_gone(tmp_path, 3)


def die(rank: int, world_size: int, how: str) -> str:
    if rank == 1:
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(5)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "survived"
    return "reduced"


@pytest.mark.parametrize(
    ("how", "reason", "code", "summary"),
    [
        ("exit", "died", 3, "died (status 3)"),
        ("kill", "died", -9, "died (SIGKILL)"),
        ("sys", "raised", None, "SystemExit: 5"),
    ],
)
def test_a_death_may_be_the_point(how: str, reason: str, code: int | None, summary: str) -> None:
    first, second, third = run_ranks(die, 3, how, check=False, timeout=20)
    assert first == third == "survived"
    assert isinstance(second, RankFailure)
    assert (second.rank, second.reason, second.exitcode) == (1, reason, code)
    assert second.summary == summary
    with pytest.raises(RankError) as caught:
        run_ranks(die, 3, how, timeout=20)
    assert caught.value.failures[0].rank == 1


def die_at_once(rank: int, world_size: int) -> str:
    if rank == 1:
        os._exit(3)
    return "joined"


def test_every_rank_has_joined_before_any_begins() -> None:
    for _ in range(8):  # a race otherwise: peers still connecting when rank 1 dies
        results = run_ranks(die_at_once, 4, check=False, timeout=20)
        assert [results[rank] for rank in (0, 2, 3)] == ["joined"] * 3


def await_nobody(rank: int, world_size: int) -> str:
    if rank == 0:
        return "left"
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        dist.all_reduce(torch.ones(1))
    return "timed out"


def test_a_collective_can_time_out_before_the_rank_is_killed() -> None:
    assert run_ranks(await_nobody, 2, group_timeout=1) == ["left", "timed out"]


def slow_first(rank: int, world_size: int) -> int:
    if rank == 0:
        time.sleep(60)
    return rank


@pytest.mark.slow
def test_unchecked_timeout_keeps_the_results_of_the_others() -> None:
    slow, quick = run_ranks(slow_first, 2, check=False, timeout=2, backend=None)
    assert isinstance(slow, RankFailure)
    assert slow.reason == "timeout"
    assert quick == 1


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")  # its pickle calls UnpicklableError("1 and 2")


def unpicklable(rank: int, world_size: int, what: str) -> object:
    if what == "error":
        raise UnpicklableError(1, 2)
    return lambda: None


@pytest.mark.parametrize(("what", "text"), [("error", "1 and 2"), ("result", "lambda")])
def test_what_cannot_be_pickled_is_reported(what: str, text: str) -> None:
    with pytest.raises(RankError, match=text):
        run_ranks(unpicklable, 1, what, backend=None)
    with pytest.raises(TypeError, match="module level"):
        run_ranks(lambda rank, world_size: None, 1)


def slow_peer(rank: int, world_size: int) -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 1:
        time.sleep(1)
        dist.send(total, 0)
        return 0.0
    if rank == 2:
        return 0.0  # finished first: its connections must stay until rank 0 has reported
    dist.recv(total, 1)
    return float(total)


def test_a_rank_stays_until_all_have_finished() -> None:
    assert run_ranks(slow_peer, 3) == [3.0, 0.0, 0.0]


def leave(rank: int, world_size: int, what: str) -> tuple[int, bool]:
    clean = "LEFT" not in os.environ and torch.get_default_dtype() == torch.float32
    if what == "a variable" and rank == 1:
        os.environ["LEFT"] = "1"
    if what == "a setting":
        torch.set_default_dtype(torch.float64)
    if what == "an attribute":
        torch.linalg.eigh = None  # type: ignore[assignment]
    return os.getpid(), clean and torch.linalg.eigh is not None


@pytest.mark.parametrize("what", ["a variable", "a setting", "an attribute"])
def test_a_process_serves_again_unless_it_left_something_changed(what: str) -> None:
    first, again, changed, after = (
        dict(run_ranks(leave, 2, left)) for left in ("nothing", "nothing", what, "nothing")
    )
    assert first.keys() == again.keys() == changed.keys()
    assert not first.keys() & after.keys()
    assert all(after.values())
    fresh = dict(run_ranks(leave, 2, "nothing", fresh=True))
    assert not fresh.keys() & after.keys()
