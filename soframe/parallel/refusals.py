"""Sharded models that a preconditioner cannot serve: the reason and the remedy, as errors.

If parameters are parts of other buffers, writes into ``.grad`` have no effect. So a preconditioner
refuses to be built, and to step if such a framework came later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.parallel.dtensors import meshes, uncomputed, unserved
from soframe.parallel.tensor_parallel import is_hidden, planned
from soframe.strategies.placement import Placement

_INSTEAD = (
    "shard the model by torch.distributed.fsdp.fully_shard; or use DistributedDataParallel, with "
    "strategy='sharded' to spread the curvature over ranks and "
    "torch.distributed.optim.ZeroRedundancyOptimizer to spread the optimizer's state; or train "
    "without the preconditioner"
)
_OWNERS = (
    "FullyShardedDataParallel, in whose flat buffers it lies",
    (
        "DeepSpeed's ZeRO stage 3, and to no engine (build the Preconditioner after "
        "deepspeed.initialize where deepspeed.zero.Init has made the model), or another home= is "
        "given"
    ),
    (
        "DeepSpeed, which keeps its gradient in a buffer of its own: ZeRO's is found where the "
        "Preconditioner is built after deepspeed.initialize, of the engine or with "
        "optimizer=engine.optimizer, and no other home= is given; its bf16 optimizer's is not"
    ),
)


def require_served(name: str, parameter: nn.Parameter) -> None:
    """Raise a ValueError if the gradient of a parameter is out of reach."""
    owners: list[str] = []  # the frameworks that keep its gradient to themselves
    for mark, framework in zip(sharding.MARKS, _OWNERS, strict=True):
        if mark in parameter.__dict__:
            owners.append(framework)
    if isinstance(parameter, DTensor) and (why := unserved(parameter)) is not None:
        owners.append(f"several plans at once, or one of a kind that is not known ({why})")
    if owners:
        raise ValueError(
            f"the parameter {name} belongs to {owners[0]}: a Preconditioner reads and writes "
            f"gradients in .grad, so here it would have no effect. Instead {_INSTEAD}"
        )


def require_model(model: nn.Module, distributed: bool, ranks: Sequence[int]) -> None:
    """Raise a ValueError if fully_shard or plans have changed a model in an unsupported way."""
    if is_hidden(model):
        raise ValueError(
            "DistributedDataParallel with device_mesh= (or what is built on it) hides a "
            "tensor-parallel plan: the layers have no parameters but this rank's parts, and after "
            "a pass none at all. Average gradients by replicate(model, mesh=mesh['dp']) of "
            "torch.distributed._composable.replicate_with_fsdp, by fully_shard, or yourself over "
            "mesh['dp'].get_group(), which all go with a plan"
        )
    plans = planned(model) if distributed else ()
    for plan in plans:
        if plan.alone and sharding.sharded_modules(model):
            raise ValueError(
                f"the parameter {plan.name} belongs to a tensor-parallel plan, whose ranks have "
                f"the same data, and other modules of the model to fully_shard, whose ranks have "
                f"their own: put the plan on one dimension of a mesh, and call fully_shard on the "
                f"whole model with another one (mesh=mesh['dp']); or leave out one of the two"
            )
        if (why := uncomputed(plan.parameter, plan.dims)) is not None:
            raise ValueError(
                f"the parameter {plan.name} belongs to a tensor-parallel plan that {why}; or "
                f"instead {_INSTEAD}"
            )
    if (why := _apart(model, ranks)) is not None:
        raise ValueError(
            f"{why}, and the preconditioner works on the ranks {list(ranks)}: a step needs "
            f"gradients over all data. Either let fully_shard's mesh have all ranks of the "
            f"backend's process group (those of a tensor-parallel plan aside), or let the backend "
            f"have the ranks of the mesh: "
            f"Distribution(backend=soframe.comm.TorchDistributed(mesh)). Experts "
            f"that ranks have for themselves are DTensors on a dimension of the mesh, or skipped"
        )


def _apart(model: nn.Module, ranks: Sequence[int]) -> str | None:
    """Return the gradients that fully_shard does not average over all ranks, or None."""
    if not sharding.sharded_modules(model):
        return None
    plans = {id(plan.parameter): plan.dims for plan in planned(model)}
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    connected = _connected(sharded.values(), ranks)
    if connected != set(ranks):
        return f"the model is sharded over the ranks {sorted(connected)}"
    spans: dict[str, tuple[set[int], set[int]]] = {}
    averaged: list[set[int]] = []  # the ranks of parameters without a plan
    for name, parameter in sharded.items():
        mesh = parameter.device_mesh
        dims, place = plans.get(id(parameter), 0), mesh.get_coordinate()
        assert place is not None
        here: Any = (..., *place[mesh.ndim - dims :])
        among = set(mesh.mesh[here].flatten().tolist())
        spans[name] = among, set(mesh.mesh.flatten().tolist())
        if not dims:
            averaged.append(among)
    data, _ = next(iter(spans.values()))
    if averaged:
        data = averaged[0]
    for name, (among, span) in spans.items():
        # Experts over ranks: with the ranks of their plan they see the data of all ranks.
        if data not in (among, span):
            return (
                f"the gradient of {name} is averaged over the ranks {sorted(among)}, and that of "
                f"others over the ranks {sorted(data)}"
            )
    return None


def _connected(parameters: Iterable[DTensor], ranks: Sequence[int]) -> set[int]:
    """Return the ranks that share averaged gradients, or data, with the first by some mesh."""
    together = {rank: {rank} for rank in ranks}
    for parameter in parameters:
        for mesh_ranks in meshes(parameter, ranks):
            joined: set[int] = set()
            for rank in mesh_ranks.flatten().tolist():
                joined |= together[rank]
            together.update(dict.fromkeys(joined, joined))
    return together[ranks[0]]


def refused_together(
    model: nn.Module, blocks: Sequence[Block], placement: Placement, *, draws: bool
) -> str | None:
    """Return an error if ranks of a plan draw their own targets or take no statistics, or None."""
    parameters: list[nn.Parameter] = []
    for block in blocks:
        parameters += block.parameters.values()
    if not draws and not any(map(sharding.is_distributed, parameters)):
        return None
    of_plans = {plan.parameter: plan.name for plan in planned(model)}
    if of_plans and draws:
        return (
            f"fisher='monte-carlo' draws other targets on every rank, and the ranks of the "
            f"tensor-parallel plan of {next(iter(of_plans.values()))} have one batch together: "
            f"pass Statistics(fisher='type-2'), or 'empirical'"
        )
    for block, place in zip(blocks, placement.blocks, strict=True):
        in_plan = not of_plans.keys().isdisjoint(block.parameters.values())
        if in_plan and place.partial(block.factors):
            return (
                f"{block.name} belongs to a tensor-parallel plan, all ranks of which bring the "
                f"rows of a call together, and under strategy {placement.strategy!r} some ranks "
                f"take no statistics of it: pass strategy='comm-opt', "
                f"'mem-opt' or Sharded(group=None)"
            )
    return None


def refuse_sharded(name: str, parameter: nn.Parameter, what: str) -> NoReturn:
    """Raise for a sharded parameter if whole ones are needed."""
    owner = "DeepSpeed's ZeRO"
    if isinstance(parameter, DTensor):
        owner = "fully_shard or a tensor-parallel plan"
    raise ValueError(
        f"{what} needs whole parameters and gradients on every rank, and {name} is sharded "
        f"by {owner}: use DistributedDataParallel"
    )


def refuse_own_step() -> NoReturn:
    """Raise if ZeRO moves the parameters of a ``soframe.Optimizer``."""
    raise ValueError(
        "a soframe.Optimizer moves the parameters of a model itself, and DeepSpeed's ZeRO has "
        "copies of them that only its own optimizer moves: give deepspeed.initialize an "
        "optimizer of torch, and its engine to "
        "soframe.integrations.deepspeed.DeepSpeedPreconditioner, with the same method=; or "
        "shard the model by torch.distributed.fsdp.fully_shard"
    )
