"""Blocking: large matrices are split into parts, each with its own factors.

The factor of a side of length n takes ``n^2`` numbers and a solve of ``n^3`` FLOPs. Splitting the
side into k pieces divides them by k and ``k^2`` (Anil et al., 2020, section 3.3, and Shi et al.,
2023, for Shampoo). Each side is split into the fewest pieces within the limit, whose lengths differ
by at most one, the longer ones first. Parts of one shape are stacked as groups: a matrix has up to
four shapes of parts, and each is one block ``[groups * parts, out, in]`` for the inner method.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from soframe.checks.values import require_integer
from soframe.layers.layout import BlockShape
from soframe.methods.base import Direction, Given, Method
from soframe.methods.composed import Composed, Names
from soframe.registry import KINDS, register

_SHAPES = 4  # the most shapes that the parts of a matrix have


class Span(NamedTuple):
    """Consecutive pieces of a side that have one length."""

    start: int
    pieces: int
    length: int


def spans(size: int, limit: int) -> list[Span]:
    """Split a side into the fewest pieces of at most ``limit``; one span for each length."""
    pieces = -(-size // limit)
    length, longer = divmod(size, pieces)
    first = Span(0, longer, length + 1)
    rest = Span(longer * (length + 1), pieces - longer, length)
    return [first, rest] if longer else [rest]


def runs(sizes: Sequence[int]) -> list[Span]:
    """Return pieces of given lengths, in their order; one span for neighbours of one length."""
    spans: list[Span] = []
    start = 0
    for length, run in itertools.groupby(sizes):
        pieces = len(list(run))
        spans.append(Span(start, pieces, length))
        start += pieces * length
    return spans


class Region(NamedTuple):
    """The parts of one shape."""

    rows: Span
    columns: Span

    def shape(self, groups: int) -> BlockShape:
        """Return the shape of the stacked parts, ``[groups * parts, rows, columns]``."""
        number = self.rows.pieces * self.columns.pieces
        return BlockShape(groups * number, self.rows.length, self.columns.length)

    def cut(self, matrix: Tensor) -> Tensor:
        """Split ``[groups, out, in]`` into its parts, ``[groups * parts, rows, columns]``."""
        return self._view(matrix).reshape(self.shape(len(matrix)))

    def put(self, matrix: Tensor, parts: Tensor) -> None:
        """Write parts into a matrix ``[groups, out, in]``, in place."""
        view = self._view(matrix)
        view.copy_(parts.view(view.shape))

    def _view(self, matrix: Tensor) -> Tensor:
        """Return the view ``[groups, pieces of rows, pieces of columns, rows, columns]``."""
        for dim, (start, pieces, length) in ((1, self.rows), (2, self.columns)):
            matrix = matrix.narrow(dim, start, pieces * length)
        matrix = matrix.unflatten(2, (self.columns.pieces, self.columns.length))
        parts: Tensor = matrix.unflatten(1, (self.rows.pieces, self.rows.length))
        return parts.transpose(2, 3)


class Parts(Composed):
    """A method of gradients alone, applied to each part of a matrix independently."""

    method: Any

    def __post_init__(self) -> None:
        method: Method = KINDS["method"].build(self.method, Method)
        if method.captures:
            raise ValueError(
                f"{type(self).__name__}: {method!r} reads calls, whose rows belong to whole "
                f"matrices: choose a method of gradients alone, such as 'shampoo' or 'soap'"
            )
        object.__setattr__(self, "method", method)
        self._declare_as(method)
        self._name(lambda by_region: Names(by_region, _outer))

    @abstractmethod
    def _regions(self, shape: BlockShape) -> list[Region]:
        """Return the parts of a matrix, by shape."""

    @property
    @abstractmethod
    def _most(self) -> int:
        """The most regions that a matrix has."""

    @property
    def _inner(self) -> Sequence[Method]:
        return list(itertools.repeat(self._method, self._most))

    def _shapes(self, shape: BlockShape) -> Iterator[BlockShape]:
        for region in self._regions(shape):
            yield region.shape(shape.groups)

    def _cut(self, matrix: Tensor) -> Iterator[Tensor]:
        for region in self._regions_of(matrix):
            yield region.cut(matrix)

    def direct(self, step: Given) -> Direction:
        matrix = torch.empty_like(step.incoming, memory_format=torch.contiguous_format)
        state: dict[str, Tensor] = {}
        for number, region in enumerate(self._regions_of(step.incoming)):
            gradient, incoming = region.cut(step.gradient), region.cut(step.incoming)
            of_region = self._given(number, step, gradient, incoming)
            update = self._method.direct(of_region)
            region.put(matrix, update.matrix)
            state |= self._state_names.of_outer(number, update.state)
        return Direction(matrix, state)

    def settings(self) -> dict[str, Any]:
        return self._method.settings()

    def with_settings(self, settings: Mapping[str, Any]) -> Method:
        method = self._method.with_settings(settings)
        if method is self._method:
            return self
        new: Parts = replace(cast(Any, self), method=method)
        return new

    @property
    def _method(self) -> Method:
        method: Method = self.method
        return method

    def _regions_of(self, matrix: Tensor) -> list[Region]:
        groups, out, into = matrix.shape
        return self._regions(BlockShape(groups, out, into))


@register("method", "blocked")
@dataclass(frozen=True)
class Blocked(Parts):
    """Apply a gradient-based method to each part of a matrix independently.

    ::

        Blocked(SOAP(), 512)
        Chain(("momentum", Blocked(Shampoo(), 256), "graft"))

    Each part is treated like a parameter of its own: a length that the method sets, for example
    with ``graft=True``, is set for each part. Other stages of a chain work on the whole matrix.

    Attributes:
        method: The inner method, as a name, class or instance; all its factors must be computed
            from the averaged gradient.
        block_size: The longest side of a part.

    Raises:
        ValueError: If the size is not positive, or the method reads calls.
    """

    method: Any = "shampoo"
    block_size: int = 1024

    def __post_init__(self) -> None:
        require_integer("Blocked: block_size", self.block_size, 1)
        super().__post_init__()

    def _regions(self, shape: BlockShape) -> list[Region]:
        _, out, into = shape
        pairs = itertools.product(spans(out, self.block_size), spans(into, self.block_size))
        return list(itertools.starmap(Region, pairs))

    @property
    def _most(self) -> int:
        return _SHAPES


@dataclass(frozen=True)
class CutRows(Parts):
    """Apply a method to row blocks of given sizes, such as Q, K and V of a fused projection."""

    method: Any
    sizes: tuple[int, ...]  # the numbers of rows, in their order, of each group of the matrix

    def _regions(self, shape: BlockShape) -> list[Region]:
        columns = Span(0, 1, shape.in_features)
        return [Region(rows, columns) for rows in runs(self.sizes)]

    @property
    def _most(self) -> int:
        return len(runs(self.sizes))


def _outer(number: int, name: str) -> str:
    """Return the name of a factor or state for one shape of parts; number 0 has no suffix."""
    return f"{name}@{number}" if number else name
