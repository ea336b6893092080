"""Solves in the background on ranks: one process's weights, the same bits, the planned bytes."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.comm import Recording, TorchDistributed
from soframe.solvers import Eigen, Inverse, OrthogonalIteration, Solver
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.test_accounting import SHAPES
from tests.distributed.test_equivalence import STRATEGIES
from tests.distributed.test_overlap import Late
from tests.distributed.test_plans import EVERY, Traffic
from tests.distributed.training import (
    Case,
    Run,
    mean_over,
    same,
    snapshot,
    train_alone,
    train_cases,
)
from tests.distributed.twins import Trace, assert_twins
from tests.state.test_resume import load, save, triangles

pytestmark = pytest.mark.distributed

INTERVAL, STEPS = 3, 8


class Slow(Inverse):
    """Takes another time at every solve, and on every rank."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        time.sleep(2e-3 * float(torch.rand(())) ** 2)
        return super().solve(matrix, damping)


# -- the same bits, the same calls -----------------------------------------------------------------


def trace(rank: int, ranks: int, case: Case, overlap: bool) -> Trace:
    backend = Recording(Late(seed=overlap, overlap=overlap))
    torch.manual_seed(10 * rank + overlap)
    run = Run(case, rank, ranks, backend, mean_over()).train()
    state = snapshot(run.preconditioner)
    run.preconditioner.close()
    return Trace(run.weights(), state, run.preconditioner.counters, backend.events)


FEW = ["comm", "mem", "sharded", "pairs, deferred"]
# Where gradient workers hold factors, so that eigenvalues may follow them.
FOLLOWING = ["comm", "mem", "hybrid", "spread", "kaisa apart", "half on the wire"]


def both_ways(rank: int, ranks: int, cases: list[Case]) -> list[tuple[Trace, Trace]]:
    return [(trace(rank, ranks, case, True), trace(rank, ranks, case, False)) for case in cases]


@pytest.mark.parametrize(
    ("ranks", "names", "solver", "stagger", "after"),
    [
        (2, ["comm", "pairs, deferred", "kaisa apart"], Slow(), True, 2),
        pytest.param(2, FOLLOWING[1::2], Eigen(follows=True), True, 2, marks=pytest.mark.slow),
        pytest.param(
            2,
            FOLLOWING[::2],
            Eigen(follows=True),
            True,
            2,
            marks=[pytest.mark.slow, pytest.mark.thorough],
        ),
        pytest.param(
            2, FEW, OrthogonalIteration(), True, 2, marks=[pytest.mark.slow, pytest.mark.thorough]
        ),
        pytest.param(
            3, list(EVERY), Slow(), True, 4, marks=[pytest.mark.slow, pytest.mark.thorough]
        ),
    ],
)
def test_threads_change_no_bit_and_no_call(
    ranks: int, names: list[str], solver: Solver, stagger: bool, after: int
) -> None:
    every = {"statistics_every": 1, "solve_every": INTERVAL, "background": after}
    options = {"solver": solver, "stagger": stagger, **every}
    cases = {
        (name, gradients): Case(
            {"strategy": EVERY[name], "gradients": gradients, **options}, steps=6
        )
        for name in names
        for gradients in ("averaged", "local")
        if gradients == "averaged" or name in ("mem", "sharded", "hybrid")
    }
    results = run_ranks(both_ways, ranks, list(cases.values()), timeout=120)
    assert_twins(results, cases)


@pytest.mark.parametrize(
    ("ranks", "names", "solver", "stagger", "after"),
    [
        (2, list(STRATEGIES)[1::2], "inverse", False, 2),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.thorough])
            for case in (
                (2, list(STRATEGIES)[::2], "inverse", False, 2),
                (3, list(STRATEGIES), "eigen", True, 1),
            )
        ),
    ],
)
def test_ranks_are_one_process(
    ranks: int, names: list[str], solver: str, stagger: bool, after: int
) -> None:
    every = {"statistics_every": 1, "solve_every": INTERVAL, "background": after}
    options = {"solver": solver, "stagger": stagger, **every}
    cases = {name: Case({"strategy": STRATEGIES[name], **options}, steps=STEPS) for name in names}
    alone = train_alone(Case(options, steps=STEPS))
    assert not torch.allclose(alone, train_alone(Case({**options, "background": 0}, steps=STEPS)))
    for own in run_ranks(train_cases, ranks, list(cases.values())):
        for name, weights in zip(cases, own, strict=True):
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-10, msg=name)


# -- what travels, and when ------------------------------------------------------------------------


def count(rank: int, ranks: int, names: list[str], after: int | str) -> list[Any]:
    found = []
    for name in names:
        options = {"statistics_every": 1, "solve_every": INTERVAL, "background": after}
        run = Run(Case({"strategy": EVERY[name], **options}), rank, ranks, None, mean_over())
        totals: list[Traffic] = [run.preconditioner.traffic()]
        for step in range(STEPS):
            run.step(step)
            totals.append(run.preconditioner.traffic())
        run.preconditioner.state_dict()
        found.append((run.preconditioner.placement, totals, run.preconditioner.memory_usage()))
        run.preconditioner.close()
    return found


def shared(step: Traffic) -> int:
    return step.get("share", {"bytes": 0})["bytes"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, list(EVERY)[::4]),
        *(
            pytest.param(ranks, list(EVERY), marks=[pytest.mark.slow, pytest.mark.thorough])
            for ranks in (2, 3)
        ),
    ],
)
def test_the_bytes_are_the_planned_ones_but_later(ranks: int, names: list[str]) -> None:
    """Solves at 0, 3 and 6; what is shared of the latter two travels a step later."""
    for rank, own in enumerate(run_ranks(count, ranks, names, 1)):
        for name, (placement, totals, held) in zip(names, own, strict=True):
            where = (name, rank)
            kinds = {"statistics": True, "used": list(SHAPES)}
            usual, solving = (placement.traffic(rank, solve=s, **kinds) for s in (False, True))
            for key in ("bytes", "calls"):
                sent = totals[STEPS]["total"][key] - totals[0]["total"][key]
                planned = 5 * usual["total"][key] + 3 * solving["total"][key]
                assert sent == planned, where
            steps = [shared(b) - shared(a) for a, b in itertools.pairwise(totals)]
            one = shared(solving)
            assert steps == [one, 0, 0, 0, one, 0, 0, one], where
            planned_memory = placement.memory(rank, used=SHAPES)
            assert held == {**planned_memory, "under_way": 0}, where


def test_ready_adds_one_number_to_a_step() -> None:
    for rank, own in enumerate(run_ranks(count, 2, ["comm"], "ready")):
        (placement, totals, _) = own[0]
        usual = placement.traffic(rank, statistics=True, used=list(SHAPES))["agree"]
        for first in (1, 4):  # no solve begins here, and none has begun just before
            agreed = [total["agree"] for total in totals[first : first + 2]]
            if agreed[1]["calls"] - agreed[0]["calls"] == usual["calls"]:
                assert agreed[1]["bytes"] - agreed[0]["bytes"] == usual["bytes"] + 8


# -- ready together --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gated(Inverse):
    """Solves in the background when it is let, or raises."""

    gate: threading.Event = field(default_factory=threading.Event, repr=False)
    error: Exception | None = field(default=None, repr=False)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(30)
            if self.error is not None:
                raise self.error
        return super().solve(matrix, damping)


def wait_for(rank: int, ranks: int, strategy: str, late: int) -> list[bool]:
    """After each step: whether the solve of step 3 is under way still."""
    solver = Gated()
    options = {"solve_every": 6, "background": "ready", "strategy": strategy, "solver": solver}
    run = Run(Case({"statistics_every": 1, **options}), rank, ranks, None, mean_over())
    found = []
    for step in range(12):
        if step == 9 or rank != late:
            solver.gate.set()
            under_way = run.preconditioner.curvature.parts.solves._under_way
            while any(not solution.finished for solution in under_way):
                time.sleep(0.001)
        run.step(step)
        found.append(bool(run.preconditioner.curvature.parts.solves._under_way))
    run.preconditioner.close()
    return found


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_what_one_rank_still_solves_lands_on_none(strategy: str) -> None:
    for late in (0, 1):
        for found in run_ranks(wait_for, 2, strategy, late):
            assert found == [6 <= step < 9 for step in range(12)], late


# -- what fails ------------------------------------------------------------------------------------


def fail(rank: int, ranks: int, strategy: str, error: Exception) -> Any:
    logging.getLogger("soframe").setLevel(logging.ERROR)
    solver = Gated(error=error if rank == 1 else None)
    solver.gate.set()
    options = {"solve_every": INTERVAL, "background": 1, "strategy": strategy, "solver": solver}
    run = Run(Case({"statistics_every": 1, **options}), rank, ranks, None, mean_over())
    run.train(range(INTERVAL + 1))
    before = run.preconditioner.counters["failed_solves"]
    try:
        run.step(INTERVAL + 1)
    finally:
        run.preconditioner.close()
    return run.weights(), before, run.preconditioner.counters["failed_solves"]


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
def test_a_factor_that_cannot_be_solved_keeps_its_data_on_every_rank(strategy: str) -> None:
    error = torch.linalg.LinAlgError("not here")
    results = run_ranks(fail, 2, strategy, error)
    for weights, before, after in results:
        assert torch.equal(weights, results[0][0])
        assert before == 0
        assert 0 < after == results[0][2] < 8


def test_what_a_solver_raises_ends_every_rank() -> None:
    failures = run_ranks(fail, 2, "comm-opt", KeyError("not here"), timeout=30, check=False)
    assert all(isinstance(f, RankFailure) and f.reason == "raised" for f in failures)
    assert failures[1].summary.startswith("KeyError: 'not here'")
    assert "on another rank" in failures[0].summary


# -- state -----------------------------------------------------------------------------------------


def resume(rank: int, ranks: int, cases: list[Case]) -> list[list[bool]]:
    found = []
    for case in cases:
        outcome = []
        for at in range(STEPS):
            whole = Run(case, rank, ranks, average=mean_over()).train(range(at))
            saved = save(whole)
            resumed = load(Run(case, rank, ranks, average=mean_over()), saved)
            for run in (whole, resumed):
                run.train(range(at, STEPS))
            equal = torch.equal(resumed.weights(), whole.weights())
            outcome.append(equal and same(triangles(resumed), triangles(whole)))
            for run in (whole, resumed):
                run.preconditioner.close()
        found.append(outcome)
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_go_on_bit_by_bit_from_every_step() -> None:
    every = {"statistics_every": 1, "solve_every": 4, "background": 2}
    cases = {
        name: Case({"strategy": strategy, "stagger": stagger, **every})
        for name, strategy, stagger in (
            ("comm", "comm-opt", False),
            ("mem", "mem-opt", True),
            ("sharded", EVERY["pairs"], False),
        )
    }
    for own in run_ranks(resume, 2, list(cases.values()), timeout=120):
        for name, outcome in zip(cases, own, strict=True):
            assert outcome == [True] * STEPS, name


def save_on_one(rank: int, ranks: int, step: int) -> str:
    options = {"statistics_every": 1, "solve_every": INTERVAL, "background": 2}
    backend = TorchDistributed(meet_timeout=1.0)
    run = Run(Case(options), rank, ranks, backend, mean_over()).train(range(step))
    if rank == 0:
        run.preconditioner.state_dict()
    time.sleep(0.1)
    return "saved"


def test_a_rank_that_does_not_come_to_a_landing_is_named() -> None:
    first, _ = run_ranks(save_on_one, 2, INTERVAL + 1, timeout=30, check=False)
    assert isinstance(first, RankFailure)
    assert "Preconditioner.state_dict() must be called by every rank" in first.summary
    # Without anything under way it is no call for all, with comm-opt.
    assert run_ranks(save_on_one, 2, INTERVAL) == ["saved"] * 2


def disagree(rank: int, ranks: int) -> None:
    Run(Case({"background": 2 + rank}), rank, ranks, average=mean_over())


def test_ranks_that_do_not_agree_on_it_do_not_start() -> None:
    for failure in run_ranks(disagree, 2, timeout=30, check=False):
        assert isinstance(failure, RankFailure)
        assert "the settings of rank(s) [1] differ from rank 0's" in failure.summary
        assert "has background=" in failure.details
