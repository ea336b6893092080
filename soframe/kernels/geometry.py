"""The geometry of a convolution, and the products of shifted positions in its factor.

Along one axis, output ``t`` and kernel position ``k`` meet at the input position
``u = stride t + dilation k - before``. The block ``(k, k')`` of the factor is a sum of
``x[u] x[u + shift]^T`` with ``shift = dilation (k' - k)``, over the ``u`` that ``k`` meets while
both positions are within the input (outside are zeros). Blocks with the same shift mostly sum over
the same positions. `segments` cuts all these ranges where they begin and end: every product of a
segment is computed once, and added to all blocks that contain it. Nothing is ever subtracted, so no
digits are lost for any padding. Two axes cross: a rectangle is a segment of rows times one of
columns.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class Axis(NamedTuple):
    """One axis of a convolution: input and kernel positions, and zeros before and after them."""

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def reach(self) -> int:
        """The distance from a window's first position to its last."""
        return self.dilation * (self.kernel - 1)

    @property
    def out(self) -> int:
        """Positions of the output."""
        return (self.size + self.before + self.after - self.reach - 1) // self.stride + 1

    def inside(self, k: int) -> tuple[int, int]:
        """Return ``start, stop`` of the outputs that meet the input at kernel position ``k``."""
        first = self.before - self.dilation * k
        start = max(0, -(-first // self.stride))
        return start, min(self.out, (self.size - 1 + first) // self.stride + 1)


class Geometry(NamedTuple):
    """The shapes that a factor of a convolution's inputs depends on."""

    batch: int
    groups: int
    channels: int  # of a group
    rows: Axis
    columns: Axis

    @property
    def features(self) -> int:
        """The length of a patch."""
        return self.rows.kernel * self.columns.kernel * self.channels

    @property
    def positions(self) -> int:
        """Output positions of the whole batch."""
        return self.batch * self.rows.out * self.columns.out


class Segment(NamedTuple):
    """Positions ``start, start + stride, ...`` and the blocks that sum over them."""

    start: int
    count: int  # type: ignore[assignment]  # instead of the tuple's method
    shift: int  # the other position minus this one
    first: int  # of the run of kernel positions ``first, first + step, ...``
    step: int
    kernels: int  # the length of the run
    other: int  # ``k' - k``


@lru_cache(maxsize=1024)
def segments(axis: Axis) -> tuple[Segment, ...]:
    """Return the segments of an axis by the length of their shift, for shifts of either sign."""
    # Each block's range is the disjoint union of the segments whose run contains its ``k``.
    runs: list[Segment] = []
    for (other, residue), spans in _ranges(axis).items():
        edges: set[int] = set()
        for start, stop, _ in spans:
            edges |= {start, stop}
        for start, stop in pairwise(sorted(edges)):
            ks = sorted(k for a, b, k in spans if a <= start and stop <= b)
            if not ks:
                continue
            step = ks[1] - ks[0] if len(ks) > 1 else 1
            assert ks == list(range(ks[0], ks[-1] + 1, step))
            position, shift = start * axis.stride + residue, axis.dilation * other
            segment = Segment(
                position, stop - start, shift, first=ks[0], step=step, kernels=len(ks), other=other
            )
            runs.append(segment)
    return tuple(sorted(runs, key=lambda s: (abs(s.shift), s.shift, s.start)))


def _ranges(axis: Axis) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """Return ``start, stop, k`` of the blocks ``(k, k')``, by ``k' - k`` and the residue."""
    ranges: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for k in range(axis.kernel):
        # Positions of one residue are counted alike, whichever kernel position meets them.
        offset, residue = divmod(axis.dilation * k - axis.before, axis.stride)
        for other in range(axis.kernel):
            (a, b), (c, d) = axis.inside(k), axis.inside(other)
            start, stop = max(a, c), min(b, d)
            if start < stop:
                ranges[other - k, residue].append((start + offset, stop + offset, k))
    return ranges


class Blocks(NamedTuple):
    """The blocks of a factor that two segments add to."""

    size: int  # features of a block: channels, or a kernel row of them
    kernels: tuple[int, int]  # blocks along the kernel's rows and columns
    steps: tuple[int, int]  # from one block to the next, in features
    row: int  # of the factor, where the first block begins
    column: int

    def of(self, total: Tensor) -> Tensor:
        """Return a view of ``total``: ``[groups, kernel rows, kernel columns, size, size]``."""
        # A run of segments moves along the diagonal: one step along both dimensions of the total.
        group, down, right = total.stride()
        along = down + right
        shape = (total.shape[0], *self.kernels, self.size, self.size)
        strides = (group, self.steps[0] * along, self.steps[1] * along, down, right)
        offset = total.storage_offset() + self.row * down + self.column * right
        return total.as_strided(shape, strides, offset)


@lru_cache(maxsize=4096)
def blocks(rows: Segment, columns: Segment | None, geometry: Geometry) -> Blocks:
    """Return the blocks of two segments; without ``columns`` they have all kernel columns."""
    channels = geometry.channels
    line = geometry.columns.kernel * channels  # features of a kernel row
    row, other, step = rows.first * line, rows.other * line, rows.step * line
    if columns is None:
        return Blocks(line, (rows.kernels, 1), (step, 0), row, row + other)
    row, other = row + columns.first * channels, other + columns.other * channels
    kernels, steps = (rows.kernels, columns.kernels), (step, columns.step * channels)
    return Blocks(channels, kernels, steps, row, row + other)


def patch_sums(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the sum of all patches, ``[groups, features]``: the bias's row of the factor."""
    rows = _meets(geometry.rows, x.device, x.dtype)
    columns = _meets(geometry.columns, x.device, x.dtype)
    sums = rows @ x.sum(0) @ columns.T  # [channels, kernel rows, kernel columns]
    by_group: Tensor = sums.unflatten(0, (geometry.groups, geometry.channels))
    return by_group.permute(0, 2, 3, 1).flatten(1)


def patch_means(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the mean patch of every sample, ``[groups, batch, 1, features]``."""
    rows = _meets(geometry.rows, x.device, x.dtype)
    columns = _meets(geometry.columns, x.device, x.dtype)
    sums = rows @ x @ columns.T  # [batch, channels, kernel rows, kernel columns]
    by_group = sums.unflatten(1, (geometry.groups, geometry.channels)).permute(1, 0, 3, 4, 2)
    means: Tensor = by_group.flatten(2).unsqueeze(2) / (geometry.rows.out * geometry.columns.out)
    return means


@lru_cache(maxsize=1024)
def _meets(axis: Axis, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``[kernel, size]``: one where a kernel position meets an input position."""
    # Cached, since copying it to an accelerator makes the host wait. It has its numbers even if a
    # plan, which runs without numbers, is the first to need it.
    with _disable_current_modes():
        meets = torch.zeros(axis.kernel, axis.size, device="cpu")
        for k in range(axis.kernel):
            start, stop = axis.inside(k)
            if start < stop:
                first = axis.dilation * k - axis.before
                meets[k, first + axis.stride * start : first + axis.stride * stop : axis.stride] = 1
        return meets.to(device, dtype)
