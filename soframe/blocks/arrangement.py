"""How the tensors of blocks that are alike lie side by side in the tensors of their stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from math import prod
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from soframe.blocks.spec import BlockSpec
from soframe.kernels.devices import memory_of

Members = Sequence[int]

B = TypeVar("B", bound=BlockSpec)


class _ParameterView(NamedTuple):
    """The place of a parameter in its block's matrix."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


_ParameterViews = tuple[_ParameterView, ...]  # of all parameters of a block


class Arrangement(Generic[B]):
    """Blocks whose tensors are slices of one, along the first dimension, in a placement's order."""

    def __init__(self, blocks: Sequence[B]) -> None:
        self.blocks: tuple[B, ...] = tuple(blocks)
        self.like: B = blocks[0]
        self.all = tuple(range(len(self.blocks)))
        # The views that blocks have, None for a block without; None before `parts` has looked.
        self._views_of_blocks: frozenset[_ParameterViews | None] | None = None
        self._flat = len(self.blocks) > 1 and self.like.elementwise
        # The first entry of each block in a flat stack, and the end.
        self._starts = [0, *accumulate(prod(block.shape) for block in self.blocks)]

    def blocks_of(self, members: Members) -> Sequence[B]:
        """Return some of the blocks."""
        if len(members) == len(self.blocks):
            return self.blocks
        return [self.blocks[member] for member in members]

    def views(self, tensor: Tensor, members: Members) -> list[Tensor]:
        """Return the slices of some blocks, one for each run of neighbours."""
        if len(members) == len(self.blocks):
            return [tensor]
        starts: Sequence[int] = self._starts
        if not self._flat:
            starts = range(0, len(tensor) + 1, len(tensor) // len(self.blocks))
        return [tensor[starts[first] : starts[last]] for first, last in _runs(members)]

    def take(self, tensor: Tensor, members: Members) -> Tensor:
        """Return the groups of some blocks: a view where they are neighbours, else a copy."""
        if len(members) == len(self.blocks):
            return tensor
        views = self.views(tensor, members)
        return views[0] if len(views) == 1 else torch.cat(views)

    def take_each(self, tensors: Mapping[str, Tensor], members: Members) -> dict[str, Tensor]:
        """Return the groups of some blocks of several tensors, by name."""
        if len(members) == len(self.blocks):
            return dict(tensors)
        return {name: self.take(tensor, members) for name, tensor in tensors.items()}

    def matched(
        self, tensor: Tensor, members: Members, values: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the slices of some blocks, each with its part of values of these blocks."""
        views = self.views(tensor, members)
        if len(views) == 1:
            return [(views[0], values)]
        return list(zip(views, values.split(list(map(len, views))), strict=True))

    def put(self, tensor: Tensor, members: Members, values: Tensor) -> None:
        """Overwrite the groups of some blocks, in place."""
        for view, part in self.matched(tensor, members, values):
            view.copy_(part)

    def shape_of(self, members: Members) -> tuple[int, ...]:
        """Return the shape of the gradients of some blocks as one tensor."""
        if self._flat:
            sizes = [prod(block.shape) for block in self.blocks_of(members)]
            return sum(sizes), 1, 1
        groups, out, into = self.like.shape
        return len(members) * groups, out, into

    def split(self, tensor: Tensor, members: Members) -> list[Tensor]:
        """Return views of the gradients or updates of some blocks, ``[groups, out, in]`` each."""
        if not self._flat:
            return list(tensor.chunk(len(members)))
        shapes = [block.shape for block in self.blocks_of(members)]
        parts = tensor.split(list(map(prod, shapes)))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Undo `split`; one matrix is not copied."""
        if self._flat:
            matrices = [matrix.reshape(-1, 1, 1) for matrix in matrices]
        return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all blocks, in their order."""
        parameters: list[nn.Parameter] = []
        for block in self.blocks:
            parameters += block.parameters.values()
        return parameters

    def flattened(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Undo `parts` for a flat stack, of gradients in its dtype; else None."""
        views = self._views_of_blocks
        if not self._flat or views is None or None in views:
            return None
        for gradient in gradients:
            if gradient.dtype != self.like.dtype or gradient.is_sparse:
                return None
        flat: Tensor = _flatten_dense_tensors(gradients)
        return flat.view(-1, 1, 1)

    def parts(self, tensor: Tensor) -> list[Tensor] | None:
        """Return each parameter's part of the gradients or updates of all blocks, as views.

        They are in the order of `parameters`. None where a layout unpacks copies or pads matrices,
        or where blocks of one shape unpack differently.
        """
        if not tensor.is_contiguous():
            return None
        if self._views_of_blocks is None:
            parts = zip(self.blocks, self.split(tensor, self.all), strict=True)
            views = [_parameter_views(block, part, self._flat) for block, part in parts]
            self._views_of_blocks = frozenset(views)
        if None in self._views_of_blocks:
            return None
        if self._flat:
            return list(_unflatten_dense_tensors(tensor.view(-1), self.parameters))
        if len(self._views_of_blocks) > 1:
            return None
        (views_of_block,) = self._views_of_blocks
        assert views_of_block is not None
        start, blocks = tensor.storage_offset(), len(self.blocks)
        step = tensor.numel() // blocks
        parts_of_names: list[Sequence[Tensor]] = []  # by name in the block: a part for each block
        for size, strides, offset in views_of_block:
            view = tensor.as_strided((blocks, *size), (step, *strides), start + offset)
            parts_of_names.append(view.unbind(0))
        return list(chain.from_iterable(zip(*parts_of_names, strict=True)))

    def with_values(self, tensor: Tensor | None, members: Members, values: Tensor) -> Tensor:
        """Return a tensor of the stack with other values for some blocks, in other memory."""
        if len(members) == len(self.blocks):
            return values
        if tensor is None:
            new = self.empty(tuple(values.shape), len(members), values.dtype)
        else:
            new = tensor.clone()
        self.put(new, members, values)
        return new

    def empty(
        self, shape: Sequence[int], blocks: int = 1, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return zeros for all blocks, given the shape of a tensor of some of them."""
        like = self.like
        if self._flat:
            shape = self.shape_of(self.all)
        elif len(self.blocks) > 1:
            shape = (shape[0] // blocks * len(self.blocks), *shape[1:])
        return torch.zeros(tuple(shape), dtype=dtype or like.dtype, device=like.device)


def _parameter_views(block: BlockSpec, matrix: Tensor, in_order: bool) -> _ParameterViews | None:
    """Return the views of a block's parameters in its matrix, which is contiguous.

    None unless all are views, of the matrix's dtype, and together all of it; and with ``in_order``
    unless they lie one after the other, as they are in memory of their own.
    """
    named = block.layout.unpack(matrix)
    parts = [named[name] for name in block.parameters]
    memory = memory_of(matrix)
    if sum(part.numel() for part in parts) != matrix.numel():
        return None
    views: list[_ParameterView] = []
    start = end = int(matrix.storage_offset())  # of the parts so far
    for part in parts:
        if memory_of(part) != memory or part.dtype != matrix.dtype:
            return None
        begin = int(part.storage_offset())
        if in_order and not (part.is_contiguous() and begin == end):
            return None
        views.append(_ParameterView(tuple(part.shape), part.stride(), begin - start))
        end += part.numel()
    return tuple(views)


def _runs(members: Members) -> list[list[int]]:
    """Return runs of neighbours as [first, last + 1]."""
    runs: list[list[int]] = []
    for member in members:
        if runs and member == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([member, member + 1])
    return runs
