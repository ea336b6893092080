"""What fully_shard and tensor parallelism make of a model: parameters that are DTensors.

``torch.distributed.fsdp.fully_shard`` (FSDP2) leaves in a module a DTensor for each parameter, of
which every rank has some rows. For a forward or a backward pass it gathers the whole parameters and
puts them, plain tensors, in the place of the DTensors; afterwards the DTensors are back, with the
averaged gradients, which are DTensors too.

``torch.distributed.tensor.parallel.parallelize_module`` leaves DTensors as well, and computes with
them: what a layer is called with and what it returns are DTensors, cut along their features or
along a sequence, of one batch that all ranks of the plan have. A DTensor says which tensor of one
process it is, so its layer's rows are those of `whole` tensors. The ranks of a plan may be a
dimension of a mesh, along whose other dimensions ranks have data of their own: that changes nothing
of this. There ``fully_shard`` cuts up what the plan has cut. No other file of soframe knows.

Nothing of this is imported where nobody uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from soframe.specs import Cut, Shards


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is distributed.

    Args:
        tensor: The tensor, or None.
    """
    # Not imported: who has none of them need not wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_cut(tensor: Tensor) -> bool:
    """Return whether a rank has but a part of a tensor.

    Args:
        tensor: A DTensor, or a plain tensor.
    """
    if not is_dtensor(tensor):
        return False
    placements: Any = tensor.placements  # type: ignore[attr-defined]  # a DTensor's
    return not all(placement.is_replicate() for placement in placements)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor.

    Args:
        tensor: A DTensor, or a plain tensor.

    Returns:
        The plain tensor itself. Of a DTensor its local tensor, which has its memory; for one that
        is no parameter, the same object each time.
    """
    if not is_dtensor(tensor):
        return tensor
    distributed: Any = tensor
    with torch.no_grad():
        return _arrived(distributed.to_local())


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor of one process that a tensor stands for.

    Every rank of its mesh must call where it is a DTensor.

    Args:
        tensor: A DTensor, or a plain tensor.

    Returns:
        A plain tensor, which has arrived.
    """
    if type(tensor) is Tensor:
        return tensor
    if is_dtensor(tensor):
        distributed: Any = tensor
        with torch.no_grad():
            tensor = distributed.full_tensor()
    return _arrived(tensor)


def blank(tensor: Tensor) -> Tensor:
    """Return a tensor of the shape, dtype and device of a DTensor, which nothing is to be read of.

    Args:
        tensor: The DTensor.

    Returns:
        A plain tensor of zeros without memory, for which nothing travels.
    """
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _arrived(tensor: Tensor) -> Tensor:
    """Return a tensor that a collective may still be writing, once it does not any longer."""
    wait = getattr(tensor, "trigger_wait", None)
    if wait is None:
        return tensor
    wait()
    return tensor.elem  # type: ignore[attr-defined, no-any-return]  # a DTensor's


def is_partial(gradient: Tensor | None, parameter: nn.Parameter) -> bool:
    """Return whether a gradient is not yet cut up, and added up over ranks, as its parameter is.

    Args:
        gradient: The gradient, or None.
        parameter: The parameter.
    """
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return False
    distributed: Any = gradient
    of: Any = parameter
    return tuple(distributed.placements) != tuple(of.placements)


def settled(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a gradient as its parameter is cut up; every rank of the mesh must call.

    Args:
        gradient: A DTensor.
        parameter: The parameter, a DTensor too.
    """
    distributed: Any = gradient
    of: Any = parameter
    with torch.no_grad():
        placed: Tensor = distributed.redistribute(of.device_mesh, of.placements)
        return placed


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """Return what this rank has of a tensor as the tensor, distributed as a parameter is.

    Args:
        values: This rank's part; a DTensor is returned as it is.
        parameter: The parameter.
    """
    if not is_dtensor(parameter) or is_dtensor(values):
        return values
    from torch.distributed.tensor import DTensor

    of: Any = parameter
    with torch.no_grad():
        return DTensor.from_local(
            values,
            of.device_mesh,
            of.placements,
            run_check=False,
            shape=of.shape,
            stride=of.stride(),
        )


def shards(parameter: nn.Parameter, ranks: Sequence[int]) -> Shards | None:
    """Return how a parameter is cut up over ranks.

    Args:
        parameter: The parameter.
        ranks: The global ranks of the group that a preconditioner works in.

    Returns:
        The parts; None for a parameter that is no DTensor.

    Raises:
        ValueError: If it is sharded over other ranks, or in a way that is not known.
    """
    if not is_dtensor(parameter):
        return None
    assert (why := unserved(parameter)) is None, why
    distributed: Any = parameter
    where = {}
    for number, one in enumerate(meshes(parameter, ranks)):
        for place in product(*map(range, one.shape)):
            where[int(one[place])] = (number, place)
    if sorted(where) != sorted(ranks):
        raise ValueError(
            f"it is sharded over the ranks {distributed.device_mesh.mesh.flatten().tolist()}, and "
            f"the preconditioner works on the ranks {list(ranks)}: let fully_shard's mesh have all "
            f"ranks of the backend's process group, and so a tensor-parallel plan's; or let both, "
            f"or the plan's and data parallelism, be dimensions of one mesh that has: "
            f"mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), mesh['tp']"
        )
    dtype = str(parameter.dtype).removeprefix("torch.")
    dims = [_dim(placement) for placement in distributed.placements]
    if all(dim is None for dim in dims):
        return Shards.none(tuple(parameter.shape), len(ranks), dtype)
    uncut = [index for index, dim in enumerate(dims) if dim is None]
    copies: dict[tuple[int, ...], int] = {}
    for rank in ranks:
        number, place = where[rank]
        copies.setdefault((number, *(place[index] for index in uncut)), len(copies))
    bounds = [_bounds(distributed, where[rank][1]) for rank in ranks]
    first, *others = sorted({dim for dim in dims if dim is not None})
    found = Shards(
        shape=tuple(parameter.shape),
        dim=first,
        ranges=tuple(bound[first] for bound in bounds),
        copies=tuple(
            copies[number, *(place[index] for index in uncut)]
            for number, place in (where[rank] for rank in ranks)
        ),
        dtype=dtype,
        also=tuple(Cut(dim, tuple(bound[dim] for bound in bounds)) for dim in others),
    )
    expected = found.part_shape(list(ranks).index(torch.distributed.get_rank()))
    held = local(parameter)
    if held.numel() != prod(expected) or (held.numel() and tuple(held.shape) != expected):
        raise ValueError(
            f"this rank has a part of shape {tuple(held.shape)} of it, where one of shape "
            f"{expected} was expected of {tuple(parameter.shape)}: it is sharded in a way that is "
            f"not known"
        )
    return found


def meshes(parameter: nn.Parameter, ranks: Sequence[int]) -> list[Tensor]:
    """Return the mesh of a parameter and those of other ranks beside it, as every rank sees them.

    A mesh that is a slice of another, such as ``mesh["tp"]``, is one of several.

    Args:
        parameter: A DTensor.
        ranks: The global ranks of the group that a preconditioner works in.

    Returns:
        The global ranks of each of which all ranks are in the group, in the shape of the mesh.
    """
    distributed: Any = parameter
    mesh = distributed.device_mesh
    # NOTE: no public attribute says which other slices there are; torch's own checkpoints and
    # fully_shard read these, too.
    every = mesh._layout.remap_to_tensor(mesh._rank_map)
    return [one for one in every if set(one.flatten().tolist()) <= set(ranks)]


def _dim(placement: Any) -> int | None:
    """Return along which dimension a placement cuts, or None if it does not."""
    return None if placement.is_replicate() else placement.dim


def _is_strided(placement: Any) -> bool:
    """Return whether a placement cuts what those after it have cut already."""
    return hasattr(placement, "split_factor")


def _bounds(distributed: Any, place: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the range that a rank holds along each dimension that is cut.

    Args:
        distributed: The DTensor.
        place: The rank's coordinates in its mesh.
    """
    bounds: dict[int, tuple[int, int]] = {}
    cuts = list(zip(distributed.placements, distributed.device_mesh.shape, place, strict=True))
    # What fully_shard cuts along a plan's dimension are the plan's parts, though it comes first.
    for placement, count, index in sorted(cuts, key=lambda cut: _is_strided(cut[0])):
        dim = _dim(placement)
        if dim is None:
            continue
        start, stop = bounds.get(dim, (0, distributed.shape[dim]))
        chunk = -(-(stop - start) // count)
        start = min(start + index * chunk, stop)
        bounds[dim] = start, min(start + chunk, stop)
    return bounds


def unserved(parameter: nn.Parameter) -> str | None:
    """Return why a DTensor's gradient cannot be read and written in parts, or None if it can.

    Args:
        parameter: The parameter; what is no DTensor can.
    """
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor import Replicate, Shard

    distributed: Any = parameter
    placements, shape = tuple(distributed.placements), distributed.device_mesh.shape
    for index, one in enumerate(placements):
        inner = zip(placements[index + 1 :], shape[index + 1 :], strict=True)
        parts = prod(count for other, count in inner if _dim(other) == getattr(one, "dim", None))
        strided = _is_strided(one) and one.split_factor == parts
        if type(one) not in (Shard, Replicate) and not strided:
            return f"it is a DTensor with placements {placements}"
    return None


@dataclass(frozen=True)
class Planned:
    """A parameter that a tensor-parallel plan has made a DTensor, cut or whole.

    Attributes:
        name: Its name.
        parameter: The parameter.
        dims: How many dimensions of its mesh, the last ones, are the plan's.
        alone: Whether it is in no module that fully_shard was called on.
    """

    name: str
    parameter: nn.Parameter
    dims: int
    alone: bool


def planned(model: nn.Module) -> Iterator[Planned]:
    """Yield the parameters of a model that belong to a tensor-parallel plan.

    fully_shard puts its own dimensions of a mesh before those of the plan: one that it cuts along,
    and before that another for copies, which alone it has where it is called ``replicate``.

    Args:
        model: The model, of which nothing is gathered (see `reshard`).
    """
    replicate = sys.modules.get("torch.distributed._composable.replicate_with_fsdp")
    copied: dict[int, bool] = {}
    for unit in units(model):
        only = replicate is not None and isinstance(unit, replicate.ReplicateModule)
        for parameter in unit.parameters():
            copied[id(parameter)] = only or copied.get(id(parameter), False)
    for name, parameter in model.named_parameters():
        if not is_dtensor(parameter):
            continue
        distributed: Any = parameter
        dims = len(distributed.placements)
        if (only_copies := copied.get(id(parameter))) is None:
            yield Planned(name, parameter, dims, alone=True)
            continue
        hybrid = distributed.placements[0].is_replicate() and not only_copies
        if dims > 1 + hybrid:
            yield Planned(name, parameter, dims - 1 - hybrid, alone=False)


def uncomputed(parameter: nn.Parameter, dims: int | None = None) -> str | None:
    """Return why rows cannot be those of whole tensors in a layer that computes with a DTensor.

    Args:
        parameter: The DTensor, of a tensor-parallel plan.
        dims: How many dimensions of its mesh, the last ones, are the plan's; None for all.

    Returns:
        The reason; None where they can.
    """
    distributed: Any = parameter
    shape = distributed.device_mesh.shape
    dims = len(shape) if dims is None else dims
    if dims > 1:
        return (
            f"has a mesh of {dims} dimensions: served are those of one, as parallelize_module "
            f"takes it, with the same data on all of its ranks"
        )
    dim, count = _dim(distributed.placements[-1]), shape[-1]
    if dim is not None and parameter.shape[dim] % count:
        return (
            f"cuts {parameter.shape[dim]} features into {count} parts that are not equal, and "
            f"torch then takes wrong shapes for those of what its layer is called with: let the "
            f"ranks divide them"
        )
    return None


def apart(model: nn.Module, ranks: Sequence[int]) -> str | None:
    """Return whose gradients a model that fully_shard was called on averages, if not everybody's.

    Ranks are in it together where a mesh of some parameter has both: there they share out what they
    have averaged, or have the same data.

    Args:
        model: The model, of which nothing is gathered (see `reshard`).
        ranks: The global ranks of the group that a preconditioner works in.

    Returns:
        What is amiss; None where nothing is, and where fully_shard was not called.
    """
    if not units(model):
        return None
    plans = {id(one.parameter): one.dims for one in planned(model)}
    together = {rank: {rank} for rank in ranks}
    averaged: dict[frozenset[int], str] = {}
    spans: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
    for name, parameter in model.named_parameters():
        if not is_dtensor(parameter):
            continue
        for one in meshes(parameter, ranks):
            joined = set().union(*(together[rank] for rank in one.flatten().tolist()))
            together.update(dict.fromkeys(joined, joined))
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor's
        dims = plans.get(id(parameter), 0)
        own = mesh.mesh[(..., *mesh.get_coordinate()[mesh.ndim - dims :])]
        among, span = (frozenset(of.flatten().tolist()) for of in (own, mesh.mesh))
        spans[name] = among, span
        if not dims:
            averaged.setdefault(among, name)
    found = together[ranks[0]]
    if found != set(ranks):
        return f"the model is sharded over the ranks {sorted(found)}"
    data = next(iter(averaged), next(iter(spans.values()))[0])
    for name, (among, span) in spans.items():
        # Experts over ranks: with the ranks of their plan they have everybody's data.
        if among != data and span != data:
            return (
                f"the gradient of {name} is averaged over the ranks {sorted(among)}, and that of "
                f"others over the ranks {sorted(data)}"
            )
    return None


def hides_plan(model: nn.Module) -> bool:
    """Return whether DistributedDataParallel has the DTensors of a model for itself.

    Args:
        model: The model.
    """
    module = sys.modules.get("torch.distributed.tensor.parallel.ddp")
    if module is None:
        return False
    hook = module._reconstruct_dtensor
    return any(hook in m._forward_pre_hooks.values() for m in model.modules())


def units(model: nn.Module) -> list[Any]:
    """Return the modules of a model that fully_shard was called on.

    Args:
        model: The model.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return []
    return [m for m in model.modules() if isinstance(m, module.FSDPModule)]


def reshard(fully_sharded: Iterable[Any]) -> None:
    """Let modules have their DTensors, whatever they were gathered for.

    A forward pass that no backward pass follows leaves the whole parameters in the outermost one.

    Args:
        fully_sharded: Modules that fully_shard was called on.
    """
    for module in fully_sharded:
        module.reshard()


def stands_for(now: object, registered: nn.Parameter, model: nn.Module | None) -> bool:
    """Return whether what a module has now is the parameter of which a block was made.

    That is what fully_shard has gathered of it, or a tensor-parallel plan has cut up since; or,
    under both, what is gathered over the ranks of the one and stays cut over those of the other.

    Args:
        now: What the module has in the place of the parameter.
        registered: The parameter: a DTensor; or one that was replaced when fully_shard was called.
        model: The model.
    """
    if not isinstance(now, nn.Parameter) or now.shape != registered.shape:
        return False
    if not is_dtensor(now):
        return is_dtensor(registered) or (model is not None and bool(units(model)))
    if uncomputed(now) is not None:
        return False
    if not is_dtensor(registered):
        return True
    of, own = registered.placements, now.placements  # type: ignore[attr-defined]  # a DTensor's
    if of[-1] != own[-1]:
        return False
    return len(of) > len(own) or (model is not None and bool(units(model)))


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, as it was before fully_shard was called on it.

    Args:
        module: The module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        # The other is FSDPModule, or what `replicate` makes of that.
        kind = next(base for base in kind.__bases__ if not issubclass(base, fsdp.FSDPModule))
    return kind.__name__
