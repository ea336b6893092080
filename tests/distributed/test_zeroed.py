"""Padding, and gradients zeroed without a step: four ranks are one process, two go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import soframe
from soframe.testing import compare
from tests import kit
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
SAMPLES, POSITIONS, STEPS, MIDDLE = 8, 3, 6, 3
KEEP = torch.tensor([[True, True, True], [True, True, False]] * (SAMPLES // 2))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained(
    rank: int, ranks: int, method: str, strategy: str, steps: range, state: Any
) -> tuple[dict[str, Tensor], Any]:
    """Train in two micro-batches, on ranks after gradients that are zeroed; return the weights."""
    model = network()
    own = soframe.Optimizer(
        model, method, lr=0.05, strategy=strategy, statistics_every=1, solve_every=2
    )
    if state is not None:
        model.load_state_dict(state["model"])
        own.load_state_dict(state["optimizer"])
    average = kit.Averaging(model)
    for step in steps:
        x = torch.randn(SAMPLES, POSITIONS, 4, generator=torch.Generator().manual_seed(step))
        share = SAMPLES // ranks
        part, keep = x.double()[rank * share :][:share], KEEP[rank * share :][:share]
        if ranks > 1:  # a generator's loss, of which nothing must stay
            model(5 * part).square().sum().backward()
        own.zero_grad()
        for half, kept in zip(part.split(share // 2), keep.split(share // 2), strict=True):
            own.preconditioner.count(len(half), rows=kept)
            (model(half)[kept].square().sum() / len(half) / 2).backward()
        average.step()
        own.step()
    state = {"model": model.state_dict(), "optimizer": own.state_dict()}
    own.close()
    return dict(model.named_parameters()), copy.deepcopy(state)


@pytest.mark.parametrize(
    ("method", "strategy"), [("kfac", "sharded"), ("ekfac", "mem-opt"), ("tnt", "comm-opt")]
)
def test_four_ranks_are_one_process_and_two_go_on(method: str, strategy: str) -> None:
    every = range(STEPS)
    alone, _ = trained(0, 1, method, strategy, every, None)
    _, state = run_ranks(trained, 4, method, strategy, every[:MIDDLE], None)[0]
    for weights, _ in run_ranks(trained, 2, method, strategy, every[MIDDLE:], state):
        for name, weight in weights.items():
            compare(weight, alone[name], name, rtol=1e-9)


def factors_of_the_last(rank: int, ranks: int, fisher: str, to_none: bool) -> list[list[Tensor]]:
    """Factors after a pass, with and without another one whose gradients were zeroed."""
    found = []
    for passes in (1, 2):
        model = network()
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        statistics = soframe.Statistics(fisher=fisher, loss="squared-error")
        own = soframe.Preconditioner(model, statistics=statistics)
        for seed in range(2 - passes, 2):
            model.zero_grad(set_to_none=to_none)
            x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(seed)).double()
            outputs = model(x)
            own.observe(outputs)
            outputs.square().sum().div(SAMPLES).backward()
        own.step()
        found.append([block.running[name] for block in own.blocks for name in "AG"])
        own.close()
    return found


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
def test_statistics_of_zeroed_shards_go(fisher: str, to_none: bool) -> None:
    """fully_shard reduces gradients at the end of a pass, and its zeros are local tensors'."""
    for once, twice in run_ranks(factors_of_the_last, 2, fisher, to_none):
        for alone, behind in zip(once, twice, strict=True):
            compare(behind, alone, "factor", rtol=1e-12)
