"""Few rows of alike layers, multiplied together: ranks come to the same as one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from soframe import checkpoint
from soframe.estimate.window import Sums
from tests.distributed.harness import run_ranks
from tests.distributed.training import LR, SAMPLES, Case, Run, mean_over, preconditioner_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

AT, STEPS = 2, 4
# By number of ranks: micro-batches of several sizes, and a rank without samples.
SHARDS = {1: ((SAMPLES,),), 2: ((5, 1), (6,)), 4: ((2, 1), (3,), (0,), (4, 2))}


class Deep(nn.Module):
    """Two pairs of alike layers, which are not square, and a head."""

    def __init__(self) -> None:
        super().__init__()
        sides = [(6, 4), (4, 6), (6, 4), (4, 6)]
        self.layers = nn.ModuleList([nn.Linear(*side, dtype=torch.float64) for side in sides])
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :6]
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@dataclass
class DeepRun(Run):
    """A run that counts the products of rows."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Deep()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.preconditioner = preconditioner_of(self.model, self.optimizer, self.case, self.backend)


def trained(
    rank: int, ranks: int, options: dict[str, Any], folder: Path, goes_on: bool
) -> tuple[Tensor, int]:
    """Train up to a checkpoint, or on from it; return weights, and the number of products."""
    products, multiply = 0, Sums.multiply

    def counted(self: Sums) -> None:
        nonlocal products
        products += len(self._rows)
        multiply(self)

    case = Case(options, shards=SHARDS[ranks], loss_average="global")
    run = DeepRun(case, rank, ranks, average=mean_over() if ranks > 1 else None)
    state: dict[str, Any] = {"model": run.model.state_dict()}
    if goes_on:
        dcp.load(state, checkpoint_id=folder)
        checkpoint.load(run.preconditioner, folder)
    Sums.multiply = counted  # type: ignore[method-assign]
    try:
        run.train(range(AT, STEPS) if goes_on else range(AT))
    finally:
        Sums.multiply = multiply  # type: ignore[method-assign]
    weights = run.weights()
    if not goes_on:
        state["preconditioner"] = checkpoint.part(run.preconditioner)
        dcp.save(state, checkpoint_id=folder)
    run.preconditioner.close()
    return weights, products


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "hybrid-opt", "sharded"])
@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.covering(together=1)
def test_ranks_multiply_the_rows_of_one_process(method: str, strategy: str, tmp_path: Path) -> None:
    """Four ranks for two steps, and two ranks for two more."""
    options = {"method": method, "solve_every": 2 if method == "ekfac" else 1}
    alone = DeepRun(Case(options, shards=SHARDS[1], loss_average="global"))
    expected = [alone.train(steps).weights() for steps in (range(AT), range(AT, STEPS))]
    alone.preconditioner.close()
    options["strategy"] = strategy
    for ranks, weights in zip((4, 2), expected, strict=True):
        found = run_ranks(trained, ranks, options, tmp_path, ranks == 2)
        for (of_rank, products), shard in zip(found, SHARDS[ranks], strict=True):
            torch.testing.assert_close(of_rank, weights, rtol=1e-9, atol=1e-11)
            if strategy == "comm-opt":  # others may place alike layers apart
                assert (products > 0) == (sum(shard) > 0)
