"""Following the model: parameters and modules that change after construction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.stack import unpack
from soframe.comm.base import Backend
from soframe.comm.fused import Parcel, deliver
from soframe.comm.packing import pack_triangle
from soframe.layers.base import LayerHelper
from soframe.layers.layout import Layout
from soframe.registry import describe
from soframe.specs import TensorSpec
from soframe.step.averages import pack, settle, store
from soframe.strategies.placement import BlockPlacement


class Watch:
    """Tells whether a model's parameters are still those that were registered.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [module._parameters for module in model.modules()]
        self._children = [module._modules for module in model.modules()]
        self._sharded = sharding.sharded_modules(model)
        self._seen = self._look()

    def _look(self) -> tuple[list[tuple[object, ...]], list[int], int]:
        parameters = self.parameters()
        # By name, too: pruning renames a parameter, of which the weight is computed from then on.
        trained: list[tuple[object, ...]] = [
            (name, id(p), p.requires_grad, p.dtype, p.device)
            for slots in self._slots
            for name, p in slots.items()
            if p is not None
        ]
        children = [id(child) for slots in self._children for child in slots.values()]
        return trained, children, sharding.zero_count(parameters)

    def parameters(self) -> list[nn.Parameter]:
        """Return what the known places hold now: a walk through the modules takes longer."""
        sharding.reshard(self._sharded)  # what was gathered for a pass has nothing to say
        return [p for slots in self._slots for p in slots.values() if p is not None]

    def changed(self) -> bool:
        """Return whether the model, or who has its gradients, has changed since it was registered.

        A parameter may have been frozen, thawed, renamed, cast, moved to another device, replaced
        or added, a module exchanged or added, and DeepSpeed's ZeRO may have taken the gradients
        over.
        """
        return self._look() != self._seen


def hand_over(before: PlacedBlocks, after: PlacedBlocks) -> bool:
    """Move the tensors and numbers of blocks to those of the changed model; every rank must call.

    A block that lost its bias or its weight keeps the factors of what remains, which are exactly
    the remaining rows and columns; it is solved again. A block that gained a parameter starts anew.
    One that was cast, or moved to another device, keeps its tensors. Where other ranks contribute
    from now on, the statistics of the window under way are dropped.

    Args:
        before: The blocks so far.
        after: The blocks from now on; their backend is prepared for both placements.

    Returns:
        Whether some of them lack statistics now, the same on every rank.
    """
    settle(before, {stack: stack.all for stack in before.stacks})
    by_name = {block.name: (block, place) for block, place in before}
    lacking = False
    for block, place in after:
        old, was = by_name.get(block.name, (None, place))
        columns = None
        if old is not None and _is_continued(old, block) and _is_cut(old, block):
            columns = _remaining_columns(old.layout, block.layout)
        if old is None or columns is None:
            lacking = True
            continue
        same = old.shape == block.shape
        keep = functools.partial(_left, old, block, None if same else columns)
        block.record.masses = dict(old.record.masses)
        block.record.failures = old.record.failures
        block.record.statistics_at = old.record.statistics_at
        if was.contributors == place.contributors:
            _move_window(old, block, keep)
        else:
            lacking = True
        moved = _Move(after.backend, old, block, was, place)
        moved.factors(keep)
        if same:
            block.record.solved_at = old.record.solved_at
            moved.second_order()
            moved.state()
    return lacking


def _move_window(old: Block, block: Block, keep: Callable[[str, Tensor], Tensor]) -> None:
    """Continue with the sums of the window under way."""
    block.record.counts, block.record.gathered = old.record.counts, old.record.gathered
    for factor in block.captured:
        total = old.stack.sums.get(factor.name)
        if total is not None:
            part = keep(factor.name, old.stack.take(total, (old.member,)))
            block.stack.add(factor, block.member, part, 1.0)


@dataclass(frozen=True)
class _Move:
    """The tensors of a block, on their way from one place to another."""

    backend: Backend
    old: Block
    block: Block
    was: BlockPlacement
    place: BlockPlacement

    def _sent(
        self, specs: Sequence[TensorSpec], held: list[Tensor] | None, source: int, *, all_have: bool
    ) -> list[Tensor] | None:
        """Return tensors on the ranks that need them, sent from a rank if some lack them."""
        if all_have:
            return held
        return to_everyone(
            self.backend, self.block, source=source, specs=tuple(specs), tensors=held, phase="move"
        )

    def factors(self, keep: Callable[[str, Tensor], Tensor]) -> None:
        """Move the running factors."""
        running, rank = self.old.running, self.backend.rank
        for index, factor in enumerate(self.block.factors):
            if factor.name not in self.block.record.masses:
                continue
            held = None
            if factor.name in running:
                held = [pack(keep(factor.name, running[factor.name]), factor)]
            enough = set(self.place.holding(index)) <= set(self.was.holding(index))
            spec, source = TensorSpec(factor.packed_shape), self.was.owners[index]
            tensors = self._sent([spec], held, source, all_have=enough)
            if self.place.holds(rank, index):
                assert tensors is not None
                stored = store(tensors[0], factor, packed=self.place.packed)
                self.block.stack.set_factor(factor.name, (self.block.member,), stored)

    def second_order(self) -> None:
        """Move the second-order data."""
        if not self.old.record.solved:
            return
        data, source = self.old.second_order, self.was.gradient_workers[0]
        for index, factor in enumerate(self.block.factors):
            specs = self.block.tensors.get(factor.name, {})
            if not specs:
                continue
            held = None
            if factor.name in data:
                held = [_like(self.block, data[factor.name][name]) for name in specs]
            enough = set(self.place.needing(index)) <= set(self.was.needing(index))
            tensors = self._sent(list(specs.values()), held, source, all_have=enough)
            if self.backend.rank in self.place.needing(index):
                assert tensors is not None
                named = dict(zip(specs, tensors, strict=True))
                self.block.stack.set_data(factor.name, (self.block.member,), named)
        self.block.record.solved = True

    def state(self) -> None:
        """Move the method's state."""
        self.block.record.updates = self.old.record.updates
        specs, state = self.block.states, self.old.state
        if not self.old.record.updates or not specs:
            return
        held = [_like(self.block, state[name]) for name in specs] if len(state) else None
        enough = set(self.place.gradient_workers) <= set(self.was.gradient_workers)
        source = self.was.gradient_workers[0]
        tensors = self._sent(list(specs.values()), held, source, all_have=enough)
        if self.backend.rank in self.place.gradient_workers:
            assert tensors is not None
            named = dict(zip(specs, tensors, strict=True))
            self.block.stack.set_state((self.block.member,), named)


def to_everyone(
    backend: Backend,
    block: Block,
    source: int,
    specs: tuple[TensorSpec, ...],
    tensors: list[Tensor] | None,
    phase: str,
) -> list[Tensor]:
    """Bring tensors of a block from one rank to all; every rank must call.

    Args:
        backend: The backend.
        block: The block.
        source: The rank that has them.
        specs: What they are.
        tensors: The tensors, on that rank.
        phase: The phase that the traffic is counted under.

    Returns:
        The tensors, on every rank.
    """
    everyone = tuple(range(backend.world_size))
    tensors = tensors if backend.rank == source else None
    parcel = Parcel(
        source, everyone, specs=specs, dtype=block.dtype, device=block.device, tensors=tensors
    )
    deliver(backend, [parcel], phase)
    assert parcel.tensors is not None
    return parcel.tensors


def _is_continued(before: Block, after: Block) -> bool:
    """Return whether a block is of the same module, seen by the same method."""
    same_module = before.layout.module is after.layout.module
    return same_module and describe(before.method) == describe(after.method)


def _is_cut(before: Block, after: Block) -> bool:
    """Return whether factors are as they were, or lose the rows and columns that inputs lose."""
    if before.shape == after.shape:
        return True
    if len(before.factors) != len(after.factors):
        return False
    for one, other in zip(before.factors, after.factors, strict=True):
        if one.kind != "psd":
            return False
        sizes = (one.size, other.size)
        as_inputs = one.side == "right" and sizes == (
            before.shape.in_features,
            after.shape.in_features,
        )
        as_ever = one.side == "left" and sizes[0] == sizes[1]
        if one.groups != other.groups or not (as_inputs or as_ever):
            return False
    return True


def _remaining_columns(before: Layout, after: Layout) -> slice | None:
    """Return which input columns remain; None if there are new ones, or it cannot be told."""
    if set(before.parameters) == set(after.parameters):
        return slice(None)
    if not isinstance(before, LayerHelper) or not isinstance(after, LayerHelper):
        return None
    if not {"weight", "bias"}.issuperset({*before.parameters, *after.parameters}):
        return None
    had = (before.weight is not None, before.bias is not None)
    has = (after.weight is not None, after.bias is not None)
    if any(now and not then for then, now in zip(had, has, strict=True)):
        return None
    if had == has:
        return slice(None)
    return slice(-1) if has[0] else slice(-1, None)


def _like(block: Block, tensor: Tensor) -> Tensor:
    """Return a tensor of a former block where the block is now, in its dtype."""
    return tensor.to(device=block.device, dtype=block.dtype)


def _left(before: Block, after: Block, columns: slice | None, name: str, stored: Tensor) -> Tensor:
    """Return what is left of a factor, or of its sum, in a block that has lost inputs.

    Args:
        before: The block as it was.
        after: The block as it is.
        columns: The inputs that remain; None for all.
        name: The factor.
        stored: The factor, or its sum.
    """
    stored = _like(after, stored)
    factor = next(factor for factor in before.factors if factor.name == name)
    if columns is None or factor.side == "left":
        return stored
    cut = unpack(stored, factor)[:, columns, columns].contiguous()
    return cut if stored.dim() == 3 else pack_triangle(cut)
