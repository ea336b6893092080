"""Diagonals of long sides, cut projections and grafts: four ranks are one process, two go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from soframe.methods import EKFAC, FOOF, KFAC, TNT, Chain, Momentum, Shampoo, SOAPNorMuon
from soframe.settings import DAMPING
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over, train_alone
from tests.planning.kit import little_traffic

Strategy = str | soframe.Strategy

# Of twelve samples; one rank has none in a step's second micro-batch.
SHARDS = ((2, 1), (3,), (1, 1, 1), (3,))
HALVES = ((4, 2), (6,))
AT, STEPS = 3, 6
# In a group it measures, and plans within a limit that is not reached.
LIMITED = soframe.Auto("1MiB", budget=0.0)
UNDAMPED: dict[str, Any] = {"damping": DAMPING, "decay": 0.95, "kl_clip": 0.2}
METHODS: dict[str, dict[str, Any]] = {
    # The layers have sides of 3, 5, 6, 8, 9 and 17.
    "kfac": {"method": KFAC(max_size=5)},
    "ekfac": {"method": EKFAC(max_size=5), "solve_every": 2},
    "tnt": {"method": TNT(max_size=5)},
    "foof": {"method": Chain((FOOF(max_size=6), Momentum(0.5))), "kl_clip": 0.2},
    "shampoo": {"method": Shampoo(epsilon=0.1, graft_steps=2), **UNDAMPED},
    "cut": {
        "method": SOAPNorMuon(max_ratio=1.5),
        "cut": {"^hidden$": (3, 2), "^conv$": 2},
        **UNDAMPED,
    },
}


def case_of(name: str, strategy: Strategy = "comm-opt", **changes: Any) -> Case:
    options = {"solve_every": 1, "strategy": strategy, **METHODS[name]}
    return Case(options, loss_average="global", steps=STEPS, **changes)


def saved(rank: int, ranks: int, names: list[str], strategy: Strategy) -> list[tuple[Any, ...]]:
    """The state halfway and the weights then and at the end, of each case."""
    found = []
    for name in names:
        with little_traffic():
            run = Run(case_of(name, strategy, shards=SHARDS), rank, ranks, average=mean_over())
        run.train(range(AT))
        half = run.preconditioner.state_dict(), run.model.state_dict()
        found.append((*({k: _copied(v) for k, v in one.items()} for one in half),))
        found[-1] += (run.train(range(AT, STEPS)).weights(),)
        run.preconditioner.close()
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def resumed(
    rank: int, ranks: int, names: list[str], strategy: Strategy, states: Any
) -> list[Tensor]:
    found = []
    for name, (state, weights, _) in zip(names, states, strict=True):
        with little_traffic():
            run = Run(case_of(name, strategy, shards=HALVES), rank, ranks, average=mean_over())
        run.model.load_state_dict(weights)
        run.preconditioner.load_state_dict(state)
        found.append(run.train(range(AT, STEPS)).weights())
        run.preconditioner.close()
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("mem-opt", ["kfac", "tnt", "cut"]),
        ("sharded", ["ekfac", "foof", "shampoo", "cut"]),
        pytest.param("mem-opt", ["ekfac", "foof", "shampoo"], marks=pytest.mark.thorough),
        pytest.param("sharded", ["kfac", "tnt"], marks=pytest.mark.thorough),
        pytest.param(LIMITED, ["kfac"], marks=pytest.mark.thorough),  # each case measures
    ],
    ids=str,
)
def test_four_ranks_are_one_process_and_two_go_on(strategy: Strategy, names: list[str]) -> None:
    alone = [train_alone(case_of(name)) for name in names]
    halfway = run_ranks(saved, 4, names, strategy)
    for results in halfway:
        for name, one, (*_, weights) in zip(names, alone, results, strict=True):
            torch.testing.assert_close(weights, one, rtol=0, atol=1e-9, msg=f"{name}: four ranks")
    for results in run_ranks(resumed, 2, names, strategy, halfway[0]):
        for name, one, weights in zip(names, alone, results, strict=True):
            torch.testing.assert_close(weights, one, rtol=0, atol=1e-9, msg=f"{name}: resumed on 2")
