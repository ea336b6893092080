"""A block: its numbers (`soframe.blocks.stack.Record`), its slices of a stack, its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from soframe.blocks.spec import BlockSpec
from soframe.blocks.stack import Record, RunningFactors, SecondOrderData, Solved, Stack, State
from soframe.methods.base import Method


@dataclass(eq=False)
class Block(BlockSpec):
    """A block with its state: numbers, tensors and gradients."""

    record: Record = field(default_factory=Record, repr=False)  # its numbers
    member: int = 0  # its index in its stack
    acting: Method | None = field(default=None, repr=False)  # with settings of a param group
    stack: Stack = field(init=False, repr=False)  # keeps its tensors, once it has a place

    # -- state ------------------------------------------------------------------------------------

    def join(self, stack: Stack, member: int) -> None:
        """Become a member of a stack, which keeps the block's tensors from now on."""
        self.stack, self.member = stack, member

    @property
    def running(self) -> RunningFactors:
        """The running factors that this rank holds."""
        return RunningFactors(self)

    @property
    def second_order(self) -> SecondOrderData:
        """The second-order data that this rank holds."""
        return SecondOrderData(self)

    @property
    def state(self) -> State:
        """The method's state, on gradient workers."""
        return State(self)

    @cached_property
    def dependent(self) -> bool:
        """Whether the statistics of a factor are computed with second-order data."""
        return any(factor.needs for factor in self.factors)

    @property
    def identity(self) -> tuple[int, str]:
        """The module and the part of it: the same after the module was moved within the model."""
        part = self.helpers[0].part if self.helpers else " ".join(self.parameters)
        return id(self.layout.module), part

    @property
    def mass(self) -> float:
        """The EMA weight of the first factor that needs no data; 1 for a block without factors."""
        first = next((factor.name for factor in self.factors if not factor.needs), None)
        if first is None:
            return 0.0 if self.factors else 1.0
        return self.record.mass(first)

    @property
    def waits(self) -> bool:
        """Whether statistics of a gradient are taken at any step: the first, or ones missed."""
        return self.mass == 0 or (self.record.missed > 0 and not self.captured)

    @property
    def lacks(self) -> bool:
        """Whether a factor without statistics could take its first ones now."""
        if not self.dependent:
            return False
        able, masses = self.gatherable(), self.record.masses
        return any(f.needs and f.name in able and f.name not in masses for f in self.captured)

    def gatherable(self, *, late: bool = False) -> frozenset[str]:
        """Return the factors that can take statistics: some need second-order data for that.

        ``late`` means that the data are there, and these factors take statistics a window later.
        """
        ready = self.solved and not late
        return frozenset(f.name for f in self.captured if ready or not f.needs)

    def damped_with(self, damping: float) -> float:
        """Return the block's damping, given the preconditioner's."""
        return damping if self.record.damping is None else self.record.damping

    def damp(self, damping: float | None) -> None:
        """Damp the block with a damping of its own; None for the preconditioner's."""
        self.record.damping = damping

    def act(self, method: Method) -> None:
        """Compute updates by the method with other settings from now on."""
        # None for settings as they were built: such blocks stay in one batch.
        self.acting = None if method is self.method else method

    def snapshot(self) -> Solved:
        """Return the second-order data and the damping, and begin to note failures anew."""
        failed, self.record.failed = self.record.failed, False
        return Solved(dict(self.second_order), self.record.damping, failed)

    def restore(self, solved: Solved) -> None:
        """Restore the second-order data and the damping of a snapshot."""
        for factor, tensors in solved.data.items():
            self.stack.set_data(factor, (self.member,), tensors)
        self.record.damping = solved.damping

    @property
    def solved(self) -> bool:
        """Whether the gradient workers have second-order data for every factor that is solved."""
        return self.record.solved or not self.tensors

    @property
    def lost(self) -> bool:
        """Whether statistics need second-order data that the block had once and has lost."""
        if not self.method.observes_with_data or self.solved or self.record.failed:
            return False
        return any(f.name in self.record.masses for f in self.factors if not f.captured)

    @property
    def active(self) -> bool:
        """Whether the method already computes an update from the block's gradient."""
        return self.solved or self.method.starts_at_once

    @property
    def has_gradient(self) -> bool:
        """Whether any parameter of the block has a gradient."""
        return any(map(self.home.has, self.parameters.values()))

    def gradient(self) -> Tensor:
        """Return the gradient ``[groups, out, in]`` in the factors' dtype, with zeros for None."""
        assert not self.shards, "the gradient is in parts, which have to be gathered first"
        gradients = self.home.each(list(self.parameters.values()))
        tensors: dict[str, Tensor] = {}
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            tensors[name] = torch.zeros_like(parameter) if gradient is None else gradient
        return self.layout.pack(tensors).to(self.dtype)

    def parts(self) -> dict[str, Tensor]:
        """Return this rank's part of each gradient by name, in the shape of the home's `local`."""
        parts: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            gradient = self.home.read(parameter)
            if gradient is None:
                gradient = torch.zeros_like(self.home.local(parameter))
            parts[name] = gradient
        return parts

    def assemble(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Pack whole gradients into ``[groups, out, in]``, in the factors' dtype.

        A whole gradient has the elements of its parameter, in any shape.
        """
        tensors: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            tensors[name] = gradient.reshape(self.parameters[name].shape)
        return self.layout.pack(tensors).to(self.dtype)


def factor_dtype(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which factors are solved: ``dtype``, or the parameters', of 32 bits."""
    if dtype is not None and dtype.itemsize >= 4:
        return dtype
    return torch.promote_types(parameters[0].dtype.to_real(), torch.float32)
