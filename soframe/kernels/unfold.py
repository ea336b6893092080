"""The plain twin of all other paths: patches written out, then one product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from soframe.kernels.geometry import Geometry
from soframe.kernels.gram import add_moment


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Return ``[groups, batch, positions, features]``, of kernel row, kernel column, channel."""
    # One strided copy, several times as fast as torch's own, which unfolds image by image.
    rows, columns = geometry.rows, geometry.columns
    around = (0, 0, columns.before, columns.after, rows.before, rows.after)
    x = F.pad(x.permute(0, 2, 3, 1), around).permute(0, 3, 1, 2)
    for dim, axis in ((2, rows), (3, columns)):
        window = axis.dilation * (axis.kernel - 1) + 1
        x = x.unfold(dim, window, axis.stride)[..., :: axis.dilation]
    x = x.unflatten(1, (geometry.groups, geometry.channels))
    # [groups, batch, output rows, output columns, kernel rows, kernel columns, channels]
    return x.permute(1, 0, 3, 4, 5, 6, 2).flatten(4).flatten(2, 3)


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches to ``total``, ``[groups, features, features]``."""
    add_moment(total, patches(x, geometry), scale)
