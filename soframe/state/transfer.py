"""Following the model: parameters and modules that change after construction."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.comm.base import Backend
from soframe.comm.fusion import Parcel, deliver, own_memory
from soframe.comm.packing import pack_triangle
from soframe.layers.base import LayerHelper
from soframe.layers.layout import Layout
from soframe.registry import describe
from soframe.specs import FactorSpec, TensorSpec
from soframe.statistics.running import pack, settle, store, unpack
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


def carry_over(old: Sequence[Block], new: Sequence[Block]) -> list[Block]:
    """Move what is known of the old blocks into the new ones.

    A block that lost its bias or its weight keeps the factors of what remains, which are exactly
    the remaining rows and columns; it is solved again. A block that gained a parameter starts anew.
    One that was cast, or moved to another device, takes along what it has.

    Args:
        old: The blocks so far, with nothing deferred; they are left empty.
        new: The blocks from now on.

    Returns:
        Those that start anew.
    """
    anew = []
    by_name = {block.name: block for block in old}
    for block in new:
        before = by_name.get(block.name)
        columns = None
        if before is not None and _is_continued(before, block) and _is_cut(before, block):
            columns = _remaining_columns(before.layout, block.layout)
        if before is None or columns is None:
            anew.append(block)
            continue
        same = before.shape == block.shape
        keep = functools.partial(_left, before, block, None if same else columns)
        block.window.continue_from(before.window, keep)
        block.running.continue_from(before.running, keep)
        block.second_order.continue_from(before.second_order, same=same)
        for name, data in list(block.second_order.items()):
            block.second_order.change(name, {key: _like(block, t) for key, t in data.items()})
        if same:
            state = {name: _like(block, tensor) for name, tensor in before.state.items()}
            block.state.load(state, before.state.updates)
    return anew


def hand_over(before: PlacedBlocks, after: PlacedBlocks) -> bool:
    """Hand what is known to the blocks of a model that has changed; every rank must call.

    Args:
        before: The blocks so far, which are left empty.
        after: The blocks from now on; their backend is prepared for both placements.

    Returns:
        Whether some of them lack statistics now, the same on every rank.
    """
    settle(after.backend, list(before))
    anew = carry_over(before.blocks, after.blocks)
    dropped = redistribute({block.name: place for block, place in before}, after)
    return bool(anew) or dropped


def redistribute(before: Mapping[str, BlockPlacement], after: PlacedBlocks) -> bool:
    """Bring what blocks remember to the ranks that are to remember it; every rank must call.

    Where other ranks contribute from now on, the statistics of the window under way are dropped.

    Args:
        before: Where the blocks were, by name.
        after: The blocks, with the places that they have now.

    Returns:
        Whether statistics were dropped, the same on every rank.
    """
    backend, dropped = after.backend, False
    for block, place in after:
        if (was := before.get(block.name)) is None:
            continue
        if was.contributors != place.contributors:
            block.begin_window()
            dropped = True
        for index, factor in enumerate(block.factors):
            if factor.name in block.running.masses:
                _move_factor(backend, block, index=index, factor=factor, was=was, place=place)
        for index, factor in enumerate(block.factors):
            if factor.name in block.second_order.solved:
                _move_second_order(backend, block, index=index, was=was, place=place)
        if block.state.updates and block.states:
            _move_state(backend, block, was, place)
    return dropped


def _move_factor(
    backend: Backend,
    block: Block,
    index: int,
    factor: FactorSpec,
    was: BlockPlacement,
    place: BlockPlacement,
) -> None:
    stored = block.running.take(factor.name)
    if not set(place.holding(index)) <= set(was.holding(index)):
        packed = None if stored is None else [pack(stored, factor)]
        spec = TensorSpec(factor.packed_shape)
        (stored,) = to_everyone(
            backend, block, source=was.owners[index], specs=(spec,), tensors=packed, phase="move"
        )
    if place.holds(backend.rank, index):
        assert stored is not None
        block.running.put(factor.name, store(stored, factor, place))


def _move_second_order(
    backend: Backend, block: Block, index: int, was: BlockPlacement, place: BlockPlacement
) -> None:
    name = block.factors[index].name
    data = block.second_order.take(name)
    if not set(place.needing(index)) <= set(was.needing(index)):
        specs = block.tensors[name]
        held = None if data is None else [data[key] for key in specs]
        source = was.gradient_workers[0]
        tensors = to_everyone(
            backend, block, source=source, specs=tuple(specs.values()), tensors=held, phase="move"
        )
        data = dict(zip(specs, map(own_memory, tensors), strict=True))
    if backend.rank in place.needing(index):
        assert data is not None
        block.second_order.put({name: data})


def _move_state(backend: Backend, block: Block, was: BlockPlacement, place: BlockPlacement) -> None:
    state = block.state.take()
    if not set(place.gradient_workers) <= set(was.gradient_workers):
        source = was.gradient_workers[0]
        held = [state[name] for name in block.states] if backend.rank == source else None
        specs = tuple(block.states.values())
        tensors = to_everyone(
            backend, block, source=source, specs=specs, tensors=held, phase="move"
        )
        state = dict(zip(block.states, map(own_memory, tensors), strict=True))
    if backend.rank in place.gradient_workers:
        block.state.put(state)


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
