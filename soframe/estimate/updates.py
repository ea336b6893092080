"""Updates: gradient workers precondition, receivers get the result, and gradients are overwritten.

The update of a stack is one call of its method, or one for each set of blocks that differ in the
number of their updates, in their damping, or in the factors that are solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block, PlacedBlocks, Stack
from soframe.blocks.home import GradientHome
from soframe.comm.base import Backend
from soframe.comm.fused import Parcel, deliver
from soframe.comm.shards import Split, scatter
from soframe.methods.base import Given
from soframe.methods.returned import direction_of, parcel_of
from soframe.specs import TensorSpec


@dataclass(eq=False)
class Update:
    """The update of some blocks of a stack, from their gradient to the tensors that are written."""

    stack: Stack
    members: tuple[int, ...]  # the indices of the blocks, which all have a gradient
    blocks: Sequence[Block]
    # Their averaged gradients, ``[groups, out, in]``, or ``[entries, 1, 1]`` of an elementwise
    # method; None if this rank does not have them.
    gradient: Tensor | None
    # Their updates, of the same shape: on gradient workers, and on receivers after `exchange`; of
    # sharded parameters on gradient workers alone.
    matrix: Tensor | None = None
    # The new state of the method, on gradient workers.
    states: dict[str, Tensor] = field(default_factory=dict)
    # The tensors that are sent in their place, on gradient workers; see `Method.parcel`.
    parcel: Mapping[str, Tensor] = field(default_factory=dict)
    # This rank's parts of sharded parameters, by block and name.
    parts: dict[Block, dict[str, Tensor]] = field(default_factory=dict)

    def compute(self, gradient: Tensor, damping: float) -> None:
        """Compute the update and the new state by the method."""
        stack, members, block = self.stack, self.members, self.blocks[0]
        state = self.states = stack.state_of(members)  # as it stays if the method raises
        arguments = Given(
            gradient=gradient,
            incoming=gradient,
            data=stack.data_of(members),
            state=state,
            updates=block.record.updates,
            solver=block.solver,
            damping=block.damped_with(damping),
            weights=self._weights,
        )
        direction = direction_of(block.acting, arguments)
        self.matrix = direction.matrix
        if block.parcel:
            parcel = parcel_of(block.method, direction, block.parcel, len(members))
            self.parcel = {name: tensor.to(block.dtype) for name, tensor in parcel.items()}
        # State tensors that the method does not return are kept, from the first update on.
        self.states = {**state, **direction.state}

    def leave_zero(self, gradient: Tensor) -> None:
        """Make the updates zeros, after an error."""
        self.matrix = torch.zeros_like(gradient)

    def _weights(self) -> Tensor:
        """Return the parameters as matrices, for methods that read them."""
        block = self.blocks[0]
        if block.shards:
            raise ValueError(f"{block.name}: {block.method!r} reads weights, and they are sharded")
        matrices = [block.assemble(block.parameters) for block in self.blocks]
        return self.stack.join(matrices).detach()

    def parcel_to_send(self, backend: Backend) -> Parcel | None:
        """Return what gradient workers send to their receivers; None if this rank keeps it."""
        like, place = self.stack.like, self.stack.place
        # Updates of sharded parameters are scattered, unless ranks make their parts of parcels.
        if like.shards and not like.parcel:
            return None
        worker = place.sources[backend.rank]
        group = place.exchanges[worker]
        if len(group) == 1:
            return None
        specs, blocks = [TensorSpec(self.stack.shape_of(self.members))], 1
        tensors = [] if self.matrix is None else [self.matrix]
        if like.parcel:
            specs, blocks = list(like.parcel.values()), len(self.members)
            tensors = list(self.parcel.values())  # none after an error: zeros travel
        return Parcel(worker, group, specs, like.dtype, like.device, tensors, blocks=blocks)

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Take the updates, or make them, out of the tensors that were sent."""
        block = self.blocks[0]
        if block.parcel:
            self.matrix = block.acting.opened(dict(zip(block.parcel, tensors, strict=True)))
        else:
            (self.matrix,) = tensors

    def tensors(self) -> list[Tensor]:
        """Return the tensors that this rank writes."""
        tensors: list[Tensor] = []
        if self.stack.like.shards:
            for part_of in self.parts.values():
                tensors += part_of.values()
        elif self.matrix is not None:
            tensors.append(self.matrix)
        return tensors

    def each(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield each block with its update, if this rank has the whole matrix."""
        if self.matrix is not None:
            yield from zip(self.blocks, self.stack.split(self.matrix, self.members), strict=True)

    def unpacked(self) -> dict[Block, Mapping[str, Tensor]]:
        """Return the updates of parameters by block and name, if this rank has the matrix."""
        unpacked: dict[Block, Mapping[str, Tensor]] = {}
        if self.matrix is not None:
            matrices = self.stack.split(self.matrix, self.members)
            for block, matrix in zip(self.blocks, matrices, strict=True):
                unpacked[block] = block.layout.unpack(matrix)
        return unpacked


def exchange(placed: PlacedBlocks, updates: Sequence[Update]) -> None:
    """Send the updates from gradient workers to their receivers; every rank must call.

    All ranks have updates of the same blocks.
    """
    backend = placed.backend
    parcels: dict[Update, Parcel] = {}
    if backend.world_size > 1:
        for update in updates:
            parcel = update.parcel_to_send(backend)
            if parcel is not None:
                parcels[update] = parcel
    if parcels:
        with backend.phases("exchange"):
            deliver(backend, list(parcels.values()), "exchange", fused=backend.fused)
    sharded: list[Update] = []
    for update in updates:
        if update in parcels:
            tensors = parcels[update].tensors
            assert tensors is not None
            update.receive(tensors)
            _cut(update, backend.rank)
        elif update.stack.like.shards:
            sharded.append(update)
    if sharded:
        with backend.phases("exchange"):
            _scatter(placed, sharded)


def _cut(update: Update, rank: int) -> None:
    """Keep this rank's parts of the updates of sharded parameters."""
    if not update.stack.like.shards:
        return
    for block, named in update.unpacked().items():
        parts = update.parts.setdefault(block, {})
        for name, shards in block.shards.items():
            parts[name] = shards.part(named[name], rank).clone()
    if rank not in update.stack.place.gradient_workers:
        update.matrix = None  # as without a parcel


def _scatter(placed: PlacedBlocks, updates: Sequence[Update]) -> None:
    """Send each rank its parts of the updates of sharded parameters."""
    splits: list[Split] = []
    targets: list[tuple[Update, Block, str]] = []
    for update in updates:
        place, unpacked = update.stack.place, update.unpacked()
        for block in update.blocks:
            for name, shards in block.shards.items():
                split = Split(
                    shards=shards,
                    dtype=block.dtype,
                    device=block.device,
                    workers=place.gradient_workers,
                    sources=place.sources,
                    whole=unpacked.get(block, {}).get(name),
                )
                splits.append(split)
                targets.append((update, block, name))
    scatter(placed.backend, splits, "exchange")
    for split, (update, block, name) in zip(splits, targets, strict=True):
        if split.part is not None:
            update.parts.setdefault(block, {})[name] = split.part


def by_parameter(updates: Sequence[Update]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return this rank's parts of updates, views in the shapes of `GradientHome.local`."""
    parameters: list[nn.Parameter] = []
    values: list[Tensor] = []
    for update in updates:
        stack, matrix = update.stack, update.matrix
        if 1 < len(stack.blocks) == len(update.members) and not stack.like.shards:
            # Views of a whole stack at once, if its layouts allow that.
            parts = None if matrix is None else stack.parts(matrix)
            if parts is not None:
                parameters += stack.parameters
                values += parts
                continue
        of_blocks = update.parts if stack.like.shards else update.unpacked()
        for block, named in of_blocks.items():
            parameters += [block.parameters[name] for name in named]
            values += named.values()
    return parameters, values


def write(updates: Sequence[Update], home: GradientHome) -> None:
    """Overwrite the gradients with the updates, in place."""
    parameters, values = by_parameter(updates)
    # A parameter of a block without a gradient gets none.
    pairs = zip(home.each(parameters), values, strict=True)
    written = [(gradient, value) for gradient, value in pairs if gradient is not None]
    if written:
        targets, sources = zip(*written, strict=True)
        torch._foreach_copy_(targets, sources)
