"""Moving state: to the blocks of a model that has changed, and to the ranks of a new placement."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from soframe.blocks import dtensors, zero
from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.comm.packing import pack_triangle
from soframe.layers.base import LayerHelper
from soframe.layers.layout import Layout
from soframe.registry import describe
from soframe.state.entries import entries_now, gather, held, put
from soframe.statistics.running import settle, unpack
from soframe.strategies.work import BlockPlacement


class Watch:
    """Tells whether the parameters of a model are still those that were registered."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [module._parameters for module in model.modules()]
        self._children = [module._modules for module in model.modules()]
        self._sharded = dtensors.units(model)
        self._seen = self._look()

    def _look(self) -> tuple[list[tuple[object, ...]], list[int], int]:
        parameters = self.parameters()
        # By name, too: pruning renames a parameter, and computes the weight from it from then on.
        trained: list[tuple[object, ...]] = [
            (name, id(p), p.requires_grad, p.dtype, p.device)
            for slots in self._slots
            for name, p in slots.items()
            if p is not None
        ]
        children = [id(child) for slots in self._children for child in slots.values()]
        return trained, children, zero.count(parameters)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the known modules have now, without walking the modules."""
        dtensors.reshard(self._sharded)  # parameters gathered for a pass are not compared
        return [p for slots in self._slots for p in slots.values() if p is not None]

    def changed(self) -> bool:
        """Return whether parameters, modules or the owner of the gradients have changed.

        Parameters may be frozen, thawed, renamed, cast, moved, replaced or added, and DeepSpeed's
        ZeRO may have taken over the gradients.
        """
        return self._look() != self._seen


def carry_over(old: Sequence[Block], new: Sequence[Block]) -> list[Block]:
    """Move the memory of old blocks, which are used up, and return the blocks that start anew."""
    # A block that lost its bias or its weight keeps the rows and columns of its factors that
    # remain, and is solved again. A block that gained a parameter starts anew.
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
    """Move memory to the blocks of a changed model; return whether some lack statistics."""
    # Every rank calls, with a backend that is prepared for both placements.
    settle(after.backend, list(before))
    anew = carry_over(before.blocks, after.blocks)
    dropped = redistribute({block.name: place for block, place in before}, after)
    return bool(anew) or dropped


def redistribute(before: Mapping[str, BlockPlacement], after: PlacedBlocks) -> bool:
    """Send tensors to the ranks that hold them now; return whether statistics were dropped."""
    # Every rank calls. Statistics of the current window cannot move to other contributors.
    backend, dropped = after.backend, False
    for block, place in after:
        if (was := before.get(block.name)) is None:
            continue
        if was.contributors != place.contributors:
            block.begin_window()
            dropped = True
        solved = set(block.second_order.solved)
        wanted = entries_now(block, place, solved)
        sent = [
            replace(now, source=then.source)
            for then, now in zip(entries_now(block, was, solved), wanted, strict=True)
            if not now.holders <= then.holders
        ]
        found = held(block, block.running)
        found.update(gather(backend, block, sent, found, "move"))
        put(
            block,
            place,
            {e.path: found[e.path] for e in wanted if backend.rank in e.holders},
            masses=block.running.masses,
            solved=solved,
            updates=block.state.updates,
        )
    return dropped


def _is_continued(before: Block, after: Block) -> bool:
    """Return whether a block has the module and the method that it had."""
    same_module = before.layout.module is after.layout.module
    return same_module and describe(before.method) == describe(after.method)


def _is_cut(before: Block, after: Block) -> bool:
    """Return whether factors are as before, or lose only rows and columns of lost inputs."""
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
    """Return the input columns that remain; None if there are new ones or it is not known."""
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
    """Return a tensor on the device and in the dtype of a block."""
    return tensor.to(device=block.device, dtype=block.dtype)


def _left(before: Block, after: Block, columns: slice | None, name: str, stored: Tensor) -> Tensor:
    """Return the input columns of a factor, or of its sum, that remain; all for None."""
    stored = _like(after, stored)
    factor = next(factor for factor in before.factors if factor.name == name)
    if columns is None or factor.side == "left":
        return stored
    cut = unpack(stored, factor)[:, columns, columns].contiguous()
    return cut if stored.dim() == 3 else pack_triangle(cut)
