"""Statistics in turns on ranks: one process's weights, and the planned bytes of every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from soframe import Placement
from soframe.comm import TorchDistributed
from soframe.strategies import Turns, all_turns
from tests.distributed.harness import run_ranks
from tests.distributed.test_accounting import NAMES, SHAPES
from tests.distributed.test_equivalence import STRATEGIES
from tests.distributed.test_plans import EVERY, Traffic, add
from tests.distributed.test_staggered import train_all, train_and_count
from tests.distributed.training import SAMPLES, Case, train_alone, train_rank

pytestmark = pytest.mark.distributed

EACH, SOLVES, STEPS = 3, 6, 9
OPTIONS = {"statistics_every": EACH, "solve_every": SOLVES, "stagger": True}
# Positions: of maps of 3 x 3 and 2 x 2.
ROWS = {"conv": 9, "grouped": 4, "unused": 0, "hidden": 1, "head": 1}


def turns_of(placement: Placement) -> Turns:
    rows = [SAMPLES * ROWS[name] for name in NAMES]
    return all_turns(placement, EACH, SOLVES, rows, NAMES)


def planned_step(placement: Placement, rank: int, step: int) -> Traffic:
    its = turns_of(placement)
    due, solve = (
        [name for name, turn in zip(NAMES, own, strict=True) if turn == step % every or step == 0]
        for own, every in ((its.statistics, EACH), (its.solves, SOLVES))
    )
    found = placement.traffic(rank, statistics=due, solve=solve, used=list(SHAPES))
    # Once, what statistics are made of: of each block its rows, and in two numbers whose input.
    rows = {"bytes": 8 * 3 * len(NAMES), "calls": 1}
    return add(found, {"start": rows, "total": rows}) if step == 0 else found


@pytest.mark.parametrize(
    ("ranks", "solver"),
    [(2, "inverse"), pytest.param(4, "eigen", marks=[pytest.mark.slow, pytest.mark.thorough])],
)
def test_the_bytes_of_every_step_are_those_of_its_blocks(ranks: int, solver: str) -> None:
    names = list(EVERY) if ranks > 2 else ["mem", "pairs"]
    work = (names, {**OPTIONS, "solver": solver}, STEPS)
    for rank, own in enumerate(run_ranks(train_and_count, ranks, *work)):
        for name, (placement, totals) in zip(names, own, strict=True):
            assert len(set(turns_of(placement).statistics)) == EACH
            for step in range(STEPS):
                expected = add(totals[step], planned_step(placement, rank, step))
                assert totals[step + 1] == expected, (name, rank, step)


@pytest.mark.parametrize(
    ("ranks", "solver"),
    [(2, "eigen"), pytest.param(3, "inverse", marks=[pytest.mark.slow, pytest.mark.thorough])],
)
def test_ranks_are_one_process(ranks: int, solver: str) -> None:
    options = {**OPTIONS, "solver": solver}
    cases = {
        name: Case({"strategy": strategy, **options}, steps=STEPS)
        for name, strategy in STRATEGIES.items()
        if ranks > 2 or name in ("mem", "deferred")
    }
    # One rank has no data, the other all.
    shards = ((SAMPLES,), *((0,),) * (ranks - 1))
    cases["uneven"] = Case({"strategy": "mem-opt", **options}, shards, "global", STEPS)
    alone = train_alone(Case(options, steps=STEPS))
    for other in ("solves", False):
        plain = train_alone(Case({**options, "stagger": other}, steps=STEPS))
        assert not torch.allclose(alone, plain)
    for own in run_ranks(train_all, ranks, list(cases.values())):
        for name, weights in zip(cases, own, strict=True):
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-10, msg=name)


def train_waiting(rank: int, ranks: int, strategies: list[Any]) -> list[bool]:
    """Whether what travels while the model goes on comes to the same bits."""
    found = []
    for strategy in strategies:
        case = Case({"strategy": strategy, **OPTIONS}, steps=STEPS)
        weights = [
            train_rank(rank, ranks, case, lambda o=o: TorchDistributed(overlap=o)).weights()
            for o in (True, False)
        ]
        found.append(torch.equal(*weights))
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_overlap_changes_no_bit() -> None:
    strategies = list(EVERY.values())
    for own in run_ranks(train_waiting, 3, strategies):
        assert own == [True] * len(strategies)
