"""A rank without data or a rank that is late changes nothing but the waiting."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.strategies import Sharded
from tests.distributed.harness import run_ranks
from tests.distributed.training import SAMPLES, Case, Run, mean_over, train_alone

pytestmark = pytest.mark.distributed

STRATEGIES: dict[str, Any] = {
    "comm-opt": "comm-opt",
    "sharded": "sharded",
    "sharded, deferred": Sharded(deferred=True),
}
OPTIONS = {"statistics_every": 1, "solve_every": 2}
STEPS = 4


def case_of(name: str, **keywords: Any) -> Case:
    return Case({**OPTIONS, "strategy": STRATEGIES[name]}, steps=STEPS, **keywords)


def train_with_an_empty_rank(rank: int, ranks: int) -> list[Tensor]:
    """The rank that is empty is another one at each step, so each owner is once."""
    found = []
    for name in STRATEGIES:
        run = Run(case_of(name, loss_average="global"), rank, ranks, average=mean_over())
        for step in range(STEPS):
            shards = [(SAMPLES // (ranks - 1),)] * ranks
            shards[step % ranks] = (0,)
            run.case = case_of(name, shards=tuple(shards), loss_average="global")
            run.step(step)
        found.append(run.weights())
        run.preconditioner.close()
    return found


def test_a_rank_without_data_leaves_the_result_to_the_others():
    for own in run_ranks(train_with_an_empty_rank, 3):
        for name, weights in zip(STRATEGIES, own, strict=True):
            expected = train_alone(case_of(name))
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def train_late(rank: int, ranks: int, late: int | None) -> list[Tensor]:
    found = []
    for name in STRATEGIES:
        run = Run(case_of(name), rank, ranks, average=mean_over())

        def dawdle(run: Run) -> None:
            if run.rank == late:
                time.sleep(0.1)

        for step in range(STEPS):
            dawdle(run)  # before the gradients are averaged,
            run.step(step, dawdle)  # and after, when the others wait within the step
        found.append(run.weights())
        run.preconditioner.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_slow_rank_is_waited_for(late):
    punctual = run_ranks(train_late, 2, None)
    for own, expected in zip(run_ranks(train_late, 2, late), punctual, strict=True):
        for weights, those in zip(own, expected, strict=True):
            assert torch.equal(weights, those)
