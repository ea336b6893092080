"""Stacks that share parameters out, which a preconditioner cannot serve, and what gives them away.

A preconditioner reads a layer's gradient from ``.grad`` and writes the result there: the whole, or
this rank's part of a DTensor that ``fully_shard`` or a tensor-parallel plan has made
(`soframe.blocks.dtensors`); or in the partitions of DeepSpeed's ZeRO (`soframe.blocks.zero`). Where
parameters are parts of others' buffers, neither means anything: what it wrote would have no effect.
So it refuses to be built, and where the stack comes later, to step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from torch import nn

from soframe.blocks import dtensors, zero

_INSTEAD = (
    "shard the model by torch.distributed.fsdp.fully_shard; or use DistributedDataParallel, with "
    "strategy='sharded' to spread the curvature over ranks and "
    "torch.distributed.optim.ZeroRedundancyOptimizer to spread the optimizer's state; or train "
    "without the preconditioner"
)
_MARKS = {
    "_fsdp_flattened": "FullyShardedDataParallel, in whose flat buffers it lies",
    zero.SHARED: "DeepSpeed's ZeRO stage 3, and to no engine (build the Preconditioner after "
    "deepspeed.initialize where deepspeed.zero.Init has made the model), or another home= is given",
    zero.MARK: "DeepSpeed, which keeps its gradient in a buffer of its own: one that is looked at "
    "where its optimizer is ZeRO's (and not its bf16 optimizer, nor an engine that is gone), and "
    "no other home= is given",
}


def require_served(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that gradients are where they belong, whole or in parts that are known.

    Args:
        parameters: Parameters with their names.

    Raises:
        ValueError: If some of them belong to a stack that shares them out.
    """
    for name, parameter in parameters:
        owner = _owner(parameter)
        if owner is not None:
            raise ValueError(
                f"the parameter {name} belongs to {owner}: a Preconditioner reads and writes "
                f"gradients in .grad, so here it would have no effect. Instead {_INSTEAD}"
            )


def require_plans(model: nn.Module, ranks: Sequence[int]) -> None:
    """Check that what fully_shard and tensor-parallel plans make of a model is what is served.

    Args:
        model: The model.
        ranks: The global ranks of the group that the preconditioner works in.

    Raises:
        ValueError: If ranks have the same data for some layers and their own for others; nobody
            averages gradients over some ranks; or the layers of a plan compute with DTensors in
            ways in which statistics would be wrong.
    """
    if dtensors.hides_plan(model):
        raise ValueError(
            "DistributedDataParallel with device_mesh= (or what is built on it) hides a "
            "tensor-parallel plan: the layers have no parameters but this rank's parts, and after "
            "a pass none at all. Average gradients by replicate(model, mesh=mesh['dp']) of "
            "torch.distributed._composable.replicate_with_fsdp, by fully_shard, or yourself over "
            "mesh['dp'].get_group(), which all go with a plan"
        )
    for one in dtensors.planned(model):
        if one.alone and dtensors.units(model):
            raise ValueError(
                f"the parameter {one.name} belongs to a tensor-parallel plan, whose ranks have the "
                f"same data, and other modules of the model to fully_shard, whose ranks have their "
                f"own: put the plan on one dimension of a mesh, and call fully_shard on the whole "
                f"model with another one (mesh=mesh['dp']); or leave out one of the two"
            )
        if (why := dtensors.uncomputed(one.parameter, one.dims)) is not None:
            raise ValueError(
                f"the parameter {one.name} belongs to a tensor-parallel plan that {why}; or "
                f"instead {_INSTEAD}"
            )
    if (why := dtensors.apart(model, ranks)) is not None:
        raise ValueError(
            f"{why}, and the preconditioner works on the ranks {list(ranks)}: no gradient but "
            f"those of all data is a step's. Either let fully_shard's mesh have all ranks of the "
            f"backend's process group (those of a tensor-parallel plan aside), or let the backend "
            f"have the ranks of the mesh: backend=soframe.comm.TorchDistributed(mesh). Experts "
            f"that ranks have for themselves are DTensors on a dimension of the mesh, or skipped"
        )


def require_whole(parameters: Iterable[tuple[str, nn.Parameter]], what: str) -> None:
    """Check that no parameter is sharded.

    Args:
        parameters: Parameters with their names.
        what: What needs them whole.

    Raises:
        ValueError: If one is.
    """
    for name, parameter in parameters:
        plan = "fully_shard or a tensor-parallel plan"
        stack = plan if dtensors.is_dtensor(parameter) else "DeepSpeed's ZeRO"
        if dtensors.is_dtensor(parameter) or zero.is_marked(parameter):
            raise ValueError(
                f"{what} needs whole parameters and gradients on every rank, and {name} is sharded "
                f"by {stack}: use DistributedDataParallel"
            )


def require_own_step(parameters: Iterable[nn.Parameter]) -> None:
    """Check that nobody else moves parameters that a ``soframe.Optimizer`` moves.

    Args:
        parameters: The parameters.

    Raises:
        ValueError: If DeepSpeed's ZeRO does.
    """
    if zero.count(parameters):
        raise ValueError(
            "a soframe.Optimizer moves the parameters of a model itself, and DeepSpeed's ZeRO has "
            "copies of them that only its own optimizer moves: give deepspeed.initialize an "
            "optimizer of torch, and its engine to "
            "soframe.integrations.deepspeed.DeepSpeedPreconditioner, with the same method=; or "
            "shard the model by torch.distributed.fsdp.fully_shard"
        )


def _owner(parameter: nn.Parameter) -> str | None:
    """Return what shares a parameter out, if anything does."""
    own = parameter.__dict__
    for mark, owner in _MARKS.items():
        if mark in own:
            return owner
    why = dtensors.unserved(parameter)
    if why is None:
        return None
    return f"several plans at once, or one of a kind that is not known ({why})"


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
