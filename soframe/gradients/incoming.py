"""The gradients that a step is given: averaged once, and kept while directions are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from soframe.blocks.block import Block
from soframe.gradients.averaging import AveragedGradients
from soframe.tracing.phases import Phases


class Incoming:
    """The averaged gradients of one step, which are made when they are first asked for.

    Averaging takes place once; a block whose method becomes active by a solve in between has its
    gradient in ``.grad`` by then.

    Args:
        blocks: The blocks, in the placement's order.
        source: Averages them.
        phases: The phase that this rank is in.
    """

    def __init__(self, blocks: Sequence[Block], source: AveragedGradients, phases: Phases) -> None:
        self._blocks, self._source, self._phases = blocks, source, phases
        self._averaged: Mapping[Block, Tensor | None] | None = None
        self._every: dict[Block, Tensor | None] | None = None

    @property
    def gradients(self) -> Mapping[Block, Tensor | None]:
        """The gradient of every block that has one, ``[groups, out, in]``.

        It is None where this rank is no gradient worker; the keys are the same on every rank.
        """
        if self._every is None:
            averaged = self._average()
            self._every = {}
            for block in self._blocks:
                if block in averaged:
                    self._every[block] = averaged[block]
                elif (gradient := self._source.later(block)) is not None:
                    self._every[block] = gradient
        return self._every

    def raw(self) -> dict[Block, Tensor | None]:
        """Return the gradients of the blocks whose methods make directions now."""
        averaged = self._average()
        gradients: dict[Block, Tensor | None] = {}
        for block in self._blocks:
            if not block.active:
                continue
            if block in averaged:
                gradients[block] = averaged[block]
            elif self._every is not None and block in self._every:
                gradients[block] = self._every[block]
            elif (gradient := self._source.later(block)) is not None:
                gradients[block] = gradient
        return gradients

    def _average(self) -> Mapping[Block, Tensor | None]:
        if self._averaged is None:
            with self._phases("average"):
                self._averaged = self._source.raw()
        return self._averaged
