"""Process groups on a GPU: NCCL, alone or with several ranks where it allows that, and Gloo."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe import TrustRegion
from soframe.settings import grouped
from tests.distributed.harness import RankError, run_ranks
from tests.gpu.kit import DEVICE, NEEDS_GPU, batch_on, method_of, model_on

pytestmark = [NEEDS_GPU, pytest.mark.distributed]
ENGINES = ["gloo"] if DEVICE.type == "cpu" else ["nccl", "gloo"]
STRATEGIES = ["comm-opt", "mem-opt", "hybrid-opt", "sharded"]
STEPS = 4


def _own_engine(engine: str, rank: int, ranks: int, port: int) -> None:
    """Leave the harness's group of Gloo for one of another engine, on the one GPU there is."""
    if engine == "gloo":
        return
    dist.destroy_process_group()
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.cuda.set_device(0)
    dist.init_process_group(
        engine, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip


def _meet(rank: int, ranks: int, port: int) -> float:
    """Add up the ranks on the one GPU there is."""
    _own_engine("nccl", rank, ranks, port)
    total = torch.full((1,), rank + 1.0, device="cuda")
    dist.all_reduce(total)
    return float(total)


@functools.lru_cache(maxsize=1)
def shares_the_gpu() -> str | None:
    """Why NCCL does not let two ranks share the GPU; None where it does."""
    try:
        run_ranks(_meet, 2, _free_port(), timeout=30.0)
    except RankError as error:
        return str(error)[-1500:]
    return None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def train(
    rank: int, ranks: int, device: str, engine: str, port: int, how: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Train on this rank's part of each batch, and return the weights."""
    _own_engine(engine, rank, ranks, port)
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(0)
    name = "square"
    model = model_on(where, name)
    settings = dict(options)
    forward: nn.Module = model
    if how == "ddp":
        forward = DistributedDataParallel(model)
    elif how == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    method = settings.pop("method", "kfac")
    if method == "trust region":
        optimizer: Any = TrustRegion(
            forward, "cross-entropy", **grouped({"fisher": "type-2", **settings})
        )
    else:
        optimizer = soframe.Optimizer(
            model,
            method_of(method),
            lr=0.02,
            statistics_every=1,
            solve_every=2,
            **grouped(settings),
        )
    for step in range(STEPS):
        inputs, targets = batch_on(where, name, step)
        share = len(inputs) // ranks
        part = slice(rank * share, (rank + 1) * share)

        def loss(inputs: Any = inputs[part], targets: Any = targets[part]) -> Any:
            return nn.functional.cross_entropy(forward(inputs), targets)

        if method == "trust region":
            optimizer.step(loss)
            continue
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    full = {
        key: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu().clone()
        for key, p in model.named_parameters()
    }
    if engine == "nccl":
        torch.cuda.synchronize()
        dist.barrier()
    if hasattr(optimizer, "close"):
        optimizer.close()
    return full


def alone(options: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in options.items() if k not in ("strategy", "background")}
    return train(0, 1, "cpu", "gloo", 0, "plain", plain)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{s: ("ddp", {"strategy": s}) for s in STRATEGIES},
    "local gradients": ("plain", {"gradients": "local", "strategy": "mem-opt"}),
    "soap": ("ddp", {"method": "soap", "strategy": "sharded"}),
    "muon": ("ddp", {"method": "muon", "strategy": "sharded"}),
    "ekfac": ("ddp", {"method": "ekfac", "strategy": "hybrid-opt"}),
    "trust region": ("ddp", {"method": "trust region"}),
    "fsdp, muon": ("fsdp", {"method": "muon"}),
    "fsdp, soap": ("fsdp", {"method": "soap"}),
    "fsdp, kfac": ("fsdp", {"method": "kfac"}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_one_process(ranks: int, case: str, engine: str) -> None:
    """Under NCCL two ranks share the GPU, which NCCL has to allow."""
    if engine == "nccl" and ranks > 1 and (reason := shares_the_gpu()):
        pytest.skip(f"NCCL lets no two ranks share a GPU: {reason}")
    how, options = CASES[case]
    if (how, engine, DEVICE.type) == ("fsdp", "gloo", "cuda") and ranks > 1:
        pytest.skip("torch's reduce-scatter by Gloo on a GPU ends the process")
    found = run_ranks(train, ranks, DEVICE.type, engine, _free_port(), how, options, timeout=60.0)
    plain = alone({k: v for k, v in options.items() if k != "gradients"})
    for weights in found:
        for key, weight in plain.items():
            torch.testing.assert_close(
                weights[key], weight, rtol=1e-6, atol=1e-7, msg=f"{case} {key}"
            )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_background_solve_and_collectives(engine: str) -> None:
    """A thread solves on a stream of its own while NCCL exchanges."""
    found = run_ranks(
        train, 1, DEVICE.type, engine, _free_port(), "ddp", {"background": 1, "strategy": "mem-opt"}
    )
    assert all(weight.isfinite().all() for weight in found[0].values())
