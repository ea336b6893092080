"""Tokens from binary files that the user names; nothing is ever downloaded.

A file holds 16-bit unsigned integers, little-endian, perhaps behind the header of 256 32-bit
integers that the public speed runs of GPT-2 write: a magic number, a version, the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAGIC, VERSION = 20240520, 1
HEADER = 256
"""32-bit integers before the tokens."""


def open_tokens(path: Path) -> NDArray[np.uint16]:
    """Map a file into memory.

    Args:
        path: The file.

    Returns:
        Its tokens, `(tokens,)`, read where they are used.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is shorter than its header says, or of another version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file of tokens at {path}: name one of your own")
    if path.stat().st_size % 2:
        raise ValueError(f"{path} is no file of 16-bit tokens: its size is odd")
    header = np.fromfile(path, dtype="<i4", count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC:
        return np.memmap(path, dtype="<u2", mode="r")
    if header[1] != VERSION:
        raise ValueError(f"{path} is of version {header[1]}, and not {VERSION}")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER)
    if len(tokens) != header[2]:
        raise ValueError(f"{path} has {len(tokens)} tokens, and {header[2]} by its header")
    return tokens


@dataclass(frozen=True)
class Stream:
    """Tokens of several files, cut into windows: in the order in which they stand.

    Args:
        files: What `open_tokens` returned.
        context: Tokens of a window.
        vocabulary: The number of different tokens.

    Raises:
        ValueError: If there is not one window.
    """

    files: tuple[NDArray[np.uint16], ...]
    context: int
    vocabulary: int

    def __post_init__(self) -> None:
        if not len(self):
            raise ValueError(f"the files have no window of {self.context} tokens, and one more")

    @classmethod
    def of(cls, paths: Sequence[Path], context: int, vocabulary: int) -> Stream:
        """Open files.

        Args:
            paths: Of the files.
            context: Tokens of a window.
            vocabulary: The number of different tokens.

        Returns:
            The stream.
        """
        return cls(tuple(open_tokens(path) for path in paths), context, vocabulary)

    def __len__(self) -> int:
        return sum(self._windows(tokens) for tokens in self.files)

    def _windows(self, tokens: NDArray[np.uint16]) -> int:
        return max(0, len(tokens) - 1) // self.context

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Read windows.

        Args:
            first: The number of the first one.
            count: How many; after the last one come the first ones again.

        Returns:
            Tokens `(count, context)`, int64, and those that follow each.

        Raises:
            ValueError: If one is not in the vocabulary.
        """
        rows = np.stack([self._window((first + i) % len(self)) for i in range(count)])
        if (largest := int(rows.max())) >= self.vocabulary:
            raise ValueError(f"token {largest} is not in a vocabulary of {self.vocabulary}")
        values = torch.from_numpy(rows.astype(np.int64))
        return values[:, :-1], values[:, 1:]

    def _window(self, index: int) -> NDArray[np.uint16]:
        for tokens in self.files:
            windows = self._windows(tokens)
            if index < windows:
                return tokens[index * self.context : (index + 1) * self.context + 1]
            index -= windows
        raise AssertionError("the window lies behind the last one")
