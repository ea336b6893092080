"""Plans and copies in less precision, and compiled: as one process does, within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import soframe
from tests.compatibility.fully_sharded import weights
from tests.compatibility.kit import assert_rounded
from tests.compatibility.tensor_parallel import batch, make_net, plan
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

MODES = ("autocast", "policy", "replicate alone")
MORE = ("parameters", "hybrid", "replicate")


def train(rank: int, ranks: int, mode: str | None, backend: str | None = None) -> dict[str, Tensor]:
    """Train on ranks that have the same data, or on one process; without a mode in float64."""
    model = make_net()
    if mode is not None:
        model.to(torch.bfloat16 if mode == "parameters" else torch.float32)
    if ranks > 1:
        planned = mode not in ("hybrid", "replicate alone")
        shape = (1, 1, ranks) if planned else (ranks, 1, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "data", "tensor"))
        if planned:
            parallelize_module(model, mesh["tensor"], plan("pairs"))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if mode in ("policy", "hybrid"):
            over = mesh["data"] if mode == "policy" else mesh["copies", "data"]
            fully_shard(model, mesh=over, mp_policy=policy)
        if mode in ("replicate", "replicate alone"):
            replicate(model, mesh=mesh["copies"], mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    own = soframe.Preconditioner(
        model,
        optimizer=optimizer,
        damping=0.1,
        kl_clip=2.5e-3,  # short steps, so that rounding is compared
        statistics_every=2,
        solve_every=2,
        strategy="mem-opt" if ranks > 1 else "comm-opt",
    )
    called: Any = model if backend is None else torch.compile(model, backend=backend)
    for step in range(4):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        forward = model if own.takes_statistics else called
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            outputs = forward(tokens)
        (0.5 * (outputs.double() - targets).square().sum((1, 2)).mean()).backward()
        own.step()
        optimizer.step()
    for block in own.blocks:
        assert block.dtype == (torch.float64 if mode is None else torch.float32)
    own.close()
    return {name: weight.double() for name, weight in weights(model).items()}


def train_narrow(rank: int, ranks: int, modes: tuple[str, ...]) -> list[dict[str, Tensor]]:
    return [train(rank, ranks, mode) for mode in modes]


@pytest.mark.parametrize("modes", [MODES, pytest.param(MORE, marks=pytest.mark.thorough)])
def test_less_precision(modes: tuple[str, ...]) -> None:
    """Of one process in float64, and with bfloat16 parameters of one that rounds these, too."""
    start = {name: weight.double() for name, weight in weights(make_net()).items()}
    for own in run_ranks(train_narrow, 2, modes):
        for mode, found in zip(modes, own, strict=True):
            expected = train(0, 1, "parameters" if mode == "parameters" else None)
            assert_rounded(found, expected, start, mode)


def train_compiled(rank: int, ranks: int) -> dict[str, Tensor]:
    return train(rank, ranks, None, "aot_eager")


@pytest.mark.thorough
def test_compiled() -> None:
    """At statistics steps the model itself is called, as the guide on torch.compile says."""
    expected = train(0, 1, None)
    for found in run_ranks(train_compiled, 2):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)
