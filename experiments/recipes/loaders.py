"""Readers of training data in the formats in which they are published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """Training data that are read in order."""

    samples: int

    def place(
        self, rank: int, ranks: int, batch: int = 1, per_epoch: int = 0, begin: int = 0
    ) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError
