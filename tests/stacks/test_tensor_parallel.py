"""Under a tensor-parallel plan ranks train as one process does with whole layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.strategies import Sharded
from tests.distributed.harness import run_ranks
from tests.stacks.fully_sharded import weights
from tests.stacks.tensor_parallel import Case, alone, make_net, train

pytestmark = pytest.mark.distributed

CLIPS = {"kl_clip": 1e-4, "norm_clip": 0.03}
MEM = {"strategy": "mem-opt"}
SEQUENCE: dict[str, Any] = {"kind": "sequence"}

CASES: dict[str, Case] = {
    "comm": Case(),
    "mem": Case(options=MEM),
    "comm clips": Case(options=CLIPS),
    "mem clips": Case(options={**MEM, **CLIPS}),
    "sharded": Case(options={"strategy": Sharded(group=None, deferred=True)}),
    "sequence": Case(**SEQUENCE, options={"layers": "all"}),
    "sequence mem": Case(**SEQUENCE, options={**MEM, **CLIPS, "layers": "all"}),
    "distributed": Case(kind="distributed", options=MEM),
    "passes": Case(passes=2, options=MEM),
    "global": Case(passes=2, options={"loss_average": "global"}),
    "stagger": Case(options={**MEM, "stagger": True, "statistics_every": 2}),
    "observed": Case(observed=True, options=MEM),
    "checkpoints": Case(checkpoints=True, options=MEM),
    "background": Case(options={**MEM, "background": 1}),
    "after": Case(when="after", options=MEM),
    "spoilt": Case(spoilt=2, options=MEM),
    "ekfac": Case(method="ekfac"),
    "own kfac": Case(owner="own", options=MEM),
    "own muon": Case(owner="own", method="muon", options=MEM),
    "own adamw": Case(owner="own", method="adamw"),
    "own sequence": Case(owner="own", method="muon", **SEQUENCE, options=MEM),
    "own shampoo": Case(owner="own", method="shampoo", options=MEM),
    "own sequence comm": Case(owner="own", method="adamw", **SEQUENCE),
}

Result = tuple[dict[str, Tensor], dict[str, int]]


def train_all(rank: int, ranks: int, cases: list[Case]) -> list[Result]:
    found = []
    for case in cases:
        run = train(case, ranks)
        run.preconditioner.close()
        found.append((weights(run.model), run.preconditioner.counters))
    return found


def assert_same(results: list[Result], case: Case, what: str) -> None:
    expected, start = alone(case), weights(make_net())
    for found, counters in results:
        for name, weight in found.items():
            where = f"{what}, {name}"
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=where)
            assert not torch.equal(weight, start[name]), where
        skipped = counters.pop("skipped_updates")
        assert skipped == (case.spoilt is not None)
        assert counters.pop("skipped_statistics") in (0, skipped)
        assert not any(counters.values())


@pytest.mark.parametrize("names", [tuple(CASES)[:11], tuple(CASES)[11:]], ids=lambda n: n[0])
def test_ranks_are_one_process(names: tuple[str, ...]) -> None:
    results = run_ranks(train_all, 2, [CASES[name] for name in names], timeout=120)
    for index, name in enumerate(names):
        assert_same([own[index] for own in results], CASES[name], name)
