"""`torch.distributed.checkpoint.state_dict` on `soframe.Optimizer`, under fully_shard or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

import soframe
from tests import kit
from tests.distributed.harness import run_ranks

FULL = StateDictOptions(full_state_dict=True)
ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def build(
    method: str, *, sharded: bool, early: bool = False
) -> tuple[nn.Module, soframe.Optimizer]:
    """Build a model and an optimizer; ``early`` before the model is sharded, as in Accelerate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 8), nn.Linear(8, 2)).double()
    if sharded and not early:
        fully_shard(model)
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.02},
        {"params": [p for layer in model[2:] for p in layer.parameters()]},
    ]
    optimizer = soframe.Optimizer(
        model, method, lr=0.05, param_groups=groups, statistics_every=1, solve_every=2
    )
    if sharded and early:
        names = {id(p): name for name, p in model.named_parameters()}
        fully_shard(model)
        for group in optimizer.param_groups:
            group["params"] = [model.get_parameter(names[id(p)]) for p in group["params"]]
    return model, optimizer


def loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(8, 6, generator=generator, dtype=torch.float64)).square().mean()


def weights(model: nn.Module) -> list[Tensor]:
    every = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in every]


def resume(rank: int, ranks: int, folder: Path, method: str, how: str, early: bool = False) -> None:
    """Save after three steps, load into another model and optimizer, and compare."""
    model, optimizer = build(method, sharded=ranks > 1, early=early)
    schedule = CosineAnnealingLR(optimizer, 9)
    kit.train(model, loss, range(3), optimizer, schedule)
    again, other = build(method, sharded=ranks > 1, early=early)
    if how != "dcp":  # torch wants the entries of a scheduler on both sides
        resumed = CosineAnnealingLR(other, 9)
    if how == "dcp":
        found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(found, checkpoint_id=folder)
        wanted = dict(zip(("model", "optimizer"), get_state_dict(again, other), strict=True))
        dcp.load(wanted, checkpoint_id=folder)
        set_state_dict(
            again, other, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"]
        )
    else:
        again.load_state_dict(model.state_dict())
        saving, loading = (FULL, FULL) if how == "full" else (ON_FIRST, FROM_FIRST)
        state = get_optimizer_state_dict(model, optimizer, options=saving)
        set_optimizer_state_dict(again, other, state, options=loading)
    if how == "dcp":
        resumed = CosineAnnealingLR(other, 9)
    resumed.load_state_dict(schedule.state_dict())
    for group, rate in zip(other.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    kit.train(model, loss, range(3, 7), optimizer, schedule)
    kit.train(again, loss, range(3, 7), other, resumed)
    for mine, own in zip(weights(again), weights(model), strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-13)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["dcp", "full", "broadcast"])
def test_ranks_resume_under_fully_shard(how: str, tmp_path: Path) -> None:
    run_ranks(resume, 2, tmp_path, "kfac" if how == "full" else "soap-muon", how)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["dcp", "full", "broadcast"])
def test_ranks_resume_where_the_optimizer_is_built_before_fully_shard(
    how: str, tmp_path: Path
) -> None:
    """The state is asked for before the first step, as by every resume of torch's functions."""
    run_ranks(resume, 2, tmp_path, "kfac" if how == "full" else "soap-muon", how, True)


@pytest.mark.distributed
def test_a_process_resumes(tmp_path: Path) -> None:
    run_ranks(resume, 1, tmp_path, "kfac", "dcp")
