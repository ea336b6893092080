"""The strategy: a pure function from work and ranks to a placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockWork


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a strategy may read before it places blocks, see `Strategy.settled`.

    Attributes:
        blocks: The blocks, with their methods and solvers.
        work: Their work, in the same order.
        parameters: The model's trainable parameters.
        backend: The ranks, as a `soframe.Backend`.
        local: Whether soframe averages gradients.
        background: The steps for which solves run in the background; 1 for ``"ready"``.
        stagger: Whether the solves of an interval are spread over its steps.
        statistics_every: The interval of statistics, late in training.
        solve_every: The interval of solves, late in training.
        refused: Returns why the model or the settings exclude a placement, or None.
    """

    blocks: Sequence[Any]
    work: Sequence[BlockWork]
    parameters: Sequence[Any]
    backend: Any
    local: bool
    background: int
    stagger: bool
    statistics_every: int
    solve_every: int
    refused: Callable[[Placement], str | None]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        ranks: int = self.backend.world_size
        return ranks


class Strategy(ABC):
    """Maps blocks to ranks, from shapes and rank numbers only: no process group, no tensors.

    A strategy is a pure function, so the same placement is executed, priced and printed.
    """

    @abstractmethod
    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        """Return the placement: owners, gradient workers and receivers of every block.

        Args:
            work: The blocks, in the same order on every rank.
            ranks: The number of ranks.

        Returns:
            The placement; equal arguments must give equal placements, on every rank.
        """

    def settled(self, now: Circumstances) -> Strategy:
        """Return the strategy to use: this one, by default.

        Called once, by all ranks, after they agree on model and settings, which includes this
        strategy's placement. It may measure, by collectives; the result must be the same on every
        rank.

        Args:
            now: The blocks, the ranks and the settings.

        Returns:
            The strategy that places the blocks from then on.
        """
        del now
        return self
