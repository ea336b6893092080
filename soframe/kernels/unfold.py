"""The plain twin of all other paths: patches written out, then one product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from soframe.kernels.geometry import Geometry
from soframe.kernels.gram import add_moment


def patches(x: Tensor, geometry: Geometry, *, ones: bool = False) -> Tensor:
    """Return ``[groups, batch, positions, features]``, of kernel row, kernel column, channel.

    With ``ones`` each has a last feature of one.
    """
    # One strided copy, several times as fast as torch's own, which unfolds image by image.
    rows, columns = geometry.rows, geometry.columns
    around = (0, 0, columns.before, columns.after, rows.before, rows.after)
    x = torch.constant_pad_nd(x.permute(0, 2, 3, 1), around)
    size, strides = _windows(geometry, x.stride())
    windows = x.as_strided(size, strides)
    if not ones:
        return windows.flatten(4).flatten(2, 3)
    written = x.new_empty(*size[:4], prod(size[4:]) + 1)
    written[..., :-1].view(size).copy_(windows)
    written[..., -1].fill_(1.0)
    return written.flatten(2, 3)


@lru_cache(maxsize=256)
def _windows(geometry: Geometry, stride: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return size and strides ``[groups, batch, output, output, kernel, kernel, channels]``."""
    groups, channels, rows, columns = geometry[1:]
    image, down, along, across = stride  # of ``[batch, height, width, all channels]``
    size = [groups, geometry.batch, rows.out, columns.out, rows.kernel, columns.kernel, channels]
    strides = [channels * across, image, rows.stride * down, columns.stride * along]
    strides += [rows.dilation * down, columns.dilation * along, across]
    return size, strides


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches to ``total``, ``[groups, features, features]``."""
    add_moment(total, patches(x, geometry), scale)
