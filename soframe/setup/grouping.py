"""Optimizers that group parameters by the methods of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from soframe.blocks.block import Block, Stack


@runtime_checkable
class Grouping(Protocol):
    """An optimizer that groups parameters and reads its groups while all ranks agree on a step."""

    def group(self, blocks: Sequence[Block]) -> None:
        """Put parameters of blocks that are in no param group into one."""

    def check_settings(self) -> None:
        """Raise a ValueError if a setting is out of range."""

    def moves(self, stacks: Sequence[Stack]) -> Sequence[Stack]:
        """Return the stacks whose weights it moves by their gradients, without an update."""

    def selects(self) -> bool:
        """Return whether weights stay in a step whose gradients the device alone finds bad."""


def grouping(optimizer: object) -> Grouping | None:
    """Return an optimizer that groups parameters; None for others."""
    return optimizer if isinstance(optimizer, Grouping) else None
