import signal
from types import SimpleNamespace

import pytest

from experiments import launch as launching
from experiments.launch import WorkerError, launch
from tests.experiments import helpers


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "total"), [(1, 1.0), (3, 6.0)])
def test_results_of_all_ranks_come_back_in_order(world_size, total):
    heard = []
    results = launch(helpers.sum_of_ranks, world_size, on_message=heard.append)(10)
    assert results == [(rank, 10 * total) for rank in range(world_size)]
    assert heard == [{"rank": 0, "threads": 1}]


@pytest.mark.distributed
def test_threads_are_set_in_the_process():
    heard = []
    launch(helpers.sum_of_ranks, 1, on_message=heard.append, threads=2)(factor=1)
    assert heard[0]["threads"] == 2


@pytest.mark.distributed
def test_an_exception_comes_back_with_its_traceback_and_ends_the_others(tmp_path):
    with pytest.raises(WorkerError) as caught:
        launch(helpers.fail_on_rank_1, 2)(str(tmp_path))
    message = str(caught.value)
    assert "rank 1 failed" in message
    assert "ArithmeticError: rank 1 divides by zero" in message
    assert "in fail_on_rank_1" in message
    assert not helpers.is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.distributed
def test_a_killed_rank_is_reported():
    with pytest.raises(WorkerError, match=r"rank 1 failed.*SIGKILL"):
        launch(helpers.die_on_rank_1, 2)()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_time_limit_ends_the_processes(tmp_path, monkeypatch):
    def seconds():  # they pass when the process has begun
        return 10.0 if (tmp_path / "pid").exists() else 0.0

    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=seconds))
    with pytest.raises(TimeoutError, match="no result after 5 s"):
        launch(helpers.sleep, 1, timeout=5)(str(tmp_path))
    assert not helpers.is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("sizes", [{"world_size": 0}, {"world_size": 1, "threads": 0}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        launch(helpers.sum_of_ranks, **sizes)


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupt_while_processes_start_ends_them(tmp_path, monkeypatch):
    start, started = launching.start_processes, []

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        started.append(start(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(launching, "start_processes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(helpers.sleep, 2)(str(tmp_path))
    assert [process.exitcode for process in started[0].processes] == [-signal.SIGKILL] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
