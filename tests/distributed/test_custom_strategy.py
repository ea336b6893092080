"""The strategy that the guide composes gives, on real ranks, the steps of one process."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.testing import compare
from tests import kit
from tests.distributed.harness import run_ranks
from tests.docs.page import blocks

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "custom-strategy.md"


def node_opt(ranks_per_node: int) -> soframe.Strategy:
    first = blocks(GUIDE.read_text(encoding="utf-8"))[0]
    guide = types.ModuleType("guide")
    sys.modules["guide"] = guide  # where dataclasses look up annotations
    exec(compile(first.code, str(GUIDE), "exec"), guide.__dict__)
    made = guide.NodeOpt(ranks_per_node=ranks_per_node)
    assert isinstance(made, soframe.Strategy)
    return made


def weights_of(
    model: nn.Module,
    share: slice,
    strategy: soframe.Strategy | str,
    backend: soframe.Backend | None = None,
) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = soframe.Preconditioner(
        model,
        optimizer=optimizer,
        strategy=strategy,
        distribution=soframe.Distribution(backend=backend),
        solve_every=2,
        statistics_every=1,
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        return nn.functional.mse_loss(model(x[share]), y[share])

    return kit.train(model, loss, range(4), preconditioner, optimizer)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)]
    return nn.Sequential(*layers).double()


def on_rank(rank: int, world_size: int) -> tuple[Tensor, set[tuple[int, ...]]]:
    strategy = node_opt(2)
    work = soframe.Preconditioner(
        make_model(),
        distribution=soframe.Distribution(backend="single"),
        kl_clip=None,
        statistics_every=1,
    ).placement.work
    workers = {block.gradient_workers for block in strategy.place(work, world_size).blocks}
    model = DistributedDataParallel(make_model())
    return weights_of(model, slice(rank, None, world_size), strategy), workers


@pytest.mark.distributed
def test_guide_strategy_equals_one_process() -> None:
    expected = weights_of(make_model(), slice(None), "comm-opt")
    for weights, workers in run_ranks(on_rank, 4):
        assert workers == {(0, 1), (2, 3)}
        compare(weights, expected, "weights under the guide's strategy", rtol=1e-10)


def in_half_of_the_world(rank: int, world_size: int) -> Tensor:
    group = dist.new_group(list(range(4)))
    if rank >= 4:
        return torch.empty(0)
    backend = soframe.comm.TorchDistributed(group)
    model = DistributedDataParallel(make_model(), process_group=group)
    return weights_of(model, slice(rank, None, 4), node_opt(2), backend)


@pytest.mark.distributed
def test_overlapping_groups_in_a_part_of_the_world() -> None:
    expected = weights_of(make_model(), slice(None), "comm-opt")
    for weights in run_ranks(in_half_of_the_world, 5)[:4]:
        compare(weights, expected, "weights in a part of the world", rtol=1e-10)
