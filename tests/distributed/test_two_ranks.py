"""Two ranks take the steps of one process on both of their batches: the smallest such test."""

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.testing import compare
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

SAMPLES = 3


def net() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))


def train(rank: int, world_size: int, strategy: str, together: int) -> dict[str, dict[str, Tensor]]:
    """Take two steps; a rank's batch is ``together`` consecutive shards of the whole."""
    model = net()
    own = soframe.Preconditioner(
        model, strategy=strategy, solve_every=1, kl_clip=None, statistics_every=1
    )
    for step in range(2):
        inputs, targets = randn(6, 2, seed=step), randn(6, 2, seed=10 + step)
        shard = slice(rank * SAMPLES, (rank + together) * SAMPLES)
        model.zero_grad()
        half_square(model(inputs[shard]), targets[shard]).backward()
        for parameter in model.parameters():  # what DistributedDataParallel does
            if world_size > 1:
                torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world_size
        own.step()
    return {
        "factors": {
            f"{b.name}.{f.name}": b.running.matrix(f) for b in own._blocks for f in b.factors
        },
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_two_ranks_are_one_process_on_both_batches(strategy: str) -> None:
    alone = train(0, 1, "comm-opt", 2)
    for rank, result in enumerate(run_ranks(train, 2, strategy, 1)):
        for kind, tensors in result.items():
            for name, tensor in tensors.items():
                compare(tensor, alone[kind][name], f"rank {rank}: {kind} of {name}")
