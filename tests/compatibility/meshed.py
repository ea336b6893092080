"""The model of `tensor_parallel` on meshes of several dimensions: data beside the plan, and within.

Ranks of one plan have the same part of a batch, and those of another plan other parts of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.compatibility import tensor_parallel
from tests.compatibility.tensor_parallel import POSITIONS, TOKENS, plan

SAMPLES = 8


@dataclass(frozen=True)
class Case(tensor_parallel.Case):
    """A way to train.

    Attributes:
        framework: Who averages gradients over the ranks with other data: ``"fully_shard"``, which
            shards parameters besides; ``"hybrid"``, in copies of which it does that;
            ``"replicate"``; ``"hand"``, a collective for each gradient.
        tensor: How many ranks a plan has.
        syncs: Whether gradients are reduced in each backward pass, rather than in the last alone.
    """

    framework: str = "fully_shard"
    tensor: int = 2
    syncs: bool = True
    end: int = 3


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, of all ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (SAMPLES, POSITIONS)
    tokens = torch.randint(0, TOKENS, shape, generator=generator)
    return tokens, torch.randn(*shape, TOKENS, generator=generator, dtype=torch.float64)


class Run(tensor_parallel.Run):
    """A run under way, on one of so many ranks; of one process where there are none."""

    case: Case
    mesh: DeviceMesh | None = None

    def cut(self, ranks: int) -> None:
        """Put the plan, and what averages gradients, to use."""
        case, data = self.case, ranks // self.case.tensor
        if case.framework == "hybrid":
            names = ("copies", "data", "tensor")
            whole = init_device_mesh("cpu", (2, data // 2, case.tensor), mesh_dim_names=names)
            self.mesh = whole["copies", "data"]
        else:
            names = ("data", "tensor")
            whole = init_device_mesh("cpu", (data, case.tensor), mesh_dim_names=names)
            self.mesh = whole["data"]
        if case.kind != "none":
            parallelize_module(self.model, whole["tensor"], plan(case.kind))
        if case.framework in ("fully_shard", "hybrid", "replicate"):
            share: Any = replicate if case.framework == "replicate" else fully_shard
            share(self.model.attention, mesh=self.mesh)
            share(self.model, mesh=self.mesh)

    def mine(self) -> slice:
        """Which samples of the batch this rank has."""
        if self.mesh is None:
            return slice(None)
        each = SAMPLES // self.mesh.size()
        start = each * sum(
            stride * self.mesh.get_local_rank(dim)
            for dim, stride in enumerate([self.mesh.size(1), 1] if self.mesh.ndim == 2 else [1])
        )
        return slice(start, start + each)

    def backward(self, step: int) -> None:
        case = self.case
        every = list(zip(*(t[self.mine()].chunk(case.passes) for t in batch(step)), strict=True))
        for number, (x, y) in enumerate(every):
            if not case.syncs and self.mesh is not None:
                self.model.set_requires_gradient_sync(number == len(every) - 1)
            outputs = self.model(x)
            if case.observed:
                self.preconditioner.observe(outputs)
            loss = 0.5 * (outputs - y).square().sum((1, 2)).mean() / case.passes
            spoilt = step == case.spoilt and number == 0 and case.place == "loss"
            (loss * float("nan") if spoilt else loss).backward()
        if case.framework == "hand" and self.mesh is not None:
            self.average()
        if step == case.spoilt and case.place == "part":
            gradient = self.model.down.weight.grad
            assert gradient is not None
            own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if not dist.is_initialized() or dist.get_rank() == 0:
                own[0, 0] = float("inf")

    def average(self) -> None:
        """Average gradients over the ranks with other data."""
        assert self.mesh is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(part, group=self.mesh.get_group())
                part /= self.mesh.size()


check, train, save_all, train_all = Run.check, Run.train, Run.save_all, Run.train_all
