"""CURVES: images of one curve each, which six numbers describe.

The synthetic problem on which second-order training of deep autoencoders was shown first (Hinton
and Salakhutdinov, 2006; Martens, 2010), smaller: 2000 images of 16 x 16 pixels. The data do not
depend on the seed of a run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from soframe.experiments.data import Data, Examples
from soframe.experiments.precision import single_precision

SIDE = 16
POINTS = 40
MARGIN = 2.0


def curves(dtype: torch.dtype = torch.float32, count: int = 2000, seed: int = 0) -> Data:
    """Images of quadratic Bezier curves, each its own target.

    The three control points are uniform in the image less a margin of two pixels; the intensity is
    ``exp(-d^2 / 2)`` at a distance of d pixels from the nearest of 40 points on the curve.

    Args:
        dtype: The floating type.
        count: How many images.
        seed: Of the control points.

    Returns:
        A training set of shape `(count, 256)` in [0, 1], and no test set.
    """
    images = _images(count, seed).to(dtype)
    return Data(Examples(images, images))


@lru_cache(maxsize=2)
@single_precision()
def _images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    control = torch.rand(count, 3, 2, generator=generator) * (SIDE - 1 - 2 * MARGIN) + MARGIN
    t = torch.linspace(0, 1, POINTS)
    basis = torch.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2], dim=1)
    points = torch.einsum("tk,nkd->ntd", basis, control)
    axis = torch.arange(float(SIDE))
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    pixels = torch.stack([columns, rows], dim=-1).view(-1, 2)
    distances = torch.cdist(points, pixels.expand(count, -1, -1)).amin(dim=1)
    return torch.exp(-(distances**2) / 2)
