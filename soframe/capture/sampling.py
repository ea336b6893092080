"""Moments estimated from a random subset of the rows, times the inverse of its fraction.

The moment of n rows that are drawn from N without replacement, times N / n, is unbiased. Its error
falls with the square root of n: for any entry, with the standard deviation s of the products
``a_i a_j`` over all rows, it is ``s N / sqrt(n) sqrt((N - n) / (N - 1))`` (Cochran, 1977, section
2.5). If whole samples are taken, as of images, n and N count samples. Rows of one sample are mostly
alike, so the error is larger than for as many independent rows.

The draw depends on the step, the rank, the backward pass and N alone. So a resumed run draws the
same rows without any saved state; each rank draws its own rows; and layers with equal numbers of
rows draw the same ones, so that layers of one input still share its moment.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from soframe.capture.counting import DataRows
from soframe.checks.values import is_part
from soframe.layers.base import LayerHelper, Unit
from soframe.layers.sharing import Memory, content

Rows = float | int


def check_rows(rows: object) -> None:
    """Raise ValueError unless rows is a fraction of the rows of a call, or a number of them."""
    if not is_part(rows):
        raise ValueError(
            f"rows must be a fraction in (0, 1] (float) of the rows of a call, or a number of rows "
            f"(int), not {rows!r}"
        )


def chosen(step: int, rank: int, number: int, total: int, count: int) -> Tensor:
    """Return a random subset of ``count`` of ``total`` rows, ascending, fixed by the arguments."""
    seed = 0
    for part in (step, rank, number, total):
        seed = (seed * 1_000_003 + part + 1) % 2**63
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randperm(total, generator=generator, device="cpu")[:count].sort().values


@dataclass(frozen=True)
class Sampler:
    """Draws rows of calls.

    Attributes:
        rows: The fraction of a call's rows, or their number; 1.0 takes all.
        rank: The rank.
    """

    rows: Rows
    rank: int = field(repr=False)

    @cached_property
    def draws(self) -> bool:
        """Whether rows are drawn; otherwise all rows that are data are taken."""
        return isinstance(self.rows, int) or self.rows < 1


class _Taken(NamedTuple):
    """The rows that were taken of an input."""

    key: Hashable  # of the draw and the input
    memory: Memory  # of the input
    inputs: tuple[Tensor, ...]


@dataclass(eq=False)
class Draw:
    """Takes some of the rows of every call of one window.

    Attributes:
        sampler: The sampler.
        step: Completed steps.
    """

    sampler: Sampler
    step: int
    _indices: dict[Hashable, Tensor] = field(default_factory=dict, init=False)
    _last: _Taken | None = field(default=None, init=False)

    def take(
        self,
        helper: LayerHelper,
        call: tuple[tuple[Tensor, ...], Tensor],
        number: int,
        by_sample: bool,
        data: DataRows | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor, float]:
        """Return inputs and rows of a smaller call, and the multiplier of its moments.

        ``call`` has the inputs, or none, and the rows of the output gradient; ``number`` is the
        backward pass's. ``by_sample`` keeps the rows of a sample together; ``data`` are the rows or
        samples that are not padding, None for all.
        """
        inputs, rows = call
        if helper.unit is None:
            return inputs, rows, 1.0  # it cannot be split
        unit, total, size = _units(helper.unit, rows, by_sample, data)
        count = self._count(total, size)
        if count >= total and data is None:
            return inputs, rows, 1.0
        key = (number, total, count, rows.device, data is None)
        if key not in self._indices:
            self._indices[key] = self._index(number, total, count, rows.device, data)
        index = self._indices[key]
        if inputs:
            inputs = self._inputs(helper, inputs, index, unit, key)
        return inputs, helper.take_rows(rows, index, unit), total / count

    def _index(
        self, number: int, total: int, count: int, device: torch.device, data: DataRows | None
    ) -> Tensor:
        if data is not None and count >= total:
            return data.indices
        index = chosen(self.step, self.sampler.rank, number, total, count)
        index = index.to(device, non_blocking=True)
        if data is not None:
            index = data.indices[index]
        return index

    def _count(self, total: int, size: int) -> int:
        rows = self.sampler.rows
        if isinstance(rows, int):
            return min(total, -(-rows // size))
        return max(1, round(rows * total))

    def _inputs(
        self,
        helper: LayerHelper,
        inputs: tuple[Tensor, ...],
        index: Tensor,
        unit: Unit,
        key: Hashable,
    ) -> tuple[Tensor, ...]:
        """Return the same tensor for the same input, so that layers can share its moment."""
        inputs_key, memory = content(inputs)
        now = (key, type(helper), inputs_key)
        if self._last is None or self._last.key != now:
            self._last = _Taken(now, memory, helper.take_inputs(inputs, index, unit))
        return self._last.inputs


def _units(
    unit: Unit, rows: Tensor, by_sample: bool, data: DataRows | None
) -> tuple[Unit, int, int]:
    """Return the unit that is drawn, given a helper's; the number of units; the rows of each."""
    _, batch, shared, _ = rows.shape
    if data is not None:
        if data.unit == "row":
            shared = 1
        return data.unit, len(data.indices), shared
    if unit == "row" and not by_sample:
        return "row", batch * shared, 1
    return "sample", batch, shared
