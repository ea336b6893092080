"""The plain twin: patches written out, then one product. What all other paths are held to."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from soframe.kernels.geometry import Geometry
from soframe.kernels.gram import add_moment


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Return all patches.

    Args:
        x: ``[batch, channels, height, width]``.
        geometry: Its geometry.

    Returns:
        ``[groups, batch, positions, features]``, features in the order kernel row, kernel column,
        channel of the group.
    """
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
    """Add the moment of the patches.

    Args:
        total: ``[groups, features, features]``; the lower triangle is added to.
        x: ``[batch, channels, height, width]``.
        geometry: Its geometry.
        scale: The multiplier.
    """
    add_moment(total, patches(x, geometry), scale)
