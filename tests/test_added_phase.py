"""A phase from outside of the package: a file and one row, which the step, tracer and planner read.

It follows the weights with an average over steps, once the updates are known to count, and compares
these averages over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import soframe
from soframe.planning import Task, plan
from soframe.step import phases
from soframe.step.phases import Phase, Step, add
from soframe.strategies.work import BlockWork
from tests.distributed.harness import run_ranks
from tests.planning.kit import CPU

MOMENTUM = 0.75


class Follower:
    """Averages the weights of steps that count."""

    def __init__(self) -> None:
        self.averages: dict[nn.Parameter, torch.Tensor] = {}
        self.distance = torch.zeros(1)

    def follow(self, step: Step) -> None:
        self.distance.zero_()
        for parameter in step.curvature.watch.parameters():
            average = self.averages.setdefault(parameter, parameter.detach().clone())
            average.lerp_(parameter.detach(), 1 - MOMENTUM)
            self.distance += (parameter.detach() - average).square().sum()
        step.curvature.backend.all_reduce(self.distance, "follow").wait()


def seconds(work: Sequence[BlockWork], machine: Any) -> float:
    entries = sum(torch.Size(block.shape).numel() for block in work)
    return 3 * 4 * entries / machine.bandwidth


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Follower:
    monkeypatch.setattr(phases, "PHASES", list(phases.PHASES))
    monkeypatch.setattr("soframe.step.engine.PHASES", phases.PHASES)
    follower = Follower()
    add(Phase("follow", follower.follow, "counts", seconds=seconds), after="write")
    return follower


def build() -> tuple[nn.Module, soframe.Preconditioner, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    own = soframe.Preconditioner(model, statistics_every=1, solve_every=1, kl_clip=None)
    return model, own, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, own: Any, optimizer: Any, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    inputs = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
    (scale * model(inputs).square().sum(1).mean()).backward()
    own.step()
    optimizer.step()


def test_it_runs_in_steps_that_count(follower: Follower) -> None:
    model, own, optimizer = build()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    for scale in (1.0, float("nan"), 1.0):
        if scale == scale:
            for average, parameter in zip(expected, model.parameters(), strict=True):
                average.copy_(MOMENTUM * average + (1 - MOMENTUM) * parameter.detach())
        train(model, own, optimizer, scale)
    for average, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(follower.averages[parameter], average)
    assert own.counters["skipped_updates"] == 1


def test_it_is_traced_and_measured_at_its_place(follower: Follower) -> None:
    model, own, optimizer = build()
    own.measure(times=True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        train(model, own, optimizer)
    ranges = [event for event in profiled.events() if event.name.startswith("soframe::")]
    ranges.sort(key=lambda event: event.time_range.start)
    assert [event.name for event in ranges[-2:]] == ["soframe::write", "soframe::follow"]
    measured = own.metrics()["phases"]
    assert list(measured)[-2:] == ["write", "follow"]
    assert measured["follow"]["seconds"] > 0


def sent(rank: int, ranks: int) -> dict[str, Any]:
    add(Phase("follow", Follower().follow, "counts"), after="write")
    model, own, optimizer = build()
    train(model, own, optimizer)
    measured: dict[str, Any] = own.metrics()["phases"]["follow"]
    own.close()
    return measured


@pytest.mark.distributed
def test_its_collectives_are_counted_under_its_name() -> None:
    for measured in run_ranks(sent, 2):
        assert (measured["calls"], measured["bytes"]) == (1, 4)


def test_it_is_planned(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 200))
    task = Task.of(model, (torch.zeros(8, 400),))
    [row] = plan(task, ranks=1, hardware=CPU).rows[:1]
    expected = 12 * (300 * 401 + 200 * 301) / CPU.bandwidth
    assert row.timing.phases["follow"] == pytest.approx(expected)
    monkeypatch.setattr(phases, "PHASES", phases.PHASES[:-2] + phases.PHASES[-1:])
    [before] = plan(task, ranks=1, hardware=CPU).rows[:1]
    assert "follow" not in before.timing.phases
    assert row.timing.mean == pytest.approx(before.timing.mean + expected)


@pytest.mark.parametrize(("name", "after"), [("follow", "fold"), ("solve", "write")])
def test_a_wrong_place_or_name_is_an_error(follower: Follower, name: str, after: str) -> None:
    with pytest.raises(ValueError, match=f"phase '{name}' after '{after}': phases are accumulate,"):
        add(Phase(name, follower.follow), after=after)
