"""Hardware and models for tests of the planner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import nn

from soframe.planning import measure
from soframe.planning.hardware import Curve, Hardware, Link

CUBIC = Curve(tuple((float(n), 1e-6 + 1e-9 * n**3) for n in (4, 64, 1024)))
CPU = Hardware(
    name="cpu",
    device="cpu",
    source="made up for tests",
    launch=1e-6,
    bandwidth=1e10,
    operators={
        "product:float32": Curve(alpha=1e-6, beta=1e-10),
        **dict.fromkeys(
            ("cholesky:float32", "inverse:float32", "eigh:float32", "qr:float32"), CUBIC
        ),
        "triangular:float32": CUBIC,
    },
    within=Link(1e-5, 1e9),
)
GPU = Hardware(
    name="gpu",
    device="cuda",
    source="made up for tests",
    launch=5e-6,
    bandwidth=1e12,
    operators={**CPU.operators, "product:tf32": Curve(beta=1e-14)},
    node=4,
    within=Link(1e-5, 1e11),
    across=Link(2e-5, 1e10),
)


@contextmanager
def little_traffic() -> Iterator[pytest.MonkeyPatch]:
    """Stream a mebibyte where a measurement streams what no cache holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "LARGE", {"cpu": 2**20, "cuda": 2**20})
        patch.setattr(measure, "CACHES", 2**20)
        yield patch


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 9, 10),
    )


def dense(*widths: int) -> nn.Sequential:
    pairs = zip(widths, widths[1:], strict=False)  # noqa: RUF007
    return nn.Sequential(*(nn.Linear(into, out, bias=bool(out % 2)) for into, out in pairs))
