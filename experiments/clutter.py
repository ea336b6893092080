"""Cluttered digits: generated images that take a network epochs to classify.

Scikit-learn's digits (8 x 8 pixels) under random affine maps, in a random bright colour on a
background of two dark ones, among fragments of further digits, with noise: 32 x 32 pixels, RGB
(after the cluttered MNIST of Mnih et al., 2014). A fifth of the digits is held out: test images
show these alone, in their clutter too. The data do not depend on the seed of a run, and the first
images are the same for any number of images.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.data import Examples, classified_digits, single_precision

SIDE = 32
CLASSES = 10
TRAINING_IMAGES = 50_000
HELD_OUT_IMAGES = 2_000
FRAGMENTS = 2
"""Pieces of other digits in each image."""
NOISE = 0.08
"""Standard deviation of a pixel's noise, where black is 0 and white 1."""
DARK, BRIGHT = 0.5, 0.5
"""The greatest value of a channel of a background, and the least of ink."""
_CHUNK = 1000


Pool = tuple[Tensor, Tensor]
"""Digits to draw from: images `(digits, 1, 8, 8)` in [0, 1], and classes."""


def pools() -> tuple[Pool, Pool]:
    """Split the digits, always alike: 1438 for training images and 359 for the held-out ones."""
    trained, tested = classified_digits(0, torch.float32)
    return (trained[0], trained[1]), (tested[0], tested[1])


@lru_cache(maxsize=2)
@single_precision()
def cluttered_digits(
    count: int = TRAINING_IMAGES, held_out: int = HELD_OUT_IMAGES, seed: int = 0
) -> tuple[Examples, Examples]:
    """Generate a training set and a held-out set, with as many images of each class, to one.

    Images are `(images, 3, 32, 32)`, uint8, and classes `(images,)`, int64. The seed changes the
    images; the split of the digits is fixed.
    """
    trained, tested = pools()
    return _examples(trained, count, (seed, 0)), _examples(tested, held_out, (seed, 1))


def _examples(pool: Pool, count: int, entropy: tuple[int, int]) -> Examples:
    chunks = [
        _chunk(pool, _generator(*entropy, index)) for index in range(math.ceil(count / _CHUNK))
    ]
    inputs = torch.cat([images for images, _ in chunks])[:count]
    return inputs, torch.cat([classes for _, classes in chunks])[:count]


def _generator(*entropy: int) -> torch.Generator:
    """Make a generator of several numbers: torch's own seeds have 32 bits that count."""
    (seed,) = np.random.SeedSequence(entropy).generate_state(1)
    return torch.Generator().manual_seed(int(seed))


def _chunk(pool: Pool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make `_CHUNK` images and their classes, which take turns."""
    classes = torch.arange(_CHUNK) % CLASSES
    drawn_from, labels = pool
    members = [(labels == number).nonzero().squeeze(1) for number in range(CLASSES)]
    index = torch.empty(_CHUNK, dtype=torch.long)
    for number, digits in enumerate(members):
        drawn = torch.randint(len(digits), (_CHUNK // CLASSES,), generator=generator)
        index[number::CLASSES] = digits[drawn]
    images = _background(generator)
    for _ in range(FRAGMENTS):
        indices = torch.randint(len(drawn_from), (_CHUNK,), generator=generator)
        ink = _placed(_fragments(drawn_from[indices], generator), generator, low=0.4, high=0.7)
        images = _painted(images, ink, generator)
    digits = _placed(drawn_from[index], generator, low=0.6, high=0.9)
    images = _painted(images, digits, generator)
    images = images + NOISE * torch.randn(images.shape, generator=generator)
    return (images.clamp(0, 1) * 255).round().to(torch.uint8), classes


def _uniform(generator: torch.Generator, *shape: int, low: float, high: float) -> Tensor:
    return torch.rand(_CHUNK, *shape, generator=generator) * (high - low) + low


def _background(generator: torch.Generator) -> Tensor:
    """Return images that go from one colour to another, in any direction."""
    first, second = (_uniform(generator, 3, 1, 1, low=0.0, high=DARK) for _ in range(2))
    angle = _uniform(generator, 1, 1, low=0.0, high=2 * math.pi)
    axis = torch.linspace(-1, 1, SIDE)
    along = angle.cos() * axis.view(1, 1, -1) + angle.sin() * axis.view(1, -1, 1)
    part = (along / (2 * math.sqrt(2)) + 0.5).unsqueeze(1)
    return first * (1 - part) + second * part


def _fragments(digits: Tensor, generator: torch.Generator) -> Tensor:
    """Return a window of half the side of each digit, moved to the middle."""
    corner = torch.randint(5, (2, _CHUNK), generator=generator)
    places = torch.arange(4)
    rows = (corner[0].view(-1, 1) + places).view(-1, 1, 4, 1)
    columns = (corner[1].view(-1, 1) + places).view(-1, 1, 1, 4)
    window = digits[torch.arange(_CHUNK).view(-1, 1, 1, 1), 0, rows, columns]
    return F.pad(window, (2, 2, 2, 2))


def _placed(digits: Tensor, generator: torch.Generator, low: float, high: float) -> Tensor:
    """Map digits, `(images, 1, 8, 8)`, by random affine maps to ink, `(images, 1, 32, 32)`.

    Sides of a digit are between `low` and `high` of the image's.
    """
    size = _uniform(generator, low=low, high=high)
    aspect = _uniform(generator, low=0.8, high=1.25).sqrt()
    angle = _uniform(generator, low=-math.pi / 8, high=math.pi / 8)
    shear = _uniform(generator, low=-0.25, high=0.25)
    moved = (1 - size).unsqueeze(1) * _uniform(generator, 2, low=-1.0, high=1.0)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2)
    slanted = torch.eye(2).repeat(_CHUNK, 1, 1)
    slanted[:, 0, 1] = shear
    forth = turned @ slanted * torch.stack([size * aspect, size / aspect], dim=1).unsqueeze(1)
    back = torch.linalg.inv(forth)  # a grid maps each pixel of the image to its source
    maps = torch.cat([back, -(back @ moved.unsqueeze(2))], dim=2)
    grid = F.affine_grid(maps, [_CHUNK, 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(digits, grid, align_corners=False)


def _painted(images: Tensor, ink: Tensor, generator: torch.Generator) -> Tensor:
    """Paint with ink of a random bright colour."""
    colour = _uniform(generator, 3, 1, 1, low=BRIGHT, high=1.0)
    return images * (1 - ink) + colour * ink
