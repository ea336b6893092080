"""Fused collectives: the tensors of several stacks in one flat buffer, symmetric ones as triangles.

A collective starts when a function here returns; `Pending.wait` ends it and unpacks its buffer.
Every rank starts the same collectives in the same order, so a wait blocks no other rank's start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from soframe.comm.base import Backend, Handle
from soframe.comm.packing import pack_triangle, packed_size, unpack_triangle
from soframe.specs import TensorSpec
from soframe.strategies.buckets import in_buckets
from soframe.strategies.work import Reduction


class Pending(Handle):
    """Collectives under way; ``sums`` has the sums of a reduction, and is empty for a broadcast.

    ``nbytes`` is the size of its buffer, which is free after the wait.
    """

    def __init__(
        self, end: Callable[[], None] | None = None, sums: Sequence[Sum] = (), nbytes: int = 0
    ) -> None:
        super().__init__(end)
        self.sums, self.nbytes = sums, nbytes


@dataclass(eq=False)
class Parcel:
    """Tensors that one rank sends to a group of ranks."""

    source: int
    group: tuple[int, ...]  # sorted, the source among them
    specs: Sequence[TensorSpec]  # of one block
    dtype: torch.dtype
    device: torch.device
    tensors: list[Tensor] | None = None  # on the source before sending, on all ranks after
    missing: float = 0.0  # sent if the source has no tensors, such as NaN after a failed solve
    blocks: int = 1  # whose groups lie side by side in each tensor

    @cached_property
    def stacked(self) -> Sequence[TensorSpec]:
        """The specs of the tensors, with the groups of all blocks."""
        if self.blocks == 1:
            return self.specs
        stacked: list[TensorSpec] = []
        for spec in self.specs:
            groups, *shape = spec.shape
            stacked.append(TensorSpec((groups * self.blocks, *shape), spec.symmetric))
        return stacked

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor that travel."""
        return [spec.packed_numel for spec in self.stacked]

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return sum(self.sizes)

    def write(self, flat: Tensor) -> None:
        """Write the tensors into their part of a buffer, ``[numel]``."""
        if not self.tensors:
            flat.fill_(self.missing)
            return
        parts = flat.split(self.sizes)
        for spec, tensor, part in zip(self.stacked, self.tensors, parts, strict=True):
            if spec.symmetric:
                pack_triangle(tensor, out=part)
            else:
                part.view(spec.shape).copy_(tensor)

    def read(self, flat: Tensor) -> None:
        """Copy the tensors out of their part of a buffer, ``[numel]``."""
        self.tensors = []
        parts = flat.split(self.sizes)
        for spec, part in zip(self.stacked, parts, strict=True):
            if spec.symmetric:
                *leading, n, _ = spec.shape
                self.tensors.append(unpack_triangle(part.view(*leading, packed_size(n)), n))
            else:
                self.tensors.append(own_memory(part.view(spec.shape)))


def buckets(
    backend: Backend, parcels: Sequence[Parcel], *, fused: bool = False
) -> list[list[Parcel]]:
    """Return the parcels that this rank sends or receives, by buffer, sorted by source."""
    if backend.world_size == 1:
        return []
    # All parcels come in the same order on every rank. With `fused`, parcels for all ranks share
    # buffers, from any source.
    moving = [p for p in parcels if backend.rank in p.group and len(p.group) > 1]

    def route(parcel: Parcel) -> tuple[Hashable, int]:
        source: int | None = parcel.source
        if fused and len(parcel.group) == backend.world_size:
            source = None  # any
        size = parcel.numel * parcel.dtype.itemsize
        return (source, parcel.group, parcel.dtype, parcel.device), size

    filled = in_buckets(moving, route)
    return [sorted(bucket, key=lambda parcel: parcel.source) for bucket in filled]


def send(backend: Backend, bucket: Sequence[Parcel], phase: str) -> Pending:
    """Return the transfer of one buffer's parcels: a broadcast, or an all-gather if sources differ.

    Of a symmetric matrix the lower triangle travels, and every rank of the group, the source
    included, mirrors it: all ranks continue with the same bits.
    """
    first = bucket[0]
    sizes = [parcel.numel for parcel in bucket]
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    shares = [0] * backend.world_size
    for parcel, part in zip(bucket, flat.split(sizes), strict=True):
        shares[parcel.source] += parcel.numel
        if parcel.source == backend.rank:
            parcel.write(part)
    wire = flat.to(backend.wire_device(first.device))
    if shares[first.source] == len(flat):
        handle = backend.broadcast(wire, first.source, first.group, phase)
    else:
        handle = backend.all_gather_shares(wire, shares, phase)

    def end() -> None:
        handle.wait()
        for parcel, part in zip(bucket, wire.to(first.device).split(sizes), strict=True):
            parcel.read(part)

    return started(backend, end)


def deliver(
    backend: Backend, parcels: Sequence[Parcel], phase: str, *, fused: bool = False
) -> None:
    """Send parcels and wait for them."""
    pending = [send(backend, bucket, phase) for bucket in buckets(backend, parcels, fused=fused)]
    for delivery in pending:  # all are under way
        delivery.wait()


@dataclass(eq=False)
class Sum:
    """A tensor that is summed over its contributors."""

    reduction: Reduction  # the ranks that take part, and the ranks that keep the sum
    shape: tuple[int, ...]  # (groups, n, n), or any other if the tensor is not symmetric
    dtype: torch.dtype
    wire: torch.dtype  # in which it travels and is summed
    device: torch.device
    tensor: Tensor | None = None  # whole or packed, None for zeros; then the sum, packed
    symmetric: bool = True  # whether only triangles travel

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape in which it travels."""
        if not self.symmetric:
            return self.shape
        return self.shape[0], packed_size(self.shape[1])

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return prod(self.packed_shape)

    def route(self, group: tuple[int, ...]) -> tuple[Hashable, int]:
        """Return the key that sums in one buffer share on their way to a group, and the bytes."""
        key = (group, self.reduction.destination, self.wire, self.device)
        return key, self.numel * self.wire.itemsize

    def packed(self) -> Tensor:
        """Return this rank's part, packed."""
        if self.tensor is None:
            return torch.zeros(self.packed_shape, dtype=self.dtype, device=self.device)
        if self.symmetric and self.tensor.dim() == 3:
            return pack_triangle(self.tensor)
        return self.tensor

    def write(self, flat: Tensor) -> None:
        """Move this rank's part into its place in a buffer, ``[numel]``."""
        if self.tensor is None:
            flat.zero_()
        elif self.symmetric and self.tensor.dim() == 3:
            pack_triangle(self.tensor, out=flat)
        else:
            flat.copy_(self.tensor.flatten())
        self.tensor = None

    def read(self, flat: Tensor) -> None:
        """Take the sum from its place in a buffer."""
        self.tensor = flat.view(self.packed_shape).to(self.device, self.dtype)


def add_up(backend: Backend, sums: Sequence[Sum], phase: str) -> list[Pending]:
    """Return the started sums of this rank, as packed triangles in fused buffers.

    Sums kept by several ranks but not by all travel twice, to one of them and from there to the
    others, with a wait in between.
    """
    reduced = [s for s in sums if backend.rank in s.reduction.group and len(s.reduction.group) > 1]
    reductions = in_buckets(reduced, lambda s: s.route(s.reduction.group))
    pending = [_reduce(backend, bucket, phase) for bucket in reductions]
    spread = [s for s in sums if len(s.reduction.spread) > 1]
    if spread:  # on any rank
        for started_sums in pending:
            started_sums.wait()
    return pending + _copy(backend, spread, phase)


def _copy(backend: Backend, sums: Sequence[Sum], phase: str) -> list[Pending]:
    """Return the started broadcasts of sums that several ranks keep."""
    copied = [s for s in sums if backend.rank in s.reduction.spread]
    copies = in_buckets(copied, lambda s: s.route(s.reduction.spread))
    return [_spread(backend, bucket, phase) for bucket in copies]


def _reduce(backend: Backend, sums: Sequence[Sum], phase: str) -> Pending:
    reduction = sums[0].reduction

    def start(flat: Tensor) -> Handle:
        if reduction.destination is None:
            return backend.all_reduce(flat, phase)
        return backend.reduce(flat, reduction.destination, reduction.group, phase)

    complete = [part for part in sums if len(part.reduction.spread) < 2]
    keeps = reduction.destination in (None, backend.rank)
    return _begin(backend, sums, start, complete, keeps=keeps)


def _spread(backend: Backend, sums: Sequence[Sum], phase: str) -> Pending:
    source, group = sums[0].reduction.destination, sums[0].reduction.spread
    assert source is not None

    def start(flat: Tensor) -> Handle:
        return backend.broadcast(flat, source, group, phase)

    return _begin(backend, sums, start, sums, keeps=True)


def _begin(
    backend: Backend,
    sums: Sequence[Sum],
    start: Callable[[Tensor], Handle],
    complete: Sequence[Sum],
    *,
    keeps: bool,
) -> Pending:
    """Start the collective of this rank's parts in one buffer; ``complete`` are final after it."""
    sizes = [part.numel for part in sums]
    flat = torch.empty(sum(sizes), dtype=sums[0].wire, device=sums[0].device)
    for part, numbers in zip(sums, flat.split(sizes), strict=True):
        part.write(numbers)
    flat = flat.to(backend.wire_device(flat.device))
    handle = start(flat)

    def end() -> None:
        handle.wait()
        if keeps:
            for part, numbers in zip(sums, flat.split(sizes), strict=True):
                part.read(numbers)

    return started(backend, end, complete, nbytes=flat.nbytes)


def started(
    backend: Backend, end: Callable[[], None], sums: Sequence[Sum] = (), *, nbytes: int = 0
) -> Pending:
    """Return collectives under way; without overlap wait for them first."""
    pending = Pending(end, sums, nbytes)
    if not backend.overlap:
        pending.wait()
    return pending


def own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor with storage of its own: a view would keep its whole buffer alive."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()
