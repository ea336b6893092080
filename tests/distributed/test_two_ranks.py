"""Two ranks take the steps of one process on both of their batches: the smallest such test."""

import pytest
from torch import Tensor, nn

from soframe.testing import compare
from tests import kit
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

SAMPLES = 3


def net() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))


def results(rank: int, _: int, strategy: str, together: int) -> dict[str, dict[str, Tensor]]:
    """Take two steps; a rank's batch is ``together`` consecutive shards of the whole."""
    model = net()
    own = kit.precondition(model, strategy=strategy)
    shard = slice(rank * SAMPLES, (rank + together) * SAMPLES)

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs, targets = randn(6, 2, seed=step), randn(6, 2, seed=10 + step)
        return half_square(model(inputs[shard]), targets[shard])

    kit.train(model, loss, range(2), kit.Averaging(model), own)
    return {
        "factors": {
            f"{b.name}.{f.name}": b.running.matrix(f) for b in own._blocks for f in b.factors
        },
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_two_ranks_are_one_process_on_both_batches(strategy: str) -> None:
    alone = results(0, 1, "comm-opt", 2)
    for rank, result in enumerate(run_ranks(results, 2, strategy, 1)):
        for kind, tensors in result.items():
            for name, tensor in tensors.items():
                compare(tensor, alone[kind][name], f"rank {rank}: {kind} of {name}")
