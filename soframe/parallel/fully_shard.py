"""Modules that ``torch.distributed.fsdp.fully_shard`` (FSDP2) was called on."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def units(model: nn.Module) -> list[FSDPModule]:
    """Return the modules with fully_shard, in the model's order."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class before fully_shard's mix-in."""
    kind: type = type(module)
    if isinstance(module, FSDPModule):
        # The other base is FSDPModule, or the subclass of it that `replicate` makes.
        kind = next(base for base in kind.__bases__ if not issubclass(base, FSDPModule))
    return kind.__name__
