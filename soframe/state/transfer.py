"""Move state: to the blocks of a changed model, and to the ranks of a new placement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from soframe.blocks.block import Block, PlacedBlocks, unpack
from soframe.comm.base import Backend
from soframe.comm.packing import pack_triangle
from soframe.estimate.averages import settle
from soframe.estimate.window import Window
from soframe.layers.base import LayerHelper
from soframe.registry import describe
from soframe.state.entries import entries, gather, held, put, stored_dtype
from soframe.strategies.work import BlockPlacement

_ALL = slice(None)


def hand_over(
    before: PlacedBlocks,
    after: PlacedBlocks,
    windows: tuple[Window, Window],
    *,
    forgets: bool = False,
) -> bool:
    """Return whether some blocks lack statistics, after moving state to a changed model's blocks.

    A collective, with a backend prepared for both placements. A block that lost its bias or its
    weight keeps the remaining rows and columns of its factors, and is solved again. A block that
    gained a parameter starts anew. Statistics of the window under way cannot move to other
    contributors. With ``forgets`` only these move. ``windows`` are the former and the new one.
    """
    # Accumulators do not move: their statistics are reduced first.
    settle(before, {stack: stack.all for stack in before.stacks})
    by_name = {block.name: (block, place) for block, place in before}
    by_identity = {block.identity: (block, place) for block, place in before}
    lacking = forgets
    for block, place in after:
        # A module that was moved within the model has another name, or the name of another one.
        named = by_name.get(block.name, (None, place))
        old, was = by_identity.get(block.identity, named)
        if old is None:
            lacking = True
            continue
        block.damp(old.record.damping)
        # The layer may have lost its bias, the last column, or its weight, all others.
        columns = _remaining_columns(old, block)
        if columns is None:
            lacking = True
            continue
        keep = functools.partial(_left, old, block, columns)
        if was.contributors == place.contributors:
            _move_window(windows, old, block, keep)
        else:
            lacking = True
        if not forgets:
            _move(after.backend, (old, was), (block, place), keep, same=columns == _ALL)
    return lacking


def _move_window(
    windows: tuple[Window, Window], old: Block, block: Block, keep: Callable[[str, Tensor], Tensor]
) -> None:
    """Keep the statistics of the window under way."""
    former, window = windows
    if old not in former.tallies or block not in window.tallies:
        return
    window.tallies[block] = former.tallies[old]
    sums, former_sums = window.sums_of(block.stack), former.sums_of(old.stack)
    former_sums.multiply()
    totals = former_sums.totals
    for factor in block.captured:
        if factor.name in totals:
            part = keep(factor.name, old.stack.take(totals[factor.name], (old.member,)))
            sums.add(factor, block.member, part, 1.0)


def _move(
    backend: Backend,
    before: tuple[Block, BlockPlacement],
    after: tuple[Block, BlockPlacement],
    keep: Callable[[str, Tensor], Tensor],
    *,
    same: bool,
) -> None:
    """Send the tensors of a block to its new holders, and copy its counters."""
    (old, was), (block, place) = before, after
    # Second-order data and states of fewer columns are made anew.
    masses, solved, updates = old.record.masses, False, 0
    if same:
        solved, updates = old.record.solved, old.record.updates
    having: dict[str, Any] = {"factors": masses, "solved": solved, "updates": updates}
    entries_now = list(entries(block, place, **having))
    sent = [
        replace(now, source=then.source)
        for then, now in zip(entries(block, was, **having), entries_now, strict=True)
        # Only tensors that some new holder lacks are sent.
        if not now.holders <= then.holders
    ]
    factors = {name: keep(name, stored) for name, stored in old.running.items()}
    tensors = {
        path: tensor.to(block.device, stored_dtype(block, path))
        for path, tensor in held(old, factors).items()
    }
    tensors.update(gather(backend, block, sent, tensors, "move"))
    kept = {e.path: tensors[e.path] for e in entries_now if backend.rank in e.holders}
    put(block, place, kept, masses=masses, solved=solved, updates=updates)
    block.record.failures = old.record.failures
    block.record.statistics_at = old.record.statistics_at
    block.record.missed = old.record.missed
    block.record.solved_at = old.record.solved_at if solved else {}


_REMAINING: dict[tuple[str, ...], slice] = {("weight",): slice(-1), ("bias",): slice(-1, None)}
"""The columns of ``[weight | bias]`` that remain, by the parameters that do."""


def _remaining_columns(old: Block, block: Block) -> slice | None:
    """Return the remaining input columns; None if columns are new or unknown."""
    before, after = old.layout, block.layout
    if before.module is not after.module or describe(old.method) != describe(block.method):
        return None
    if set(before.parameters) == set(after.parameters):
        # A parameter of another shape may be in the place of a former one.
        return _ALL if old.shape == block.shape else None
    if not isinstance(before, LayerHelper) or set(before.parameters) != {"weight", "bias"}:
        return None
    # Only the matrix of the inputs becomes smaller.
    sides = _sides(old)
    if sides is None or sides != _sides(block):
        return None
    return _REMAINING.get(tuple(after.parameters))


def _sides(block: Block) -> list[str] | None:
    """Return the side of each factor; None if some factor is not the matrix of a whole side."""
    sizes = {"left": block.shape.out_features, "right": block.shape.in_features}
    sides: list[str] = []
    for factor in block.factors:
        if factor.kind != "psd" or factor.size != sizes.get(factor.side):
            return None
        sides.append(factor.side)
    return sides


def _left(before: Block, after: Block, columns: slice, name: str, stored: Tensor) -> Tensor:
    """Return the given input columns of a factor or its sum."""
    stored = stored.to(after.device, after.dtype)
    factor = next(factor for factor in before.factors if factor.name == name)
    if columns == _ALL or factor.side == "left":
        return stored
    cut = unpack(stored, factor)[:, columns, columns].contiguous()
    return cut if stored.dim() == 3 else pack_triangle(cut)
