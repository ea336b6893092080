"""Fused collectives: many tensors in one flat buffer, symmetric ones as packed triangles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from soframe.comm.base import Backend
from soframe.comm.packing import pack_triangle, packed_size, unpack_triangle
from soframe.comm.tasks import Task, run
from soframe.specs import TensorSpec
from soframe.strategies.buckets import fill
from soframe.strategies.work import Reduction


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
        make: Called once on the source for its tensors, when their turn has come; None where they
            are there.
        otherwise: What travels in every place where ``make`` returns None.
    """

    source: int
    group: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    dtype: torch.dtype
    device: torch.device
    tensors: list[Tensor] | None = None
    make: Callable[[], list[Tensor] | None] | None = None
    otherwise: float = 0.0

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return sum(spec.packed_numel for spec in self.specs)

    @property
    def travels(self) -> bool:
        """Whether there is anyone to send it to."""
        return len(self.group) > 1

    def made_by(self, make: Callable[[], list[Tensor] | None]) -> None:
        """Let the source have tensors that are made when their turn has come.

        Args:
            make: See the attribute.
        """
        self.make = make

    def take(self) -> list[Tensor] | None:
        """Return the tensors, which the parcel holds no longer."""
        tensors, self.tensors = self.tensors, None
        return tensors

    def produce(self) -> None:
        """Let the source have its tensors."""
        # Who makes them holds the parcel, as a rule: forgotten, that is no cycle.
        make, self.make = self.make, None
        if make is not None:
            self.tensors = make()

    def write(self, part: Tensor) -> None:
        """Write what travels into a buffer, on the source.

        Args:
            part: ``[numel]``.
        """
        self.produce()
        if self.tensors is None:
            part.fill_(self.otherwise)
            return
        parts = part.split([spec.packed_numel for spec in self.specs])
        for spec, tensor, packed in zip(self.specs, self.tensors, parts, strict=True):
            if spec.symmetric:
                pack_triangle(tensor, out=packed)
            else:
                packed.view(spec.shape).copy_(tensor)

    def read(self, part: Tensor) -> None:
        """Take the tensors from a buffer.

        Args:
            part: ``[numel]``; tensors that are not symmetric become views of it.
        """
        parts = part.split([spec.packed_numel for spec in self.specs])
        self.tensors = [
            _whole(packed, spec) for spec, packed in zip(self.specs, parts, strict=True)
        ]


def _whole(part: Tensor, spec: TensorSpec) -> Tensor:
    if not spec.symmetric:
        return part.view(spec.shape)
    *leading, n, _ = spec.shape
    return unpack_triangle(part.view(*leading, packed_size(n)), n)


def deliver(
    backend: Backend, parcels: Sequence[Parcel], phase: str, *, fused: bool = False
) -> None:
    """Bring every parcel to all ranks of its group: one broadcast per route and bucket.

    Every rank must pass the same parcels in the same order; each joins those that concern it. Of a
    symmetric matrix the lower triangle travels, and every rank of the group, the source included,
    has that one mirrored.

    Args:
        backend: The backend.
        parcels: The parcels; their ``tensors`` are filled in.
        phase: The phase that the traffic is counted under.
        fused: Whether what goes from any rank to all of them shares buffers whoever it is from:
            one all-gather per bucket.
    """
    tasks = (task for _, task in deliveries(backend, parcels, phase, fused=fused))
    run(tasks, overlap=backend.overlap)


def deliveries(
    backend: Backend, parcels: Sequence[Parcel], phase: str, *, fused: bool = False
) -> Iterator[tuple[list[Parcel], Task]]:
    """Yield the tasks of `deliver`, each with its parcels.

    Parcels that are made here and stay here come last: they are made while others travel. On the
    source all parcels have their tensors once their task has begun.

    Args:
        backend: The backend.
        parcels: See `deliver`.
        phase: See `deliver`.
        fused: See `deliver`.
    """
    mine = [p for p in parcels if backend.rank in p.group]
    for bucket in _buckets([p for p in mine if p.travels], backend.world_size if fused else 0):
        yield bucket, _delivery(backend, bucket, phase)
    for parcel in mine:
        if not parcel.travels:
            parcel.produce()


def _delivery(backend: Backend, bucket: Sequence[Parcel], phase: str) -> Task:
    first = bucket[0]
    sizes = [parcel.numel for parcel in bucket]
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    for parcel, part in zip(bucket, flat.split(sizes), strict=True):
        if backend.rank == parcel.source:
            parcel.produce()  # in the phase of who makes it
            with backend.phases(phase):
                parcel.write(part)
                # It takes what travels, like the others: all ranks go on with the same bits.
                parcel.read(part)
    with backend.phases(phase):
        wire = flat.to(backend.wire_device(first.device))
        shares = [0] * backend.world_size
        for parcel, size in zip(bucket, sizes, strict=True):
            shares[parcel.source] += size
        if shares[first.source] == len(flat):
            handle = backend.broadcast(wire, first.source, first.group, phase)
        else:
            handle = backend.all_gather_shares(wire, shares, phase)
    yield
    with backend.phases(phase):
        handle.wait()
        for parcel, part in zip(bucket, wire.split(sizes), strict=True):
            if backend.rank != parcel.source:
                parcel.read(part.to(parcel.device))


@dataclass
class Sum:
    """The statistics of one factor, on the ranks that contribute to it.

    Attributes:
        way: Who takes part, and who has the sum.
        shape: ``(groups, n, n)``; any other where they are not symmetric.
        dtype: Their dtype.
        wire: The dtype in which they travel and are added up.
        device: Their device.
        tensor: This rank's part: ``[groups, n, n]``, or packed ``[groups, n (n + 1) / 2]``; None
            for zeros. After `add_up_sums`, on every rank that is to have it, the sum: packed if it
            travelled, else the part itself.
        symmetric: Whether they are symmetric matrices, of which triangles travel.
    """

    way: Reduction
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire: torch.dtype
    device: torch.device
    tensor: Tensor | None = None
    symmetric: bool = True

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape in which they travel."""
        if not self.symmetric:
            return self.shape
        return (self.shape[0], packed_size(self.shape[1]))

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return prod(self.packed_shape)

    @property
    def travels(self) -> bool:
        """Whether it is a sum over more than one rank."""
        return len(self.way.group) > 1

    def packed(self) -> Tensor:
        """Return this rank's part, packed: ``[groups, n (n + 1) / 2]``."""
        if self.tensor is None:
            return torch.zeros(self.packed_shape, dtype=self.dtype, device=self.device)
        return pack_triangle(self.tensor) if self._whole else self.tensor

    @property
    def _whole(self) -> bool:
        return self.symmetric and self.tensor is not None and self.tensor.dim() == 3

    def write(self, part: Tensor) -> None:
        """Write this rank's part into a buffer, and forget it.

        Args:
            part: ``[numel]``, in the dtype of the wire.
        """
        if self.tensor is None:
            part.zero_()
        elif self._whole:
            pack_triangle(self.tensor, out=part)
        else:
            part.copy_(self.tensor.flatten())
        self.tensor = None

    def read(self, part: Tensor) -> None:
        """Take the sum from a buffer.

        Args:
            part: ``[numel]``, in the dtype of the wire.
        """
        self.tensor = part.view(self.packed_shape).to(self.device, self.dtype)


def add_up_sums(backend: Backend, sums: Sequence[Sum], phase: str) -> None:
    """Add up symmetric matrices over ranks, as packed triangles in fused buffers.

    Every rank must pass the same sums in the same order; each joins those that concern it.

    Args:
        backend: The backend.
        sums: The sums; their ``tensor`` becomes the sum where it is to be, and None elsewhere.
        phase: The phase that the traffic is counted under.
    """
    run((task for _, task in additions(backend, sums, phase)), overlap=backend.overlap)
    run(_spreads(backend, sums, phase), overlap=backend.overlap)


def additions(
    backend: Backend, sums: Sequence[Sum], phase: str
) -> Iterator[tuple[list[Sum], Task]]:
    """Yield the tasks of `add_up_sums`, each with its sums, but for those that spread sums further.

    Args:
        backend: The backend.
        sums: See `add_up_sums`.
        phase: See `add_up_sums`.
    """
    mine = [s for s in sums if backend.rank in s.way.group and s.travels]
    for bucket in fill([(_route(s, s.way.group), s.numel * s.wire.itemsize) for s in mine]):
        fused = [mine[index] for index in bucket]
        yield fused, _addition(backend, fused, phase)


def _addition(backend: Backend, sums: Sequence[Sum], phase: str) -> Task:
    way = sums[0].way
    with backend.phases(phase):
        flat, sizes = _written(backend, sums)
        if way.destination is None:
            handle = backend.all_reduce(flat, phase)
        else:
            handle = backend.reduce(flat, way.destination, way.group, phase)
    yield
    with backend.phases(phase):
        handle.wait()
        if way.destination in (None, backend.rank):
            for part, numbers in zip(sums, flat.split(sizes), strict=True):
                part.read(numbers)


def _spreads(backend: Backend, sums: Sequence[Sum], phase: str) -> Iterator[Task]:
    """Yield the tasks that send sums from where they are to the other ranks that hold them."""
    mine = [s for s in sums if backend.rank in s.way.spread and len(s.way.spread) > 1]
    for bucket in fill([(_route(s, s.way.spread), s.numel * s.wire.itemsize) for s in mine]):
        yield _spread(backend, [mine[index] for index in bucket], phase)


def _spread(backend: Backend, sums: Sequence[Sum], phase: str) -> Task:
    source, group = sums[0].way.destination, sums[0].way.spread
    assert source is not None
    with backend.phases(phase):
        flat, sizes = _written(backend, sums)
        handle = backend.broadcast(flat, source, group, phase)
    yield
    with backend.phases(phase):
        handle.wait()
        for part, numbers in zip(sums, flat.split(sizes), strict=True):
            part.read(numbers)


def _written(backend: Backend, sums: Sequence[Sum]) -> tuple[Tensor, list[int]]:
    """Return a buffer that has this rank's parts, where it can travel, and their sizes."""
    sizes = [part.numel for part in sums]
    flat = torch.empty(sum(sizes), dtype=sums[0].wire, device=sums[0].device)
    for part, numbers in zip(sums, flat.split(sizes), strict=True):
        part.write(numbers)
    return flat.to(backend.wire_device(flat.device)), sizes


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


def _buckets(parcels: Sequence[Parcel], everyone: int) -> list[list[Parcel]]:
    """Group parcels that can share a buffer, in the order of their first parcel.

    Args:
        parcels: The parcels.
        everyone: Those for so many ranks share buffers whoever they are from; none for 0.

    Returns:
        The parcels of each buffer, by their sources.
    """
    items = []
    for p in parcels:
        source = None if len(p.group) == everyone else p.source
        items.append(((source, p.group, p.dtype, p.device), p.numel * p.dtype.itemsize))
    buckets = [[parcels[index] for index in bucket] for bucket in fill(items)]
    return [sorted(bucket, key=lambda p: p.source) for bucket in buckets]
