"""What every strategy has in common: one process's steps on equal data, and no work done twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from soframe.comm import TorchDistributed
from soframe.estimate import solves, updates
from soframe.registry import KINDS
from soframe.solvers import Inverse
from soframe.strategies import Strategy
from tests.distributed.harness import run_ranks
from tests.distributed.test_plans import EVERY, train_on_paper
from tests.distributed.training import Case, Run, mean_over, train_alone

pytestmark = pytest.mark.distributed

EXACT = [name for name, strategy in EVERY.items() if getattr(strategy, "wire", None) is None]
OPTIONS = {"statistics_every": 1, "solve_every": 2}
STEPS = 3


def test_every_strategy_that_has_a_name_is_here():
    tested = {type(strategy) for strategy in EVERY.values()}
    named = {type(KINDS["strategy"].build(n, Strategy)) for n in soframe.available("strategy")}
    assert named <= tested
    assert named <= {type(EVERY[name]) for name in EXACT}


def with_equal_data(rank: int, ranks: int, gradients: str, fused: bool) -> dict[str, Tensor]:
    found = {}
    for name in EXACT:
        case = Case({"strategy": EVERY[name], "gradients": gradients, **OPTIONS}, steps=STEPS)
        average = mean_over() if gradients == "averaged" else None
        # Rank 0 of one: it takes the whole batch, like all the others.
        run = Run(case, 0, 1, TorchDistributed(fused=fused), average).train()
        run.preconditioner.close()
        found[name] = run.weights()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "gradients", "fused"),
    [(3, "local", True), pytest.param(6, "averaged", False, marks=pytest.mark.thorough)],
)
def test_where_all_ranks_have_the_same_data_they_are_one_process(ranks, gradients, fused):
    """Whoever contributes statistics: also strategies that take them of some ranks alone."""
    expected = train_alone(Case({**OPTIONS}, steps=STEPS))
    for rank, own in enumerate(run_ranks(with_equal_data, ranks, gradients, fused, timeout=120)):
        for name, weights in own.items():
            torch.testing.assert_close(
                weights, expected, rtol=0, atol=1e-10, msg=lambda m, w=(rank, name): f"{w}: {m}"
            )


@pytest.mark.parametrize("name", ["mem", "sharded", "owner-local", "pairs, deferred"])
def test_nothing_is_solved_or_preconditioned_twice(name, monkeypatch):
    """With one gradient worker each, over all ranks together; whose gradients are local."""
    done: Counter[tuple[Any, ...]] = Counter()
    compute, problems = updates.Update.compute, solves.Run.problems

    def count(update: Any, *args: Any) -> Any:
        done.update(("preconditioned", block.name) for block in update.blocks)
        return compute(update, *args)

    def count_problems(run: Any, shares: Any) -> Any:
        done.update(("solved", b.name, job.factor.name) for job in run.owned for b in run.blocks)
        return problems(run, shares)

    monkeypatch.setattr(updates.Update, "compute", count)
    monkeypatch.setattr(solves.Run, "problems", count_problems)
    widths, ranks = [3, 5, 4, 6, 2], 3
    for rank in range(ranks):
        own, *_ = train_on_paper(
            EVERY[name], widths, rank, ranks, Inverse(), gradients="local", **OPTIONS
        )
        assert all(len(place.gradient_workers) == 1 for place in own.placement.blocks)
    blocks = [str(i) for i in range(len(widths) - 1)]
    # Of five steps, the first, third and fifth solve.
    expected = {("preconditioned", block): 5 for block in blocks}
    expected |= {("solved", block, factor): 3 for block in blocks for factor in "AG"}
    assert dict(done) == expected
