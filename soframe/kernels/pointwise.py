"""Kernels of one position: the factor is the Gram matrix of the strided input itself."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from soframe.kernels.geometry import Axis, Geometry
from soframe.kernels.gram import add_moment


def rows(x: Tensor, geometry: Geometry) -> Tensor:
    """Return ``[groups, batch, positions, channels]``, a view where the stride is one."""
    # Padding is zeros, which add nothing.
    seen = x[:, :, _slice(geometry.rows), _slice(geometry.columns)]
    batch, _, height, width = seen.shape
    maps = seen.reshape(batch, geometry.groups, geometry.channels, height * width)
    return maps.permute(1, 0, 3, 2)


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches to ``total``, without a copy where the stride is one."""
    add_moment(total, rows(x, geometry), scale)


@lru_cache(maxsize=1024)
def _slice(axis: Axis) -> slice:
    start, stop = axis.inside(0)
    first = axis.stride * start - axis.before
    return slice(first, first + axis.stride * max(stop - start, 0), axis.stride)
