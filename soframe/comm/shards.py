"""Sharded tensors: gathers to the ranks that need the whole, and scatters back.

A *gather* brings the parts of a gradient to its gradient workers only; a *scatter* brings each rank
its part of the update from its gradient worker. Both are one all-to-all for each buffer, for any
set of workers: a rank sends only the missing parts, each once.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.comm.base import Backend
from soframe.comm.fused import Pending, started
from soframe.specs import Shards
from soframe.strategies.buckets import in_buckets


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

    def route(self) -> tuple[Hashable, int]:
        """Return the key that tensors in one buffer share, and the bytes of the whole."""
        return (self.dtype, self.device), self.shards.whole * self.dtype.itemsize


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
    buckets = in_buckets(moving, Split.route)
    pending = [_exchange(backend, bucket, phase) for bucket in buckets]
    for exchange in pending:
        exchange.wait()


def _exchange(backend: Backend, splits: Sequence[Split], phase: str) -> Pending:
    # Parts that this rank sends and receives, by rank; a received part with its owner.
    sends: list[list[Tensor]] = [[] for _ in range(backend.world_size)]
    receives: list[list[tuple[Split, int]]] = [[] for _ in range(backend.world_size)]
    rank = backend.rank
    for split in splits:
        for owner, sender, receiver in split.shards.moves(rank, split.workers, split.sources):
            if sender == rank:
                part = _part(split, owner, rank)
                sends[receiver].append(part.to(split.dtype).flatten())
            else:
                receives[sender].append((split, owner))

    first = splits[0]
    nothing = torch.empty(0, dtype=first.dtype, device=first.device)
    flat = torch.cat([nothing, *itertools.chain.from_iterable(sends)])
    joined, handle = backend.all_to_all(
        flat.to(backend.wire_device(first.device)),
        [sum(map(Tensor.numel, of_rank)) for of_rank in sends],
        [sum(_sizes(of_rank)) for of_rank in receives],
        phase,
    )

    def end() -> None:
        handle.wait()
        received = list(itertools.chain.from_iterable(receives))
        flat = joined.to(first.device)
        for (split, owner), entries in zip(received, flat.split(_sizes(received)), strict=True):
            part = entries.view(split.shards.part_shape(owner))
            if owner == rank:
                split.part = part
            else:
                _part(split, owner, rank).copy_(part)

    return started(backend, end)


def _sizes(received: Sequence[tuple[Split, int]]) -> list[int]:
    return [split.shards.numel(owner) for split, owner in received]


def _part(split: Split, owner: int, rank: int) -> Tensor:
    """Return the part of an owner: this rank's, or as a view of the whole."""
    if owner == rank:
        assert split.part is not None
        return split.part
    return split.shards.part(_whole(split), owner)


def _whole(split: Split) -> Tensor:
    assert split.whole is not None
    return split.whole
