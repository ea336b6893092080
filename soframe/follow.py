"""Following the model: parameters and modules that change after construction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from soframe.blocks import Block
from soframe.layers.base import LayerHelper
from soframe.registry import describe


class Watch:
    """Tells whether a model's parameters are still those that were registered.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(m._parameters, name) for m in model.modules() for name in m._parameters]
        self._children = [m._modules for m in model.modules() if m._modules]
        self._seen = self._look()

    def _look(self) -> tuple[list[tuple[int, bool]], list[int]]:
        parameters = [
            (id(p), p.requires_grad)
            for slots, name in self._slots
            if (p := slots.get(name)) is not None
        ]
        return parameters, [id(child) for slots in self._children for child in slots.values()]

    def changed(self) -> bool:
        """Return whether a parameter was frozen, thawed or replaced, or a module exchanged."""
        return self._look() != self._seen


def carry_over(old: Sequence[Block], new: Sequence[Block]) -> list[Block]:
    """Move what is known of the old blocks into the new ones.

    A block that lost its bias or its weight keeps the factors of what remains, which are exactly
    the remaining rows and columns; it is solved again. A block that gained a parameter starts anew.

    Args:
        old: The blocks so far; they are left empty.
        new: The blocks from now on.

    Returns:
        Those that start anew.
    """
    anew = []
    by_name = {block.name: block for block in old}
    for block in new:
        before = by_name.get(block.name)
        columns = None
        if before is not None and _is_continued(before, block):
            columns = _remaining_columns(before.helper, block.helper)
        if before is None or columns is None:
            anew.append(block)
            continue
        block.mass, block.counts = before.mass, before.counts
        same = before.shape == block.shape
        for source, target in ((before.running, block.running), (before.sums, block.sums)):
            for factor in before.factors:
                if factor.name in source:
                    tensor = source[factor.name]
                    keep = same or factor.side == "left"
                    target[factor.name] = tensor if keep else _cut(tensor, columns)
        if same:
            block.second_order, block.solved_factors = before.second_order, before.solved_factors
    return anew


def _is_continued(before: Block, after: Block) -> bool:
    """Return whether a block is of the same module, seen by the same method."""
    return before.helper.module is after.helper.module and describe(before.method) == describe(
        after.method
    )


def _remaining_columns(before: LayerHelper, after: LayerHelper) -> slice | None:
    """Return which input columns remain; None if there are new ones."""
    had = (before.weight is not None, before.bias is not None)
    has = (after.weight is not None, after.bias is not None)
    if any(now and not then for then, now in zip(had, has, strict=True)):
        return None
    if had == has:
        return slice(None)
    return slice(-1) if has[0] else slice(-1, None)


def _cut(tensor: Tensor, columns: slice) -> Tensor:
    return tensor[:, columns, columns].contiguous()
