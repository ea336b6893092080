"""Fused collectives: many tensors in one flat buffer, symmetric ones as packed triangles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.comm.base import Backend, Handle
from soframe.comm.packing import pack_triangle, unpack_triangle
from soframe.factors import TensorSpec

BUCKET_BYTES = 2**27
"""A flat buffer is closed once it is this large: it bounds the memory that packing takes."""


@dataclass
class Parcel:
    """Tensors of one sender for one group of ranks.

    Attributes:
        source: The rank that has them.
        group: The sorted ranks that take part, the source among them.
        specs: What they are.
        dtype: Their dtype.
        device: Their device.
        tensors: The tensors, on the source; after `deliver`, on every rank of the group.
    """

    source: int
    group: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    dtype: torch.dtype
    device: torch.device
    tensors: list[Tensor] | None = None

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return sum(spec.packed_numel for spec in self.specs)


def deliver(backend: Backend, parcels: Sequence[Parcel], phase: str) -> None:
    """Bring every parcel to all ranks of its group: one broadcast per route and bucket.

    Every rank must pass the same parcels in the same order; each joins those that concern it. Of a
    symmetric matrix the lower triangle travels, and every rank of the group, the source included,
    has that one mirrored.

    Args:
        backend: The backend.
        parcels: The parcels; their ``tensors`` are filled in.
        phase: The phase that the traffic is counted under.
    """
    under_way: list[tuple[Handle, Tensor, list[Parcel]]] = []
    for bucket in _buckets([p for p in parcels if backend.rank in p.group and len(p.group) > 1]):
        first = bucket[0]
        if backend.rank == first.source:
            flat = torch.cat([_flatten(parcel) for parcel in bucket])
        else:
            numel = sum(parcel.numel for parcel in bucket)
            flat = torch.empty(numel, dtype=first.dtype, device=first.device)
        flat = flat.to(backend.wire_device(first.device))
        under_way.append((backend.broadcast(flat, first.source, first.group, phase), flat, bucket))
    for handle, flat, bucket in under_way:
        handle.wait()
        # The source too takes what travelled, so that all ranks go on with the same bits.
        sizes = [parcel.numel for parcel in bucket]
        for parcel, part in zip(bucket, flat.split(sizes), strict=True):
            parcel.tensors = _unflatten(part.to(parcel.device), parcel.specs)


def add_up(backend: Backend, tensors: Sequence[Tensor], phase: str) -> list[Tensor]:
    """Add up symmetric matrices over all ranks, as packed triangles in fused buffers.

    Args:
        backend: The backend.
        tensors: ``[groups, n, n]`` each; the same shapes in the same order on every rank.
        phase: The phase that the traffic is counted under.

    Returns:
        The sums; on one rank the tensors themselves.
    """
    if backend.world_size == 1:
        return list(tensors)
    everyone = tuple(range(backend.world_size))
    parcels = [
        Parcel(-1, everyone, (TensorSpec(tuple(t.shape), True),), t.dtype, t.device, [t])
        for t in tensors
    ]
    under_way = []
    for bucket in _buckets(parcels):
        flat = torch.cat([_flatten(parcel) for parcel in bucket])
        flat = flat.to(backend.wire_device(flat.device))
        under_way.append((backend.all_reduce(flat, phase), flat, bucket))
    for handle, flat, bucket in under_way:
        handle.wait()
        sizes = [parcel.numel for parcel in bucket]
        for parcel, part in zip(bucket, flat.split(sizes), strict=True):
            parcel.tensors = _unflatten(part.to(parcel.device), parcel.specs)
    return [tensor for parcel in parcels for tensor in parcel.tensors or ()]


def _buckets(parcels: Sequence[Parcel]) -> list[list[Parcel]]:
    """Group parcels that can share a buffer, in the order of their first parcel."""
    routes: dict[object, list[list[Parcel]]] = {}
    sizes: dict[int, int] = {}
    for parcel in parcels:
        route = (parcel.source, parcel.group, parcel.dtype, parcel.device)
        buckets = routes.setdefault(route, [])
        size = parcel.numel * parcel.dtype.itemsize
        if not buckets or sizes[id(buckets[-1])] + size > BUCKET_BYTES:
            buckets.append([])
            sizes[id(buckets[-1])] = 0
        buckets[-1].append(parcel)
        sizes[id(buckets[-1])] += size
    return [bucket for buckets in routes.values() for bucket in buckets]


def _flatten(parcel: Parcel) -> Tensor:
    assert parcel.tensors is not None
    parts = [
        (pack_triangle(tensor) if spec.symmetric else tensor).reshape(-1)
        for spec, tensor in zip(parcel.specs, parcel.tensors, strict=True)
    ]
    return torch.cat(parts)


def _unflatten(flat: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    tensors = []
    for spec, part in zip(specs, flat.split([s.packed_numel for s in specs]), strict=True):
        if spec.symmetric:
            *leading, n, _ = spec.shape
            tensors.append(unpack_triangle(part.view(*leading, -1), n))
        else:
            tensors.append(part.view(spec.shape))
    return tensors
