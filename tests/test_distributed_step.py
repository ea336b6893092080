"""The comparison on real processes counts what it says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks import distributed_step
from tests.distributed.harness import run_ranks

RANKS = 3


def carry(rank: int, ranks: int) -> list[dict[str, float]]:
    """One collective after the other, called in all the ways that the libraries do."""
    pair = dist.new_group([0, 1])
    wire = distributed_step.Wire()
    counts = []

    def note() -> None:
        counts.append(dict(wire.count))
        wire.count.clear()

    ten = torch.ones(10, dtype=torch.float64)
    dist.all_reduce(ten)
    note()
    dist.reduce(ten, 1, group=dist.group.WORLD, async_op=True).wait()
    note()
    dist.all_gather([torch.empty_like(ten) for _ in range(ranks)], ten, group=dist.group.WORLD)
    note()
    if rank < 2:
        dist.broadcast(ten, 0, pair)
        note()
        dist.all_reduce(ten, group=pair)
        note()
    return counts


@pytest.mark.slow
@pytest.mark.distributed
def test_the_wire_counts_what_a_ring_sends():
    everybody = [{"sent": sent, "calls": 1} for sent in (80 * 4 / 3, 80 * 2 / 3, 80 * 2)]
    pair = [{"sent": sent, "calls": 1} for sent in (80 * 1 / 2, 80)]
    for rank, counts in enumerate(run_ranks(carry, RANKS)):
        expected = everybody + (pair if rank < 2 else [])
        assert [c["calls"] for c in counts] == [e["calls"] for e in expected]
        assert [c["sent"] for c in counts] == pytest.approx([e["sent"] for e in expected])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.distributed
def test_every_row_is_there_and_all_compute_the_same():
    names = [v.name for v in distributed_step.VARIANTS if v.library == distributed_step.OWN]
    options = argparse.Namespace(
        kfac_path=None,
        ranks=2,
        width=24,
        batch=4,
        solver="inverse",
        statistics_every=1,
        solve_every=2,
        cycles=1,
        repeats=2,
        timeout=300.0,
    )
    found = distributed_step.measure(names, options)
    assert list(found) == names
    for name, own in found.items():
        assert own["apart"] < 1e-3, name
        assert own["memory"] <= own["held"] < 1.05 * own["memory"], name
        assert own["all"] >= own["sent"] > 0
        assert len(own["median"]) == len(own["cpu"]) == 2
    local, averaged = found["soframe sharded, local"], found["soframe sharded"]
    assert local["all"] == local["sent"] < averaged["all"]


@pytest.mark.slow
def test_what_a_thread_lets_go_of_later_is_not_held(monkeypatch):
    """A thread of Gloo may still hold the buffer of a collective that has ended."""
    passing: list[torch.Tensor] = []
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        passing.clear()

    monkeypatch.setattr(distributed_step.time, "sleep", pause)
    runner = object.__new__(distributed_step.Runner)
    usages = [{"total": 44 + 13}, {"total": 44}]  # the first call waits for what is under way
    runner.preconditioner = SimpleNamespace(memory_usage=lambda: usages.pop(0))
    runner.model = torch.nn.Linear(1, 1)
    before = distributed_step.storages()
    kept = torch.ones(11)
    passing.append(torch.ones(13))
    new = [t.untyped_storage().data_ptr() for t in (kept, *passing)]
    assert not before.keys() & set(new)
    assert [distributed_step.storages()[where] for where in new] == [4 * 11, 4 * 13]
    runner.measure_held(before)
    assert runner.held == runner.memory == kept.untyped_storage().nbytes() == 44
    assert pauses == [distributed_step.PAUSE] * distributed_step.LOOKS


def test_shares_are_those_of_turns():
    """The median of the quotients of each turn, not the quotient of medians."""
    once = dict.fromkeys(distributed_step.ONCE, 1.0)
    theirs = {**once, **{key: [1.0, 10.0, 4.0] for key in distributed_step.TIMED}}
    own = {**once, "sent": 0.5, **{key: [2.0, 5.0, 1.0] for key in distributed_step.TIMED}}
    found = {"kfac-pytorch comm-opt": theirs, "soframe comm-opt": own}
    [(name, shares)] = distributed_step.ratios(found).items()
    assert name == "soframe comm-opt"
    assert shares["sent"] == 0.5
    assert shares["median"] == [0.5, 0.25, 2.0]


def test_without_kfac_pytorch_the_command_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "kfac", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert distributed_step.main(["--kfac-path", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "git clone" in error
    assert "benchmarks.distributed_step --kfac-path" in error
