"""The plain twin of all other paths: patches written out, then one product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from soframe.kernels import devices
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


def copied(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the same by one strided copy: on a GPU torch unfolds image by image."""
    rows, columns = geometry.rows, geometry.columns
    around = (0, 0, columns.before, columns.after, rows.before, rows.after)
    x = F.pad(x.permute(0, 2, 3, 1), around).permute(0, 3, 1, 2)
    for dim, axis in ((2, rows), (3, columns)):
        x = x.unfold(dim, axis.reach + 1, axis.stride)[..., :: axis.dilation]
    x = x.unflatten(1, (geometry.groups, geometry.channels))
    size = (geometry.groups, geometry.batch, rows.out * columns.out, geometry.features)
    return x.permute(1, 0, 3, 4, 5, 6, 2).reshape(size)


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches to ``total``, ``[groups, features, features]``."""
    rows = copied(x, geometry) if devices.on_gpu(x) else patches(x, geometry)
    add_moment(total, rows, scale)
