"""Sharded tensors: gathers to the ranks that need the whole, and scatters back.

A *gather* brings the parts of a gradient to its gradient workers only; a *scatter* brings each rank
its part of the update from its gradient worker. Both are one all-to-all for each buffer, for any
set of workers: a rank sends only the missing parts, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.comm.base import Backend
from soframe.comm.fused import Pending, started
from soframe.specs import Shards
from soframe.strategies.buckets import fill


@dataclass
class Split:
    """A sharded tensor under way."""

    shards: Shards  # the parts of each rank
    dtype: torch.dtype  # in which it travels
    device: torch.device
    workers: tuple[int, ...]  # the ranks that have, or get, the whole
    sources: tuple[int, ...] = ()  # for each rank the worker that sends its part; of a scatter
    part: Tensor | None = None  # this rank's, of any dtype
    whole: Tensor | None = None  # on workers, in the shape of `shards`

    @property
    def size(self) -> int:
        """The bytes of the whole."""
        return self.shards.whole * self.dtype.itemsize

    @property
    def route(self) -> tuple[object, ...]:
        """The key that tensors in one buffer share."""
        return (self.dtype, self.device)


def gather(backend: Backend, splits: Sequence[Split], phase: str) -> None:
    """Gather the parts of tensors on their workers, which get ``whole`` in the dtype of travel.

    A collective: every rank passes the same tensors in the same order, each with its own part. If a
    worker's part is the whole tensor, ``whole`` is a view of it unless the dtype differs.
    """
    for split in splits:
        if backend.rank in split.workers:
            _begin(split, backend.rank)
    _exchange_all(backend, splits, phase)


def _begin(split: Split, rank: int) -> None:
    """Copy a worker's own part into the whole."""
    part, shards = split.part, split.shards
    assert part is not None
    if shards.holds_all(rank):
        split.whole = part.reshape(shards.shape).to(split.dtype)
        return
    split.whole = torch.empty(shards.shape, dtype=split.dtype, device=split.device)
    shards.part(split.whole, rank).copy_(part)


def scatter(backend: Backend, splits: Sequence[Split], phase: str) -> None:
    """Send each rank its ``part`` of tensors from its worker, where it is a view of the whole."""
    # A collective: every rank passes the same tensors in the same order, workers the whole ones.
    _exchange_all(backend, splits, phase)
    for split in splits:
        if backend.rank in split.workers:
            split.part = split.shards.part(_whole(split), backend.rank)
        elif split.part is None:  # this rank has no part of it
            shape = split.shards.part_shape(backend.rank)
            split.part = torch.empty(shape, dtype=split.dtype, device=split.device)


def _exchange_all(backend: Backend, splits: Sequence[Split], phase: str) -> None:
    """Exchange the parts of tensors, an all-to-all for each buffer."""
    moving = [split for split in splits if split.shards.travels(split.workers, split.sources)]
    buckets = fill((split.route, split.size) for split in moving)
    pending = [_exchange(backend, [moving[i] for i in bucket], phase) for bucket in buckets]
    for one in pending:
        one.wait()


def _exchange(backend: Backend, splits: Sequence[Split], phase: str) -> Pending:
    rank, ranks = backend.rank, range(backend.world_size)
    gives: list[list[Tensor]] = [[] for _ in ranks]
    takes: list[list[tuple[Split, int]]] = [[] for _ in ranks]
    for split in splits:
        way = (split.workers, split.sources)
        for other in split.shards.receivers(rank, *way):
            gives[other].append(_given(split, other).flatten())
        for other in split.shards.senders(rank, *way):
            takes[other].append((split, rank if split.sources else other))
    given = [part for parts in gives for part in parts]
    first = splits[0]
    flat = torch.cat(given) if given else torch.empty(0, dtype=first.dtype, device=first.device)
    taken, handle = backend.all_to_all(
        flat.to(backend.wire_device(first.device)),
        [sum(part.numel() for part in parts) for parts in gives],
        [sum(split.shards.numel(owner) for split, owner in parts) for parts in takes],
        phase,
    )

    def end() -> None:
        handle.wait()
        every = [one for parts in takes for one in parts]
        sizes = [split.shards.numel(owner) for split, owner in every]
        for (split, owner), numbers in zip(every, taken.to(first.device).split(sizes), strict=True):
            shape = split.shards.part_shape(owner)
            if split.sources:
                split.part = numbers.view(shape)
            else:
                assert split.whole is not None
                split.shards.part(split.whole, owner).copy_(numbers.view(shape))

    return started(backend, end)


def _given(split: Split, other: int) -> Tensor:
    """Return the part that this rank sends to another, in the dtype of travel."""
    if split.sources:
        return split.shards.part(_whole(split), other).to(split.dtype)
    assert split.part is not None
    return split.part.to(split.dtype)


def _whole(split: Split) -> Tensor:
    assert split.whole is not None
    return split.whole
