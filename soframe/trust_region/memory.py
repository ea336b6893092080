"""What methods remember, as it was before a step: a step that is undone is undone in that, too.

A method with a state (momentum, second moments in a basis), or with factors of the averaged
gradient, goes on with the gradient of each step. If the step is undone, its parameters are what
they were before it, and so is all that such methods keep: state, factors of gradients, second-order
data and the number of updates. Statistics of calls stay: they are curvature at a point where the
run has been, and no method counts them twice.

Everything is put back on the rank that has it. No tensor travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from soframe.blocks.block import Block
from soframe.preconditioner import Preconditioner


@dataclass(frozen=True)
class _Noted:
    """What one block had: tensors that never change in place, and copies of those that do."""

    block: Block
    state: Mapping[str, Tensor]
    updates: int
    data: Mapping[str, Mapping[str, Tensor]]
    solved: frozenset[str]
    masses: Mapping[str, tuple[float, ...]]
    factors: Mapping[str, Tensor]

    @classmethod
    def of(cls, block: Block) -> _Noted:
        running = block.running
        names = [factor.name for factor in block.factors if not factor.captured]
        return cls(
            block=block,
            state=dict(block.state),
            updates=block.record.updates,
            data=dict(block.second_order),
            solved=frozenset(block.second_order.solved),
            masses={name: running.masses.get(name, ()) for name in names},
            # Looked at by themselves: what else travels is not waited for.
            factors={n: running.arrived[n].clone() for n in names if n in running.arrived},
        )

    def put_back(self) -> None:
        self.block.state.load(self.state, self.updates)
        self.block.second_order.load(self.data, set(self.solved))
        # In copies, since averages go on in place, and this may be put back once more.
        self.block.running.recall(self.masses, {n: t.clone() for n, t in self.factors.items()})


class Memory:
    """What all blocks that remember gradients had before the step under way.

    Args:
        preconditioners: Whose blocks they are.
    """

    def __init__(self, preconditioners: Sequence[Preconditioner]) -> None:
        self._preconditioners = tuple(preconditioners)
        self._noted: list[_Noted] | None = None

    @property
    def any(self) -> bool:
        """Whether there is a block that remembers: the same on every rank."""
        return any(True for _ in self._blocks())

    @property
    def noted(self) -> bool:
        """Whether there is something to go back to: the same on every rank."""
        return self._noted is not None and self.any

    def note(self) -> None:
        """Before a step, note what there is."""
        self._noted = [_Noted.of(block) for block in self._blocks()]

    def forget(self) -> None:
        """Drop what was noted: the step is kept."""
        self._noted = None

    def recall(self) -> None:
        """Go back to what was noted, once.

        Blocks that were made anew within the step, since parameters were frozen or thawed, stay.
        """
        there = set(self._blocks())
        for noted in self._noted or ():
            if noted.block in there:
                noted.put_back()
        self._noted = None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within it blocks have what was noted, so that it can be saved as any state is.

        Yields:
            Nothing.
        """
        assert self._noted is not None
        now = [_Noted.of(block) for block in self._blocks()]
        for noted in self._noted:
            noted.put_back()
        try:
            yield
        finally:
            for noted in now:
                noted.put_back()

    def _blocks(self) -> Iterator[Block]:
        for preconditioner in self._preconditioners:
            yield from (block for block in preconditioner.blocks if block.remembers)
