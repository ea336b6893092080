"""A backend that records every collective, for tests and for counting without running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soframe.comm.base import Backend, Handle, SingleProcess
from soframe.registry import register


@dataclass(frozen=True)
class Event:
    """One collective."""

    operation: str  # the name of the method, such as "all_reduce"
    numel: int  # elements of the tensor; of an "all_to_all" the ones that this rank sends
    dtype: torch.dtype
    source: int | None  # of a broadcast; of a reduction its destination
    group: tuple[int, ...]


@register("backend", "recording")
class Recording(Backend):
    """Records collectives, and forwards them to another backend.

    Args:
        inner: The backend that does the work. Without one this is a rank of a simulated world:
            nothing travels, and tensors stay as this rank left them.
        rank: This rank, if `inner` is None.
        world_size: The number of ranks, if `inner` is None.
        fused: See `Backend`, if `inner` is None.

    Attributes:
        events: The collectives, in the order in which this rank entered them.
        groups: The groups that were prepared.
    """

    def __init__(
        self,
        inner: Backend | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self._inner = inner or _OnPaper(rank, world_size, fused=fused)
        self.rank, self.world_size = self._inner.rank, self._inner.world_size
        self.on_paper = inner is None
        self.overlap, self.fused = self._inner.overlap, self._inner.fused
        self.events: list[Event] = []
        self.groups: list[tuple[int, ...]] = []

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self._inner.global_ranks

    @property
    def process_group(self) -> Any:
        return self._inner.process_group

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        self.groups.extend(groups)
        self._inner.prepare(groups)

    def meet(self, what: str) -> None:
        self._inner.meet(what)

    def wire_device(self, device: torch.device) -> torch.device:
        return self._inner.wire_device(device)

    def _all_reduce(self, tensor: Tensor) -> Handle:
        self._record("all_reduce", tensor)
        return self._inner._all_reduce(tensor)

    def _reduce(self, tensor: Tensor, destination: int, group: tuple[int, ...]) -> Handle:
        self._record("reduce", tensor, destination, group)
        return self._inner._reduce(tensor, destination, group)

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        self._record("broadcast", tensor, source, group)
        return self._inner._broadcast(tensor, source, group)

    def _reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        self._record("reduce_scatter", flat)
        return self._inner._reduce_scatter(flat, sizes)

    def _all_gather_shares(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        self._record("all_gather_shares", flat)
        return self._inner._all_gather_shares(flat, sizes)

    def _all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        self._record("all_to_all", flat)
        return self._inner._all_to_all(flat, gives, takes)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._record("all_gather", tensor)
        return self._inner._all_gather(tensor)

    def _record(
        self,
        operation: str,
        tensor: Tensor,
        source: int | None = None,
        group: tuple[int, ...] | None = None,
    ) -> None:
        group = group or tuple(range(self.world_size))
        self.events.append(Event(operation, tensor.numel(), tensor.dtype, source, group))


class _OnPaper(SingleProcess):
    """A rank of a simulated world: nothing travels, and zeros arrive in place of other tensors."""

    def __init__(self, rank: int, world_size: int, *, fused: bool) -> None:
        super().__init__()
        self.rank, self.world_size, self.fused = rank, world_size, fused

    def _reduce(self, tensor: Tensor, destination: int, group: tuple[int, ...]) -> Handle:
        return Handle()

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        if source != self.rank:
            tensor.zero_()
        return Handle()

    def _reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        return Handle()

    def _all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        return flat.new_zeros(sum(takes)), Handle()

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.world_size)]
