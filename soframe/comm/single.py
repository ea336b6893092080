"""One process: nothing travels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from soframe.comm.base import Backend, Handle
from soframe.registry import register


@register("backend", "single")
class SingleProcess(Backend):
    """A group of one rank."""

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make no groups."""

    def _all_reduce(self, tensor: Tensor) -> Handle:
        return Handle()

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        return Handle()

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]
