"""Fused collectives: many tensors in one flat buffer, symmetric ones as packed triangles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.buckets import fill
from soframe.comm.base import Backend, Handle
from soframe.comm.packing import pack_triangle, packed_size, unpack_triangle
from soframe.factors import TensorSpec
from soframe.strategies.placement import Reduction


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


@dataclass
class Sum:
    """Symmetric matrices of one factor, on the ranks that contribute to it.

    Attributes:
        way: Who takes part, and who has the sum.
        shape: ``(groups, n, n)``.
        dtype: The matrices' dtype.
        wire: The dtype in which they travel and are added up.
        device: Their device.
        tensor: This rank's part: ``[groups, n, n]``, or packed ``[groups, n (n + 1) / 2]``; None
            for zeros. After `add_up`, on every rank that is to have it, the sum: packed if it
            travelled, else the part itself.
    """

    way: Reduction
    shape: tuple[int, int, int]
    dtype: torch.dtype
    wire: torch.dtype
    device: torch.device
    tensor: Tensor | None = None

    def packed(self) -> Tensor:
        """Return this rank's part, packed: ``[groups, n (n + 1) / 2]``."""
        if self.tensor is None:
            groups, n, _ = self.shape
            return torch.zeros(groups, packed_size(n), dtype=self.dtype, device=self.device)
        return pack_triangle(self.tensor) if self.tensor.dim() == 3 else self.tensor


def add_up(backend: Backend, sums: Sequence[Sum], phase: str) -> None:
    """Add up symmetric matrices over ranks, as packed triangles in fused buffers.

    Every rank must pass the same sums in the same order; each joins those that concern it.

    Args:
        backend: The backend.
        sums: The sums; their ``tensor`` becomes the sum where it is to be, and None elsewhere.
        phase: The phase that the traffic is counted under.
    """
    mine = [s for s in sums if backend.rank in s.way.group and len(s.way.group) > 1]
    under_way: list[tuple[Handle, Tensor, list[Sum]]] = []
    for bucket in fill([(_route(s, s.way.group), _wire_bytes(s)) for s in mine]):
        parts = [mine[index] for index in bucket]
        way, wire = parts[0].way, parts[0].wire
        flat = torch.cat([part.packed().flatten().to(wire) for part in parts])
        flat = flat.to(backend.wire_device(flat.device))
        if way.destination is None:
            handle = backend.all_reduce(flat, phase)
        else:
            handle = backend.reduce(flat, way.destination, way.group, phase)
        under_way.append((handle, flat, parts))
    for handle, flat, parts in under_way:
        handle.wait()
        for part, own in zip(parts, _split(flat, parts), strict=True):
            kept = part.way.destination in (None, backend.rank)
            part.tensor = own if kept else None
    _spread(backend, sums, phase)


def _spread(backend: Backend, sums: Sequence[Sum], phase: str) -> None:
    """Send sums from where they are to the other ranks that hold them."""
    mine = [s for s in sums if backend.rank in s.way.spread and len(s.way.spread) > 1]
    under_way = []
    for bucket in fill([(_route(s, s.way.spread), _wire_bytes(s)) for s in mine]):
        parts = [mine[index] for index in bucket]
        source, group = parts[0].way.destination, parts[0].way.spread
        assert source is not None
        flat = torch.cat([part.packed().flatten().to(part.wire) for part in parts])
        flat = flat.to(backend.wire_device(flat.device))
        under_way.append((backend.broadcast(flat, source, group, phase), flat, parts))
    for handle, flat, parts in under_way:
        handle.wait()
        for part, own in zip(parts, _split(flat, parts), strict=True):
            part.tensor = own


def own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that is to stay: a view would keep all of a flat buffer alive.

    Args:
        tensor: What came out of a buffer, or was made here.

    Returns:
        The tensor itself if its memory has nothing else in it, otherwise a copy.
    """
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if exact else tensor.clone()


def _route(part: Sum, group: tuple[int, ...]) -> tuple[object, ...]:
    return (group, part.way.destination, part.wire, part.device)


def _wire_bytes(part: Sum) -> int:
    return part.shape[0] * packed_size(part.shape[1]) * part.wire.itemsize


def _split(flat: Tensor, parts: Sequence[Sum]) -> list[Tensor]:
    """Undo the fusion of sums, into tensors ``[groups, n (n + 1) / 2]``."""
    sizes = [part.shape[0] * packed_size(part.shape[1]) for part in parts]
    return [
        own.view(part.shape[0], -1).to(part.device, part.dtype)
        for part, own in zip(parts, flat.split(sizes), strict=True)
    ]


def _buckets(parcels: Sequence[Parcel]) -> list[list[Parcel]]:
    """Group parcels that can share a buffer, in the order of their first parcel."""
    items = [((p.source, p.group, p.dtype, p.device), p.numel * p.dtype.itemsize) for p in parcels]
    return [[parcels[index] for index in bucket] for bucket in fill(items)]


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
