"""Updates: gradient workers precondition, receivers get the result, and gradients are overwritten.

The update of a stack is one call of its method, or one for each set of blocks that differ in the
number of their updates, in their damping, or in the factors that are solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.stack import Stack
from soframe.comm.fused import Parcel, deliver
from soframe.comm.shards import Split, scatter
from soframe.estimate.gradients import Gradients
from soframe.methods.base import Given
from soframe.methods.returned import direction_of
from soframe.specs import TensorSpec


@dataclass(eq=False)
class Update:
    """The update of some blocks of a stack, from their gradient to the tensors that are written.

    Attributes:
        stack: The stack.
        members: The blocks, which all have a gradient.
        gradient: Their averaged gradients, ``[groups, out, in]``, or ``[entries, 1, 1]`` of an
            elementwise method; None if this rank does not have them.
        matrix: Their updates, of the same shape: on gradient workers, and on receivers after
            `exchange`; of sharded parameters on gradient workers alone.
        states: The new state of the method, on gradient workers.
        parts: This rank's parts of sharded parameters, by block and name.
    """

    stack: Stack
    members: tuple[int, ...]
    gradient: Tensor | None
    matrix: Tensor | None = None
    states: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[Block, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks."""
        return [self.stack.blocks[member] for member in self.members]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that this rank writes."""
        if self.stack.like.shards:
            return [part for by_name in self.parts.values() for part in by_name.values()]
        return [] if self.matrix is None else [self.matrix]

    def each(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield each block with its update, if this rank has the whole matrix."""
        if self.matrix is not None:
            yield from zip(self.blocks, self.stack.split(self.matrix, self.members), strict=True)


def precondition(placed: PlacedBlocks, gradients: Gradients, damping: float) -> list[Update]:
    """Return the updates of all solved blocks with a gradient, computed on gradient workers."""
    updates = []
    with placed.backend.phases("direct"):
        for stack, gradient in gradients.items():
            active = stack.active(gradient.members)
            # A batched call needs equal counters and dampings.
            for members in stack.alike(active):
                matrix = gradient.of(stack, members)
                update = Update(stack, members, matrix)
                if matrix is not None and placed.rank in stack.place.gradient_workers:
                    try:
                        _direct(update, matrix, damping)
                    except Exception as error:  # of any kind: all ranks raise together
                        placed.keep(error, stack)
                        update.matrix = torch.zeros_like(matrix)
                updates.append(update)
    return updates


def _direct(update: Update, gradient: Tensor, damping: float) -> None:
    """Compute the update and the new state by the method."""
    stack, members = update.stack, update.members
    one = update.blocks[0]
    state = update.states = stack.state_of(members)
    given = Given(
        gradient=gradient,
        incoming=gradient,
        data=stack.data_of(members),
        state=state,
        updates=one.record.updates,
        solver=one.solver,
        damping=one.damped_with(damping),
    )
    direction = direction_of(one.acting or one.method, given)
    update.matrix = direction.matrix
    # State tensors that the method does not return are kept, from the first update on.
    update.states = {**given.state, **direction.state}


def exchange(placed: PlacedBlocks, updates: Sequence[Update]) -> None:
    """Send the updates from gradient workers to their receivers; every rank must call.

    Every rank enters the same collectives with any set of gradients: a worker sends zeros for
    blocks without a gradient.
    """
    backend = placed.backend
    of_stack: dict[Stack, list[Update]] = {}
    for update in updates:
        of_stack.setdefault(update.stack, []).append(update)
    parcels: list[tuple[Stack, tuple[int, ...], Parcel]] = []
    for stack in () if backend.world_size == 1 else placed.stacks:
        active = tuple(i for i, block in enumerate(stack.blocks) if block.active)
        # Updates of sharded parameters are scattered below.
        if not active or stack.like.shards:
            continue
        like = stack.like
        worker = stack.place.sources[backend.rank]
        group = stack.place.exchanges[worker]
        if len(group) == 1:
            continue
        spec = TensorSpec(stack.shape_of(active))
        parcel = Parcel(worker, group, (spec,), dtype=like.dtype, device=like.device)
        if worker == backend.rank:
            parcel.tensors = [_all_of(stack, active, of_stack.get(stack, ()))]
        parcels.append((stack, active, parcel))
    if parcels:
        with backend.phases("exchange"):
            every = [parcel for _, _, parcel in parcels]
            deliver(backend, every, "exchange", fused=backend.fused)
    if any(stack.like.shards for stack in of_stack):
        with backend.phases("exchange"):
            _scatter(placed, of_stack)
    for stack, active, parcel in parcels:
        for update in of_stack.get(stack, ()):
            _receive(update, active, parcel)


def _all_of(stack: Stack, active: tuple[int, ...], updates: Sequence[Update]) -> Tensor:
    """Return the updates of all active blocks of a stack, with zeros for missing gradients."""
    if len(updates) == 1 and updates[0].members == active and updates[0].matrix is not None:
        return updates[0].matrix
    each = {block: matrix for update in updates for block, matrix in update.each()}
    like = stack.like
    zeros = torch.zeros(stack.shape_of(active), dtype=like.dtype, device=like.device)
    parts = zip((stack.blocks[m] for m in active), stack.split(zeros, active), strict=True)
    return stack.join([each.get(block, zero) for block, zero in parts])


def _receive(update: Update, active: tuple[int, ...], parcel: Parcel) -> None:
    assert parcel.tensors is not None
    (update.matrix,) = parcel.tensors
    if update.members != active:
        each = dict(zip(active, update.stack.split(update.matrix, active), strict=True))
        update.matrix = update.stack.join([each[member] for member in update.members])


def _scatter(placed: PlacedBlocks, of_stack: Mapping[Stack, Sequence[Update]]) -> None:
    """Send each rank its parts of the updates of sharded parameters."""
    splits: list[tuple[Update, Block, str, Split]] = []
    for stack in placed.stacks:
        for update in of_stack.get(stack, ()) if stack.like.shards else ():
            wholes = {block: block.layout.unpack(matrix) for block, matrix in update.each()}
            for block in update.blocks:
                for name, shards in block.shards.items():
                    split = Split(
                        shards=shards,
                        dtype=block.dtype,
                        device=block.device,
                        workers=stack.place.gradient_workers,
                        sources=stack.place.sources,
                        whole=wholes[block][name] if block in wholes else None,
                    )
                    splits.append((update, block, name, split))
    scatter(placed.backend, [split for _, _, _, split in splits], "exchange")
    for update, block, name, split in splits:
        if split.part is not None:
            update.parts.setdefault(block, {})[name] = split.part


def write(updates: Sequence[Update], home: GradientHome) -> None:
    """Overwrite the gradients with the updates, in place."""
    pairs: list[tuple[Tensor | None, Tensor]] = []
    for update in updates:
        stack, matrix = update.stack, update.matrix
        whole = len(update.members) == len(stack.blocks) > 1 and not stack.like.shards
        if whole and matrix is not None and (parts := stack.parts(matrix)) is not None:
            pairs += zip(home.each(stack.parameters), parts, strict=True)
            continue
        of_blocks: Mapping[Block, Mapping[str, Tensor]] = update.parts
        if not stack.like.shards:
            of_blocks = {block: block.layout.unpack(own) for block, own in update.each()}
        for block, named in of_blocks.items():
            parameters = [block.parameters[name] for name in named]
            pairs += zip(home.each(parameters), named.values(), strict=True)
    # A parameter of a block without a gradient gets none.
    targets = [target for target, _ in pairs if target is not None]
    if targets:
        torch._foreach_copy_(targets, [value for target, value in pairs if target is not None])
