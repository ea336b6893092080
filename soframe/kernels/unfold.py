"""The plain twin of all other paths: patches written out, then one product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from soframe.kernels.geometry import Geometry
from soframe.kernels.gram import add_moment


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Return ``[groups, batch, positions, features]``, of kernel row, kernel column, channel."""
    rows, columns = geometry.rows, geometry.columns
    padding = (rows.before, columns.before)
    if padding != (rows.after, columns.after):
        x = F.pad(x, (columns.before, columns.after, rows.before, rows.after))
        padding = (0, 0)
    flat: Tensor = F.unfold(
        x,
        kernel_size=(rows.kernel, columns.kernel),
        dilation=(rows.dilation, columns.dilation),
        padding=padding,
        stride=(rows.stride, columns.stride),
    )  # [batch, channels * kernel, positions]
    window = rows.kernel * columns.kernel
    flat = flat.unflatten(1, (geometry.groups, geometry.channels, window))
    return flat.permute(1, 0, 4, 3, 2).flatten(3)


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches to ``total``, ``[groups, features, features]``."""
    add_moment(total, patches(x, geometry), scale)
