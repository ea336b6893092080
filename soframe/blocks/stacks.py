"""Stacks that share parameters out, which a preconditioner cannot serve, and what gives them away.

A preconditioner reads a layer's whole gradient from ``.grad`` and writes the result there. Where
parameters are parts of others' buffers, neither means anything: what it wrote would have no effect.
So it refuses to be built, and where the stack comes later, to step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn

_INSTEAD = (
    "use DistributedDataParallel, with strategy='sharded' to spread the curvature over ranks and "
    "torch.distributed.optim.ZeroRedundancyOptimizer to spread the optimizer's state; or train "
    "without the preconditioner"
)
_MARKS = {
    "_fsdp_flattened": "FullyShardedDataParallel, in whose flat buffers it lies",
    "ds_id": "DeepSpeed's ZeRO stage 3, which shares it out over ranks",
    "_hp_mapping": "DeepSpeed (ZeRO stage 1 or 2, or its bf16 optimizer), which keeps its gradient "
    "in a buffer of its own",
}


def require_whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that parameters are whole, and their gradients where they belong.

    Args:
        parameters: Parameters with their names.

    Raises:
        ValueError: If some of them belong to a stack that shares them out.
    """
    for name, parameter in parameters:
        owner = _owner(parameter)
        if owner is not None:
            raise ValueError(
                f"the parameter {name} belongs to {owner}: a Preconditioner reads and writes whole "
                f"gradients in .grad, so here it would have no effect. Instead {_INSTEAD}"
            )


def _owner(parameter: nn.Parameter) -> str | None:
    """Return what shares a parameter out, if anything does."""
    own = parameter.__dict__
    for mark, owner in _MARKS.items():
        if mark in own:
            return owner
    if is_dtensor(parameter):
        return (
            "fully_shard or a tensor-parallel plan: it is a DTensor, of which each rank has a part"
        )
    return None


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is distributed.

    Args:
        tensor: The tensor, or None.
    """
    # Not imported: who has none of them need not wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def require_materialised(names: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that parameters have values.

    Args:
        names: Parameters with their names.

    Raises:
        ValueError: If one is on the meta device.
    """
    for name, parameter in names:
        if parameter.is_meta:
            raise ValueError(
                f"the parameter {name} is on the meta device, where it has no values: call "
                f"model.to_empty(device=...) and load or initialise the weights, then build the "
                f"Preconditioner"
            )


def compiled(modules: Iterable[nn.Module]) -> bool:
    """Return whether torch.compile may have compiled some of these modules.

    Args:
        modules: The modules.
    """
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        return True
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"]["total"])


def consumes_gradients(parameter: nn.Parameter) -> bool:
    """Return whether others' hooks run once a parameter has its gradient, which may take it away.

    Args:
        parameter: The parameter.
    """
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not all(getattr(h, "of_soframe", False) for h in hooks.values())
