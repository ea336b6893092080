"""Parameters that ``torch.distributed.tensor.parallel.parallelize_module`` has made DTensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from soframe.blocks import sharding


class Planned(NamedTuple):
    """A parameter of a plan, split or whole."""

    name: str
    parameter: DTensor
    dims: int  # the last dimensions of its mesh that are the plan's
    alone: bool  # whether no module with fully_shard contains it


def planned(model: nn.Module) -> Iterator[Planned]:
    """Yield the parameters of a resharded model that belong to a tensor-parallel plan.

    fully_shard puts its own mesh dimensions before the plan's: the one that it splits along, and
    before it another for copies, the only one after ``replicate``.
    """
    replicate = sys.modules.get("torch.distributed._composable.replicate_with_fsdp")
    copied: dict[int, bool] = {}
    for unit in sharding.sharded_modules(model):
        only = replicate is not None and isinstance(unit, replicate.ReplicateModule)
        for parameter in unit.parameters():
            copied[id(parameter)] = only or copied.get(id(parameter), False)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        dims = len(parameter.placements)
        if (only_copies := copied.get(id(parameter))) is None:
            yield Planned(name, parameter, dims, alone=True)
            continue
        hybrid = parameter.placements[0].is_replicate() and not only_copies
        if dims > 1 + hybrid:
            yield Planned(name, parameter, dims - 1 - hybrid, alone=False)


def copies(model: nn.Module) -> int:
    """Return the number of ranks that have each batch together, by the plans of a model."""
    ranks = 1
    for plan in planned(model):
        sizes = plan.parameter.device_mesh.shape[-plan.dims :]
        ranks = max(ranks, prod(sizes))
    return ranks


def is_hidden(model: nn.Module) -> bool:
    """Return whether DistributedDataParallel (``device_mesh=``) keeps a model's DTensors itself."""
    module: Any = sys.modules.get("torch.distributed.tensor.parallel.ddp")
    if module is None:
        return False
    hook = module._reconstruct_dtensor
    return any(hook in m._forward_pre_hooks.values() for m in model.modules())
