"""DTensors: the parameters of a model after fully_shard and tensor-parallel plans.

``fully_shard`` (FSDP2) replaces a parameter by a DTensor with some rows on every rank. For a pass
it gathers whole parameters into plain tensors in their place; afterwards the DTensors are back,
with averaged gradients, which are DTensors too. ``parallelize_module`` leaves DTensors and computes
with them: inputs and outputs of layers are DTensors, split along features or a sequence, of a batch
that all ranks of the plan share. So a layer's rows are the rows of the `whole` tensors. Under both,
fully_shard splits the plan's parts along another dimension of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from soframe.blocks import sharding
from soframe.blocks.home import GradientHome
from soframe.specs import Cut, Shards


def is_cut(tensor: DTensor) -> bool:
    """Return whether this rank has a part only."""
    return not all(placement.is_replicate() for placement in tensor.placements)


def local(tensor: DTensor) -> Tensor:
    """Return the local tensor: always the same object for one DTensor that is no parameter."""
    with torch.no_grad():
        return _waited(tensor.to_local())


def whole(tensor: Tensor, *, read: bool) -> Tensor:
    """Return the full tensor, by a collective over its mesh; unless `read`, zeros."""
    if isinstance(tensor, DTensor):
        if not read:
            return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        with torch.no_grad():
            tensor = tensor.full_tensor()
    return _waited(tensor)


def _waited(tensor: Any) -> Tensor:
    """Return a plain tensor after waiting for the collective that writes it."""
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:
        wait()
        tensor = tensor.elem
    plain: Tensor = tensor
    return plain


class DTensorGrad(GradientHome):
    """The local tensors of gradients in ``.grad``, of DTensors, which torch does not type."""

    def read(self, parameter: Any) -> Tensor | None:
        gradient = parameter.grad
        return local(gradient) if isinstance(gradient, DTensor) else gradient

    def version(self, parameter: Any, gradient: Tensor) -> int:
        # A change of the DTensor in place does not count for its local tensor.
        stored: Tensor = gradient if parameter.grad is None else parameter.grad
        return stored._version

    def put(self, parameter: Any, gradient: Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, stride = parameter.shape, parameter.stride()
            with torch.no_grad():
                gradient = DTensor.from_local(
                    gradient, mesh, placements, run_check=False, shape=shape, stride=stride
                )
        parameter.grad = gradient

    def local(self, parameter: Any) -> Tensor:
        return local(parameter)

    def shards(self, parameter: Any, ranks: Sequence[int]) -> Shards:
        return shards(parameter, ranks)

    def is_partial(self, parameter: Any) -> bool:
        gradient, placements = parameter.grad, tuple(parameter.placements)
        return isinstance(gradient, DTensor) and tuple(gradient.placements) != placements

    def settle(self, parameter: Any) -> None:
        mesh, placements = parameter.device_mesh, parameter.placements
        with torch.no_grad():
            parameter.grad = parameter.grad.redistribute(mesh, placements)


HOME = DTensorGrad()


def shards(parameter: DTensor, ranks: Sequence[int]) -> Shards:
    """Return the sharding of a parameter over the global ranks of a preconditioner's group."""
    assert (why := unserved(parameter)) is None, why
    where = _places(parameter, ranks)
    dtype = str(parameter.dtype).removeprefix("torch.")
    dims = list(map(_dim, parameter.placements))
    cut_dims = sorted({dim for dim in dims if dim is not None})
    if not cut_dims:
        return Shards.none(tuple(parameter.shape), len(ranks), dtype)
    bounds = [_bounds(parameter, where[rank][1]) for rank in ranks]
    first, *more = [Cut(dim, tuple(map(itemgetter(dim), bounds))) for dim in cut_dims]
    return Shards(
        shape=tuple(parameter.shape),
        dim=first.dim,
        ranges=first.ranges,
        copies=tuple(_copies([where[rank] for rank in ranks], dims)),
        dtype=dtype,
        also=tuple(more),
    )


def _places(parameter: DTensor, ranks: Sequence[int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Return the mesh of each rank, as a number, and its place there."""
    where = {}
    for number, mesh in enumerate(meshes(parameter, ranks)):
        for place in product(*map(range, mesh.shape)):
            where[int(mesh[place])] = (number, place)
    if sorted(where) != sorted(ranks):
        raise ValueError(
            f"it is sharded over the ranks {parameter.device_mesh.mesh.flatten().tolist()}, and "
            f"the preconditioner works on the ranks {list(ranks)}: let fully_shard's mesh have all "
            f"ranks of the backend's process group, and so a tensor-parallel plan's; or let both, "
            f"or the plan's and data parallelism, be dimensions of one mesh that has: "
            f"mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), mesh['tp']"
        )
    return where


def _copies(places: Sequence[tuple[int, tuple[int, ...]]], dims: Sequence[int | None]) -> list[int]:
    """Return the number of each rank's copy, from its mesh and its place there."""
    uncut = [index for index, dim in enumerate(dims) if dim is None]
    numbers: dict[tuple[int, ...], int] = {}
    copies = []
    for number, place in places:
        coordinates = [place[index] for index in uncut]
        copies.append(numbers.setdefault((number, *coordinates), len(numbers)))
    return copies


def meshes(parameter: DTensor, ranks: Sequence[int]) -> list[Tensor]:
    """Return the global ranks of a parameter's mesh, and of its other slices within the group."""
    # A mesh that is a slice of another, such as ``mesh["tp"]``, is one of several.
    mesh: Any = parameter.device_mesh
    # NOTE: no public attribute lists the other slices; torch's own checkpoints and fully_shard read
    # these private ones, too.
    slices: list[Tensor] = []
    for slice_ranks in mesh._layout.remap_to_tensor(mesh._rank_map):
        if set(slice_ranks.flatten().tolist()) <= set(ranks):
            slices.append(slice_ranks)
    return slices


def _dim(placement: Any) -> int | None:
    """Return the dimension that a placement splits, or None for other placements."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def _is_strided(placement: Any) -> bool:
    """Return whether a placement splits parts of later mesh dimensions."""
    return hasattr(placement, "split_factor")


def _bounds(parameter: DTensor, place: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return dimension -> range of indices of the rank at these coordinates of the mesh."""
    bounds: dict[int, tuple[int, int]] = {}
    cuts = list(zip(parameter.placements, parameter.device_mesh.shape, place, strict=True))
    # Along a plan's dimension fully_shard splits the plan's parts, though it comes first.
    for placement, count, index in sorted(cuts, key=lambda cut: _is_strided(cut[0])):
        dim = _dim(placement)
        if dim is None:
            continue
        start, stop = bounds.get(dim, (0, parameter.shape[dim]))
        chunk = -(-(stop - start) // count)
        start = min(start + index * chunk, stop)
        bounds[dim] = start, min(start + chunk, stop)
    return bounds


def unserved(parameter: DTensor) -> str | None:
    """Return the reason why a gradient cannot be read and written in parts, or None if it can."""
    placements, shape = tuple(parameter.placements), parameter.device_mesh.shape
    for index, placement in enumerate(placements):
        inner = zip(placements[index + 1 :], shape[index + 1 :], strict=True)
        dim = _dim(placement)
        parts = prod(count for other, count in inner if _dim(other) == dim)
        strided: Any = placement
        is_served = _is_strided(placement) and strided.split_factor == parts
        if type(placement) not in (Shard, Replicate) and not is_served:
            return f"it is a DTensor with placements {placements}"
    return None


def uncomputed(parameter: DTensor, dims: int | None = None) -> str | None:
    """Return the reason why a layer with this DTensor cannot have rows of whole tensors, or None.

    The last `dims` dimensions of its mesh are the tensor-parallel plan's; None for all.
    """
    shape = parameter.device_mesh.shape
    if dims is None:
        dims = len(shape)
    if dims > 1:
        return (
            f"has a mesh of {dims} dimensions: served are those of one, as parallelize_module "
            f"takes it, with the same data on all of its ranks"
        )
    dim, count = _dim(parameter.placements[-1]), shape[-1]
    if dim is not None and parameter.shape[dim] % count:
        return (
            f"cuts {parameter.shape[dim]} features into {count} parts that are not equal, and "
            f"torch then takes wrong shapes for those of what its layer is called with: let the "
            f"ranks divide them"
        )
    return None


def stands_for(now: object, registered: nn.Parameter, model: nn.Module | None) -> bool:
    """Return whether ``now`` replaces a registered parameter in a module.

    fully_shard has gathered it, or a tensor-parallel plan has split it since; under both, it is
    gathered over the ranks of the one and stays split over the ranks of the other.
    """

    def is_fully_sharded() -> bool:
        return model is not None and bool(sharding.sharded_modules(model))

    if not isinstance(now, nn.Parameter) or now.shape != registered.shape:
        return False
    if not isinstance(now, DTensor):
        return isinstance(registered, DTensor) or is_fully_sharded()
    if uncomputed(now) is not None:
        return False
    if not isinstance(registered, DTensor):
        return True
    registered_placements, now_placements = registered.placements, now.placements
    return registered_placements[-1] == now_placements[-1] and (
        len(registered_placements) > len(now_placements) or is_fully_sharded()
    )
