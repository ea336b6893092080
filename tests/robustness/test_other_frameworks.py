"""DeepSpeed and Accelerate themselves, where they are installed: one process each."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.harness import run_ranks
from tests.robustness.test_no_effect import Network, backward, build


def zero(rank: int, world_size: int, stage: int, when: str) -> None:
    """One step under ZeRO."""

    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled for a minute
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    own = build(model) if when == "before" else None
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine, sharded, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    own = own or build(engine, optimizer=sharded if when == "with its optimizer" else None)
    engine.backward(engine(torch.randn(4, 3)).square().mean())
    own.step()
    engine.step()
    assert dist.is_initialized()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("when", ["before", "after", "with its optimizer"])
@pytest.mark.parametrize("stage", [0, 3])
def test_zero(stage: int, when: str) -> None:
    """One process has nothing to share, and other code within DeepSpeed."""
    pytest.importorskip("deepspeed")
    run_ranks(zero, 1, stage, when)


def test_the_gate_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = build(model)
    steps = 0
    for number in range(4):
        with accelerator.accumulate(model):
            backward(model, number)
            if accelerator.sync_gradients:
                own.step()
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
    assert steps == 2
