"""Phases: one at a time, as ranges of a profiler and on a clock."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import soframe
from soframe.solvers import Inverse
from soframe.step.phases import names as names_of_table
from soframe.tracing import phases
from soframe.tracing.phases import PREFIX, Phases
from tests.calls import calls, operators
from tests.distributed.harness import run_ranks
from tests.distributed.training import mean_over


def ranges(found: profile) -> list[str]:
    """The phases in the order of their ranges, which must not overlap."""
    own = [event for event in found.events() if event.name.startswith(PREFIX)]
    own.sort(key=lambda event: event.time_range.start)
    for one, other in itertools.pairwise(own):
        assert one.time_range.end <= other.time_range.start, (one.name, other.name)
    return [event.name.removeprefix(PREFIX) for event in own]


def first(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def make(method: Any, **options: Any) -> tuple[nn.Module, soframe.Preconditioner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    settings = {"kl_clip": None, "statistics_every": 1, "solve_every": 1, **options}
    return model, soframe.Preconditioner(model, method, **settings)


def backward(model: nn.Module, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    model.zero_grad()
    model(x).square().sum(1).mean().backward()


def profiled(model: nn.Module, preconditioner: soframe.Preconditioner, rank: int = 0) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        backward(model, rank)
        preconditioner.step()
    return ranges(found)


def test_a_step_on_one_process() -> None:
    model, preconditioner = make("kfac")
    names = first(profiled(model, preconditioner))
    # Nothing is exchanged.
    assert names == [
        "accumulate",
        "agree",
        "reduce",
        "average",
        "solve",
        "share",
        "direct",
        "write",
    ]


def on_ranks(rank: int, ranks: int) -> list[list[str]]:
    """Return the phases of a first step, in which one of two methods reads averaged gradients."""
    found = []
    for strategy in ("comm-opt", "mem-opt", "sharded"):
        model, preconditioner = make({"^0$": "kfac", ".*": "shampoo"}, strategy=strategy)
        average = mean_over()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            backward(model, rank)
            for parameter in model.parameters():
                average(parameter.grad)
            preconditioner.step()
        found.append(ranges(seen))
        preconditioner.close()
    return found


@pytest.mark.distributed
def test_a_step_on_ranks_has_the_phases_of_the_design_in_its_order() -> None:
    design = [n for n in names_of_table() if n not in ("clip", "measure", "move")]
    by_strategy = [names for found in run_ranks(on_ranks, 2) for names in found]
    for names in by_strategy:
        assert first(names) == [name for name in design if name in names]
    assert any(first(names) == design for names in by_strategy)


class Noting(Inverse):
    """Notes which phase it is called in."""

    noted: ClassVar[list[str]] = []
    open_phases: ClassVar[list[str]] = []

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        self.noted.append(self.open_phases[-1])
        return super().solve(matrix, damping)


def phases_of_solves(rank: int, ranks: int) -> list[str]:
    model, preconditioner = make("kfac", solver=Noting(), strategy="comm-opt")
    preconditioner.measure(times=True)
    Noting.open_phases = preconditioner.backend.phases._open
    backward(model, rank)
    average = mean_over()
    for parameter in model.parameters():
        average(parameter.grad)
    preconditioner.step()
    preconditioner.close()
    return Noting.noted


@pytest.mark.distributed
def test_what_is_sent_is_solved_in_the_phase_of_solves() -> None:
    each = run_ranks(phases_of_solves, 2)
    assert sum(map(len, each)) == 4
    assert {phase for noted in each for phase in noted} == {"solve"}


def test_an_optimizer_moves_last() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = soframe.Optimizer(model, "adamw", lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        optimizer.step()
    assert first(ranges(found)) == ["agree", "average", "direct", "write", "move"]


@pytest.mark.slow
def test_nothing_is_done_unless_somebody_looks() -> None:
    model, preconditioner = make("kfac", solve_every=2)

    def step() -> None:
        backward(model)
        preconditioner.step()

    for _ in range(4):
        step()
    before = operators(step, 4), calls(step, 4)
    preconditioner.measure(norms=True, times=True)
    during = operators(step, 4), calls(step, 4)
    preconditioner.measure(norms=False, times=False)
    after = operators(step, 4), calls(step, 4)
    assert before[0] == after[0] < during[0]
    assert before[1] == pytest.approx(after[1], abs=3)  # it looks for notes of others now and then
    assert during[1] > before[1] + 20
    preconditioner.measure(times=True)
    assert operators(step, 4) == before[0]  # a clock on the host dispatches nothing


class Ticks:
    """A clock that is told what time it is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_a_phase_interrupts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr(phases, "time", ticks)
    own = Phases()
    with own("solve"):
        ticks.now += 100  # before the clock is started
    own.start_clock(device=False)
    with own("solve"):
        ticks.now += 1
        with own("share"):
            ticks.now += 10
            with own("agree"):
                ticks.now += 1000
        ticks.now += 2
    ticks.now += 500  # in no phase
    with own("share"):
        ticks.now += 20
    found = own.seconds()
    assert {name: one.host for name, one in found.items()} == {
        "solve": 3,
        "share": 30,
        "agree": 1000,
    }
    assert all(one.device is None for one in found.values())
    own.start_clock(device=False)
    assert own.seconds() == {}
    own.stop_clock()
    assert not own.timed


def test_an_error_ends_its_phase() -> None:
    own = Phases()
    own.start_clock(device=False)
    with pytest.raises(KeyError), own("solve"), own("share"):
        raise KeyError
    assert own._open == []


class Event:
    """An event of a stream on paper, whose time is that of the device when it was recorded."""

    device = 0.0

    def record(self) -> None:
        self.at = Event.device

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_the_device_has_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    own = Phases()
    own.start_clock(device=True)
    with own("solve"):
        Event.device += 4
        with own("share"):
            Event.device += 16
    found = own.seconds()
    assert found["solve"].device == pytest.approx(4)
    assert found["share"].device == pytest.approx(16)
    assert own.seconds()["solve"].device == pytest.approx(4)  # read twice, counted once
