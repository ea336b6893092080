"""The samples of rows that are not in the order of the batch, such as rows of experts.

A router, or a reshape of tokens, leaves no trace in a call of the sample of a row. The
gradient of a row is linear in the gradients of the model's outputs, and depends on its own sample's
alone. So a backward pass in which the outputs of sample n are multiplied by a number c_n multiplies
the row by c_n. The numbers are powers of two, which no rounding changes, one for each digit of n::

    c_n = 2^(32 + digit of n)    base 32, in one backward pass for each digit

A row with another ratio is of several samples, or its loss leaves the outputs aside: the sums of
two exponents, and zero, are no digits.

A call with as many rows as samples may have another order too, such as ``[T, N, features]`` with
T = N, or sorted samples. So the last digit of all rows is looked at once, in the first batch of
several samples. Terms of the loss that leave the outputs aside, such as a penalty on hidden states,
are negligible beside numbers as large: there a pass with ``2^32`` for all samples is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from soframe.capture.outputs import changed
from soframe.kernels.devices import along_first

BASE = 32
NONE = -1  # the sample of rows without a gradient


def number_of_digits(samples: int) -> int:
    """Return the number of backward passes that separate so many samples."""
    number = 0
    while BASE**number < samples:
        number += 1
    return number


@contextmanager
def numbered(heads: Sequence[Tensor], digit: int | None) -> Iterator[None]:
    """Multiply gradients of outputs by the numbers of a digit; None is zero for all samples."""

    def multiply(gradient: Tensor) -> Tensor:
        samples = torch.arange(len(gradient), device=gradient.device)
        exponents = torch.full_like(samples, BASE)
        if digit is not None:
            exponents += samples // BASE**digit % BASE
        return gradient * along_first((2.0**exponents).to(gradient), gradient)

    with changed(heads, multiply):
        yield


def exponents_of(rows: Tensor, numbered_rows: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the exponents ``[groups, rows]`` of the powers of two that rows are multiplied by.

    They are nan for rows that are zero, and None if a row is no such multiple. ``numbered_rows``
    are of a pass with numbers, and ``dtype`` is the dtype of the passes.
    """
    # The largest entries, whose squares might overflow.
    sizes = rows.abs().amax(2)
    limits = torch.finfo(dtype)
    has_gradient = sizes > limits.tiny / limits.eps
    exponents = (numbered_rows.abs().amax(2) / sizes).log2().round()
    errors = (numbered_rows * (2.0**-exponents).unsqueeze(2) - rows).abs().amax(2)
    is_multiple = errors <= limits.eps**0.5 * sizes
    if not bool((is_multiple | ~has_gradient).all()):
        return None
    return exponents.where(has_gradient, math.nan)


def digits_of(rows: Tensor, numbered_rows: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the digits ``[groups, rows]`` of rows ``[groups, rows, out]``; see `exponents_of`.

    They are `NONE` for rows that are zero, and None if a row has no digit.
    """
    exponents = exponents_of(rows, numbered_rows, dtype)
    if exponents is None:
        return None
    digits = exponents - BASE
    is_digit = (digits >= 0) & (digits < BASE) | digits.isnan()
    if not bool(is_digit.all()):
        return None
    return digits.nan_to_num(NONE).long()


def by_sample(rows: Tensor, samples: Tensor, size: int) -> Tensor:
    """Return rows ``[groups, rows, n]`` as ``[groups, size, positions, n]``, padded by zeros.

    ``samples`` has the sample of each row, ``[groups, rows]``; rows of `NONE` are dropped.
    """
    groups, number, width = rows.shape
    keys = samples.where(samples != NONE, size)
    counts = torch.zeros(groups, size + 1, dtype=torch.long, device=rows.device)
    counts.scatter_add_(1, keys, torch.ones_like(keys))
    positions = max(1, int(counts[:, :size].max()))
    keys, order = keys.sort(dim=1, stable=True)
    firsts = counts.cumsum(1) - counts  # of each sample in this order
    places = torch.arange(number, device=rows.device) - firsts.gather(1, keys)
    slots = (keys * positions + places).clamp(max=size * positions)  # the last one is dropped
    arranged = rows.new_zeros(groups, size * positions + 1, width)
    ordered = rows.gather(1, order.unsqueeze(2).expand_as(rows))
    arranged.scatter_(1, slots.unsqueeze(2).expand_as(rows), ordered)
    return arranged[:, :-1].view(groups, size, positions, width)
