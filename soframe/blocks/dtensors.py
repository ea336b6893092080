"""What fully_shard and tensor parallelism make of a model: parameters that are DTensors.

``torch.distributed.fsdp.fully_shard`` (FSDP2) leaves in a module a DTensor for each parameter, of
which every rank has some rows. For a forward or a backward pass it gathers the whole parameters and
puts them, plain tensors, in the place of the DTensors; afterwards the DTensors are back, with the
averaged gradients, which are DTensors too.

``torch.distributed.tensor.parallel.parallelize_module`` leaves DTensors as well, and computes with
them: what a layer is called with and what it returns are DTensors, cut along their features or
along a sequence, of one batch that all ranks have. A DTensor says which tensor of one process it
is, so its layer's rows are those of `whole` tensors. No other file of soframe knows.

Nothing of this is imported where nobody uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe.specs import Shards


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is distributed.

    Args:
        tensor: The tensor, or None.
    """
    # Not imported: who has none of them need not wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


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
    return tensor.elem  # type: ignore[attr-defined, no-any-return]


def is_partial(gradient: Tensor | None, parameter: nn.Parameter) -> bool:
    """Return whether a gradient is not yet cut up, and added up over ranks, as its parameter is.

    Args:
        gradient: The gradient, or None.
        parameter: The parameter.
    """
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return False
    return tuple(gradient.placements) != tuple(parameter.placements)  # type: ignore[union-attr, attr-defined]


def settled(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a gradient as its parameter is cut up; every rank of the mesh must call.

    Args:
        gradient: A DTensor.
        parameter: The parameter, a DTensor too.
    """
    distributed: Any = gradient
    of: Any = parameter
    with torch.no_grad():
        return distributed.redistribute(of.device_mesh, of.placements)  # type: ignore[no-any-return]


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
    mesh = distributed.device_mesh.mesh
    if sorted(mesh.flatten().tolist()) != sorted(ranks):
        raise ValueError(
            f"it is sharded over the ranks {mesh.flatten().tolist()}, and the preconditioner works "
            f"on the ranks {list(ranks)}: let fully_shard's mesh have all ranks of the backend's "
            f"process group. So must a tensor-parallel plan's, which has no data parallelism beside"
        )
    dims = [p.dim for p in distributed.placements if p.is_shard()]
    dtype = str(parameter.dtype).removeprefix("torch.")
    if not dims:
        return Shards.none(tuple(parameter.shape), len(ranks), dtype)
    # Over the last dimension of the mesh: the rows of the mesh are copies of each other.
    rows = mesh.reshape(-1, mesh.shape[-1])
    where = {
        rank: (copy, index)
        for copy, row in enumerate(rows.tolist())
        for index, rank in enumerate(row)
    }
    size, count = parameter.shape[dims[0]], rows.shape[1]
    chunk = -(-size // count)
    starts = [min(where[rank][1] * chunk, size) for rank in ranks]
    found = Shards(
        shape=tuple(parameter.shape),
        dim=dims[0],
        ranges=tuple((start, min(start + chunk, size)) for start in starts),
        copies=tuple(where[rank][0] for rank in ranks),
        dtype=dtype,
    )
    own = list(ranks).index(torch.distributed.get_rank())
    start, stop = found.ranges[own]
    held = local(parameter)
    if held.numel() != found.numel(own) or (held.numel() and held.shape[dims[0]] != stop - start):
        raise ValueError(
            f"this rank has a part of shape {tuple(held.shape)} of it, where rows {start} to "
            f"{stop} of {tuple(parameter.shape)} were expected: it is sharded in a way that is not "
            f"known"
        )
    return found


def unserved(parameter: nn.Parameter) -> str | None:
    """Return why a DTensor's gradient cannot be read and written in parts, or None if it can.

    Args:
        parameter: The parameter; what is no DTensor can.
    """
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor import Replicate, Shard

    placements = tuple(parameter.placements)  # type: ignore[attr-defined]
    # By class, since the strided shards of two plans on one dimension are a subclass.
    plain = type(placements[-1]) in (Shard, Replicate)
    if plain and len(placements) <= 2 and all(p.is_replicate() for p in placements[:-1]):
        return None
    return f"it is a DTensor with placements {placements}"


def uncomputed(parameter: nn.Parameter) -> str | None:
    """Return why rows cannot be those of whole tensors in a layer that computes with a DTensor.

    Args:
        parameter: The DTensor, of a tensor-parallel plan.

    Returns:
        The reason; None where they can.
    """
    distributed: Any = parameter
    ranks, placements = distributed.device_mesh.mesh, distributed.placements
    if len(placements) > 1:
        return (
            f"has a mesh of {len(placements)} dimensions: served are those of one, as "
            f"parallelize_module takes it, over all ranks, with the same data on every rank"
        )
    for one in placements:
        if one.is_shard() and parameter.shape[one.dim] % ranks.numel():
            return (
                f"cuts {parameter.shape[one.dim]} features into {ranks.numel()} parts that are not "
                f"equal, and torch then takes wrong shapes for those of what its layer is called "
                f"with: let the ranks divide them"
            )
    return None


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


def foreign(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the DTensors of a model in no module that fully_shard was called on, by name.

    Args:
        model: The model.
    """
    served: set[int] = set()
    for unit in units(model):
        served.update(id(p) for p in unit.parameters())
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter) and id(parameter) not in served:
            yield name, parameter


def stands_for(now: object, registered: nn.Parameter, model: nn.Module | None) -> bool:
    """Return whether what a module has now is the parameter of which a block was made.

    That is what fully_shard has gathered of it, or a tensor-parallel plan has cut up since.

    Args:
        now: What the module has in the place of the parameter.
        registered: The parameter: a DTensor; or one that was replaced when fully_shard was called.
        model: The model.
    """
    if not isinstance(now, nn.Parameter) or now.shape != registered.shape:
        return False
    if is_dtensor(now):
        return not is_dtensor(registered) and uncomputed(now) is None
    return is_dtensor(registered) or (model is not None and bool(units(model)))


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, as it was before fully_shard was called on it.

    Args:
        module: The module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        kind = next(base for base in kind.__bases__ if base is not fsdp.FSDPModule)
    return kind.__name__
