"""A backend that records every collective, for tests and for counting without running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from soframe.comm.base import Backend, Handle, SingleProcess
from soframe.registry import register

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """One collective."""

    operation: str  # the name of the method, such as "all_reduce"
    numel: int  # elements of the tensor; of an "all_to_all" the ones that this rank sends
    dtype: torch.dtype
    source: int | None  # of a broadcast; of a reduction its destination
    group: tuple[int, ...]


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


@register("backend", "recording")
class Recording(_OnPaper):
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
        self._inner = inner or _OnPaper(rank, world_size, fused=fused)
        super().__init__(self._inner.rank, self._inner.world_size, fused=self._inner.fused)
        self.on_paper, self.overlap = inner is None, self._inner.overlap
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

    def _enter(
        self, phase: str, size: int, operation: Callable[..., T], tensor: Tensor, *arguments: Any
    ) -> T:
        name = operation.__name__
        source, group = None, tuple(range(self.world_size))
        if name in ("_reduce", "_broadcast"):
            source, group = arguments
        event = Event(name.removeprefix("_"), tensor.numel(), tensor.dtype, source, group)
        self.events.append(event)
        forwarded: Callable[..., T] = getattr(self._inner, name)
        return super()._enter(phase, size, forwarded, tensor, *arguments)
