"""ZeroRedundancyOptimizer spreads the optimizer's state, and leaves gradients where they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import soframe
from tests.distributed.harness import run_ranks
from tests.stacks.fully_sharded import SAMPLES, batch, make_net, weights

SETTINGS = {"strategy": "mem-opt", "damping": 0.1, "kl_clip": 1e-3, "layers": "all"}


def train(rank: int, ranks: int) -> dict[str, Tensor]:
    model = make_net()
    called, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ranks > 1:
        called = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = ZeroRedundancyOptimizer(
            called.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
        )
    own = soframe.Preconditioner(
        called, optimizer=optimizer, statistics_every=1, solve_every=2, **SETTINGS
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(5):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        (0.5 * (called(tokens[mine]) - targets[mine]).square().sum(1).mean()).backward()
        own.step()
        optimizer.step()
        schedule.step()
    own.close()
    return weights(model)


@pytest.mark.distributed
def test_it_is_one_process() -> None:
    expected, start = train(0, 1), weights(make_net())
    for found in run_ranks(train, 2):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)
            assert torch.equal(weight, start[name]) == name.startswith("unused"), name
