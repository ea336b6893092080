"""Two models of one architecture, each trained by DistributedDataParallel on half of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.settings import Distribution, Statistics
from soframe.testing import compare, compare_weights
from tests.curvature import fill
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import classes_of, deep, vector

pytestmark = pytest.mark.distributed

KINDS = ("preconditioner", "optimizer", "trust region", "stochastic")
SAMPLES = 8
TYPE2 = Statistics(fisher="type-2")


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    alone = Distribution() if isinstance(model, DistributedDataParallel) else Distribution("single")
    if kind == "optimizer":
        return soframe.Optimizer(model, "kfac", lr=0.1, distribution=alone)
    if kind == "stochastic":
        return soframe.StochasticTrustRegion(model)
    return soframe.TrustRegion(model, "cross-entropy", statistics=TYPE2, distribution=alone)


def train(kind: str, number: int, group: Any, part: slice) -> Tensor:
    """Train the model of one group; without a group, on this process alone."""
    model = fill(deep(), seed=number)
    net = model if group is None else DistributedDataParallel(model, process_group=group)
    if kind == "preconditioner":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribution = Distribution("single" if group is None else None)
        own = soframe.Preconditioner(
            net, optimizer=optimizer, statistics_every=1, solve_every=1, distribution=distribution
        )
    else:
        optimizer = optimizer_of(kind, net)
    for step in range(2 + number):  # the groups do not take turns
        x, y = classes_of(10 * number + step, SAMPLES)

        def closure() -> Tensor:
            return F.cross_entropy(net(x[part]), y[part])  # noqa: B023

        if kind in ("trust region", "stochastic"):
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        closure().backward()
        if kind == "preconditioner":
            own.step()
        optimizer.step()
    if group is not None:
        compare_weights(net)
    return vector(model)


def train_in_groups(rank: int, ranks: int) -> list[Tensor]:
    half = ranks // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, ranks)))]
    number, place = divmod(rank, half)
    part = slice(place * SAMPLES // half, (place + 1) * SAMPLES // half)
    return [train(kind, number, groups[number], part) for kind in KINDS]


def test_the_ranks_are_those_of_the_wrapper() -> None:
    results = run_ranks(train_in_groups, 4)
    for index, kind in enumerate(KINDS):
        for number in range(2):
            expected = train(kind, number, None, slice(None))
            for own in results[2 * number : 2 * number + 2]:
                compare(own[index], expected, f"{kind}, model {number}")
