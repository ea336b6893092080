"""Data that need no download: digits, curves, and the sources of the standard library."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.libraries import require

Examples = tuple[Tensor, ...]
"""Tensors of one length: inputs, and mostly targets; the arguments of a loss after the model."""
Source = Examples | Dataset[Any]
"""All examples of a set: tensors, or a map-style dataset whose items are tuples of tensors."""

TEST_FRACTION = 0.2
CONTEXT = 128  # bytes of a window
HELD_OUT_EVERY = 20  # modules, in alphabetical order
HELD_OUT_WINDOWS = 128
SIDE, POINTS, MARGIN = 16, 40, 2.0  # of CURVES


def size(examples: Source) -> int:
    """Return the number of examples."""
    return len(examples[0] if isinstance(examples, tuple) else examples)  # type: ignore[arg-type]


def take(examples: Examples, index: Tensor | slice) -> Examples:
    """Return some of the examples."""
    return tuple(tensor[index] for tensor in examples)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and Python's `random`, and put their states back at the end."""
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002


@contextmanager
def single_precision() -> Iterator[None]:
    """Make tensors in float32: with another default dtype a generator draws other numbers."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: pixels `(1797, 64)` in [0, 1], float64, and classes, int64."""
    loaded = require("sklearn.datasets").load_digits()
    return torch.tensor(loaded.data / 16.0), torch.tensor(loaded.target)


def classified_digits(seed: int, dtype: torch.dtype) -> tuple[Examples, Examples]:
    """Return images `(examples, 1, 8, 8)` and classes: a training set and a test set."""
    pixels, classes = digits()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    held_out = round(TEST_FRACTION * len(pixels))
    examples = (pixels.to(dtype).view(-1, 1, 8, 8), classes)
    return take(examples, order[held_out:]), take(examples, order[:held_out])


@lru_cache(maxsize=2)
@single_precision()
def curves(count: int = 2000, seed: int = 0) -> Tensor:
    """Return CURVES: images of one quadratic Bezier curve each, `(count, 256)` in [0, 1].

    The problem on which second-order training of deep autoencoders was shown first (Hinton and
    Salakhutdinov, 2006; Martens, 2010), smaller. Control points are uniform in the image less a
    margin; the intensity is ``exp(-d^2 / 2)`` at d pixels from the nearest of 40 points.
    """
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


def standard_library(length: int = CONTEXT) -> tuple[Examples, Examples]:
    """Return windows of the standard library's modules, `(windows, length)`, and the next bytes.

    The text is the running interpreter's: losses compare within one version of Python. Every 20th
    module is held out, and 128 windows of those, spread evenly, are the test set.
    """
    return _next_bytes(*_windows(Path(sysconfig.get_path("stdlib")), "*.py", length))


def scipy_sources() -> tuple[Examples, Examples]:
    """Return windows of SciPy's modules, `(windows, 64)`, and the next bytes, as from the above."""
    folder = Path(require("scipy").__file__).parent
    return _next_bytes(*_windows(folder, "*/_*.py", CONTEXT // 2))


def _next_bytes(trained: Tensor, held_out: Tensor) -> tuple[Examples, Examples]:
    return (trained[:, :-1], trained[:, 1:]), (held_out[:, :-1], held_out[:, 1:])


@lru_cache(maxsize=2)
def _windows(folder: Path, pattern: str, length: int) -> tuple[Tensor, Tensor]:
    modules = sorted(folder.glob(pattern))
    held_out = modules[::HELD_OUT_EVERY]
    test = _cut(held_out, length)
    trained = _cut([module for module in modules if module not in held_out], length)
    return trained, test[:: max(1, len(test) // HELD_OUT_WINDOWS)][:HELD_OUT_WINDOWS]


def _cut(modules: list[Path], length: int) -> Tensor:
    """Join modules and cut them into windows and the byte after each, int64."""
    text = b"".join(module.read_bytes() for module in modules)
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return values.unfold(0, length + 1, length).long()
