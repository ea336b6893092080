"""ZeroRedundancyOptimizer spreads the optimizer's state, and leaves gradients where they are."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import soframe
from tests.distributed.harness import RankFailure, run_ranks
from tests.stacks.fully_sharded import SAMPLES, batch, make_net, weights

SETTINGS = {"strategy": "mem-opt", "damping": 0.1, "kl_clip": 1e-3, "layers": "all"}


def train(rank: int, ranks: int, method: str = "kfac", passes: int = 1) -> dict[str, Tensor]:
    """Train; with several passes in each step, one of them is spoilt on a rank."""
    model = make_net()
    called, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ranks > 1:
        called = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = ZeroRedundancyOptimizer(
            called.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
        )
    own = soframe.Preconditioner(
        called, method, optimizer=optimizer, statistics_every=1, solve_every=2, **SETTINGS
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(5):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        every = zip(tokens[mine].chunk(passes), targets[mine].chunk(passes), strict=True)
        for number, (x, y) in enumerate(every):
            loss = 0.5 * (called(x) - y).square().sum(1).mean() / passes
            alone = ranks == 1 or number == passes - 1
            with nullcontext() if alone else called.no_sync():
                spoilt = passes > 1 and step == 3 and rank == 0
                (loss * float("nan") if spoilt else loss).backward()
        own.step()
        optimizer.step()
        schedule.step()
    assert own.counters["skipped_updates"] == (passes > 1)
    own.close()
    return weights(model)


@pytest.mark.distributed
@pytest.mark.parametrize(("method", "passes"), [("kfac", 1), ("shampoo", 2)])
def test_it_is_one_process(method: str, passes: int) -> None:
    expected, start = train(0, 1, method, passes), weights(make_net())
    for found in run_ranks(train, 2, method, passes):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)
            assert torch.equal(weight, start[name]) == name.startswith("unused"), name


def inside(rank: int, ranks: int) -> None:
    model = make_net()
    ZeroRedundancyOptimizer(model.parameters(), optimizer_class=soframe.Optimizer, lr=0.1)


@pytest.mark.distributed
def test_it_does_not_take_an_optimizer_of_a_whole_model() -> None:
    """Whose state `strategy="sharded"` spreads over ranks, as the guide says."""
    for failure in run_ranks(inside, 2, check=False):
        assert isinstance(failure, RankFailure)
        assert isinstance(failure.exception, TypeError)
        assert "model must be" in str(failure.exception)
