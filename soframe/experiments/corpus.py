"""A corpus of bytes that every Python brings: the sources of its own standard library.

The text is read where the running interpreter keeps it, so that it differs a little between
versions of Python: losses compare within one interpreter.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from soframe.experiments.data import Data, Examples

#: Bytes that a model sees at once.
CONTEXT = 128

#: One module of so many, in alphabetical order, is held out.
HELD_OUT_EVERY = 20

#: The loss on held-out modules is that of so many windows.
HELD_OUT_WINDOWS = 128


def standard_library() -> Data:
    """The top-level modules of the standard library, cut into windows of 128 bytes.

    Returns:
        Bytes `(windows, 128)` of type int64, and as targets the byte that follows each. Every 20th
        module is held out, and of those 128 windows, spread evenly, are the test set.
    """
    windows, held_out = _windows(sysconfig.get_path("stdlib"))
    return Data(_examples(windows), _examples(held_out))


def _examples(windows: Tensor) -> Examples:
    return Examples(windows[:, :-1], windows[:, 1:])


@lru_cache(maxsize=1)
def _windows(folder: str) -> tuple[Tensor, Tensor]:
    modules = sorted(Path(folder).glob("*.py"))
    held_out = modules[::HELD_OUT_EVERY]
    trained = [module for module in modules if module not in held_out]
    test = _cut(held_out)
    return _cut(trained), test[:: max(1, len(test) // HELD_OUT_WINDOWS)][:HELD_OUT_WINDOWS]


def _cut(modules: list[Path]) -> Tensor:
    """Joins modules and cuts them: each window and the byte after it, int64."""
    text = b"".join(module.read_bytes() for module in modules)
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return values.unfold(0, CONTEXT + 1, CONTEXT).long()
