"""Layers that some ranks use, with gradients that are zeros on some ranks and none on others."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe.strategies import HybridOpt
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

STEPS = 9
# Method, strategy, how gradients come, and the intervals of statistics and solves.
CASES: list[tuple[str, Any, str, int, int]] = [
    ("kfac", "comm-opt", "averaged", 1, 2),
    ("kfac", "mem-opt", "averaged", 3, 3),
    ("kfac", "sharded", "averaged", 3, 6),
    ("ekfac", HybridOpt(gradient_workers=2), "averaged", 2, 2),
    ("tnt", "mem-opt", "averaged", 2, 2),
    ("kfac", "mem-opt", "local", 2, 2),
    ("ekfac", "sharded", "local", 3, 3),
]


class Experts(nn.Module):
    """A residual layer with the sum of some experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        hidden = self.inner(x).tanh()
        parts = [self.experts[number](hidden).tanh() for number in used]
        return self.head(torch.stack([hidden, *parts]).sum(0))


def average(model: nn.Module, ranks: int) -> None:
    """Average gradients that any rank has; the others stay as they are on each rank."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        present = torch.tensor(float(gradient is not None and bool(gradient.any())))
        dist.all_reduce(present)
        if present > 0:
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(gradient)
            gradient /= ranks


def train(rank: int, ranks: int, case: tuple[str, Any, str, int, int]) -> Tensor:
    warnings.simplefilter("ignore")  # intervals, and layers that are used between turns alone
    method, strategy, gradients, statistics_every, solve_every = case
    common, own = random.Random(0), random.Random(1 + rank)
    torch.manual_seed(0)
    model = Experts().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.1)
    preconditioner = soframe.Preconditioner(
        model,
        method,
        strategy=strategy,
        optimizer=optimizer,
        statistics_every=statistics_every,
        solve_every=solve_every,
        distribution=soframe.Distribution(gradients=gradients),
    )
    for step in range(STEPS):
        model.zero_grad(set_to_none=own.random() < 0.5)
        frozen = common.choice([0, 1, 2, 3, None, None])
        for number, expert in enumerate(model.experts):
            expert.requires_grad_(number != frozen)
        used = [number for number in range(4) if own.random() < 0.5]
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(2 + own.randrange(3), 4, generator=generator, dtype=torch.float64)
        model(x, used).square().sum(1).mean().backward()
        if gradients == "averaged":
            average(model, ranks)
        preconditioner.step()
        optimizer.step()
    preconditioner.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_all(rank: int, ranks: int) -> list[Tensor]:
    return [train(rank, ranks, case) for case in CASES]


THOROUGH = [pytest.param(ranks, marks=pytest.mark.thorough) for ranks in (3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *THOROUGH])
def test_ranks_take_the_same_steps(ranks: int) -> None:
    first, *others = run_ranks(train_all, ranks, timeout=120)
    for results in others:
        for case, weights, expected in zip(CASES, results, first, strict=True):
            assert torch.equal(weights, expected), case
            assert weights.isfinite().all()
