"""Real data that needs no download: scikit-learn's handwritten digits.

1797 images of 8 x 8 pixels with intensities 0 to 16, scaled to [0, 1] here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soframe.experiments.requirements import require

#: The part of the images that is held out when digits are classified.
TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Examples:
    """Inputs and what the model should make of them.

    Attributes:
        inputs: `(examples, ...)`.
        targets: `(examples, ...)`: what the loss of the workload compares with.
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: Tensor | slice) -> Examples:
        return Examples(self.inputs[index], self.targets[index])


@dataclass(frozen=True)
class Data:
    """A training set and, where there is one, a test set."""

    train: Examples
    test: Examples | None = None


def digits_reconstruction(dtype: torch.dtype = torch.float32) -> Data:
    """All digits, each its own target.

    Args:
        dtype: The floating type.

    Returns:
        A training set of shape `(1797, 64)` in [0, 1], and no test set: the workload asks how fast
        a training loss falls.
    """
    pixels, _ = _digits(dtype)
    return Data(Examples(pixels, pixels))


def digits_classification(seed: int = 0, dtype: torch.dtype = torch.float32) -> Data:
    """The digits and their classes, split into a training set and a test set.

    Args:
        seed: Which images are held out.
        dtype: The floating type of the images.

    Returns:
        Inputs `(examples, 1, 8, 8)` in [0, 1] and classes `(examples,)` of type int64.
    """
    pixels, classes = _digits(dtype)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    examples = Examples(pixels.view(-1, 1, 8, 8), classes)
    held_out = round(TEST_FRACTION * len(pixels))
    return Data(train=examples[order[held_out:]], test=examples[order[:held_out]])


def _digits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pixels, classes = _load_digits()
    return torch.from_numpy(pixels / 16.0).to(dtype), torch.from_numpy(classes)


@lru_cache(maxsize=1)
def _load_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    (datasets,) = require("sklearn.datasets")
    digits = datasets.load_digits()
    return np.array(digits.data, dtype=np.float64), np.array(digits.target, dtype=np.int64)
