"""Staggered solves on ranks: one process's weights, the planned bytes, the plan's settlements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from soframe import Placement
from soframe.solvers import Eigen, Inverse
from soframe.strategies import turns
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.test_accounting import SHAPES
from tests.distributed.test_equivalence import STRATEGIES
from tests.distributed.test_plans import EVERY, Traffic, add
from tests.distributed.training import Case, Run, mean_over, train_alone, train_cases, train_rank

pytestmark = pytest.mark.distributed

INTERVAL, STEPS = 3, 7


def planned_step(placement: Placement, rank: int, step: int) -> Traffic:
    """Statistics at every step; the first solve is that of all blocks."""
    its = turns(placement, INTERVAL)
    pairs = zip(placement.work, its, strict=True)
    due = [work.name for work, turn in pairs if turn == step % INTERVAL or step == 0]
    return placement.traffic(rank, statistics=True, solve=due, used=list(SHAPES))


def train_and_count(
    rank: int, ranks: int, names: list[str], options: dict[str, Any], steps: int
) -> list[Any]:
    """For each strategy the placement, and the traffic up to each step."""
    found = []
    for name in names:
        case = Case({"strategy": EVERY[name], **options})
        run = Run(case, rank, ranks, None, mean_over())
        totals = [run.preconditioner.traffic()]
        for step in range(steps):
            run.step(step)
            totals.append(run.preconditioner.traffic())
        found.append((run.preconditioner.placement, totals))
    return found


@pytest.mark.parametrize(
    ("ranks", "solver"),
    [(2, Eigen()), pytest.param(4, Inverse(), marks=[pytest.mark.slow, pytest.mark.thorough])],
    ids=str,
)
def test_the_bytes_of_every_step_are_those_of_its_blocks(ranks: int, solver: Any) -> None:
    names = list(EVERY) if ranks > 2 else ["deferred", "pairs"]
    options = {"statistics_every": 1, "solve_every": INTERVAL, "stagger": True}
    work = (names, {**options, "solver": solver}, STEPS)
    for rank, own in enumerate(run_ranks(train_and_count, ranks, *work)):
        for name, (placement, totals) in zip(names, own, strict=True):
            for step in range(STEPS):
                expected = add(totals[step], planned_step(placement, rank, step))
                assert totals[step + 1] == expected, (name, rank, step)


@pytest.mark.parametrize(
    ("ranks", "solver"),
    [(2, "eigen"), pytest.param(3, "inverse", marks=[pytest.mark.slow, pytest.mark.thorough])],
)
def test_ranks_are_one_process(ranks: int, solver: str) -> None:
    every = {"statistics_every": 1, "solve_every": INTERVAL, "stagger": True, "solver": solver}
    cases = {
        name: Case({"strategy": strategy, **every}, steps=STEPS)
        for name, strategy in STRATEGIES.items()
        if ranks > 2 or name in ("mem", "deferred")
    }
    alone = train_alone(Case(every, steps=STEPS))
    assert not torch.allclose(alone, train_alone(Case({**every, "stagger": False}, steps=STEPS)))
    for own in run_ranks(train_cases, ranks, list(cases.values())):
        for name, weights in zip(cases, own, strict=True):
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-10, msg=name)


def train_with_other_turns(rank: int, ranks: int) -> None:
    train_rank(rank, ranks, Case({"solve_every": 2, "stagger": rank == 1}, steps=1))


def test_ranks_that_do_not_agree_on_it_do_not_start() -> None:
    for failure in run_ranks(train_with_other_turns, 2, timeout=30, check=False):
        assert isinstance(failure, RankFailure)
        assert "the settings of rank(s) [1] differ from rank 0's" in failure.summary


@dataclass(frozen=True)
class Fails(Inverse):
    """Cannot solve factors of one size again."""

    times: ClassVar[list[int]] = []

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.shape[-1] == 17:
            self.times.append(1)
            if len(self.times) > 1:
                raise torch.linalg.LinAlgError("not this one")
        return super().solve(matrix, damping)


def solve_badly(rank: int, ranks: int) -> tuple[Tensor, dict[str, int]]:
    Fails.times.clear()
    case = Case({"solver": Fails(), "solve_every": INTERVAL, "stagger": True}, steps=STEPS)
    run = train_rank(rank, ranks, case)
    return run.weights(), run.preconditioner.counters


@pytest.mark.slow
def test_a_failure_is_that_of_its_turn_alone() -> None:
    alone, counters = solve_badly(0, 1)
    # After the first solve the block has two turns, and one retry in float64 is none.
    assert counters["failed_solves"] == 2
    for weights, own in run_ranks(solve_badly, 2):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-10)
        assert own == counters
