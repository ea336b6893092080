"""Sums of outer products in place: layouts, triangles, column blocks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from soframe.kernels import devices, gram
from soframe.kernels.gram import add_bias, add_moment, column_blocks, mirror
from soframe.testing import compare
from tests.curvature import randn

LAYOUTS = {
    "rows": randn,
    "channels first": lambda groups, batch, shared, size: randn(
        batch, groups, size, shared
    ).permute(1, 0, 3, 2),
    "channels last": lambda groups, batch, shared, size: randn(batch, shared, groups, size).permute(
        2, 0, 1, 3
    ),
    "every other": lambda groups, batch, shared, size: randn(groups, batch, shared, 2 * size)[
        ..., ::2
    ],
    "expanded": lambda groups, batch, shared, size: randn(1, 1, 1, size).expand(
        groups, batch, shared, size
    ),
}
SHAPES = [(1, 3, 5, 4), (1, 2, 40, 6), (1, 1, 1, 1), (3, 2, 4, 2), (2, 3, 2, 1), (1, 4, 1, 7)]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [*SHAPES, (1, 3, 7, 150), (1, 2, 200, 130), (2, 3, 2, 520), (1, 2, 3, 1540)]
)
@pytest.mark.covering(together=2)
def test_moment(
    layout: str, shape: tuple[int, ...], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ways of a processor, and by those of an accelerator."""
    monkeypatch.setattr(devices, "on_gpu", lambda _: gpu)
    rows = LAYOUTS[layout](*shape)
    before = rows.clone()
    start = mirror(randn(shape[0], shape[3], shape[3], seed=1))
    total = start.clone()
    add_moment(total, rows, 0.5)
    flat = rows.flatten(1, 2)
    expected = start + 0.5 * torch.einsum("gri,grj->gij", flat, flat)
    compare(mirror(total), expected, "moment", rtol=1e-12)
    written = torch.full_like(start, torch.nan)
    add_moment(written, rows, 0.5, beta=0)
    compare(mirror(written), expected - start, "written", rtol=1e-12, atol=1e-14)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 255, 256, 1537])
def test_column_blocks_cover_the_triangle(size: int) -> None:
    covered = torch.zeros(size, size)
    for start, stop in column_blocks(size):
        covered[start:stop, :stop] += 1
    assert (covered.tril() == torch.ones(size, size).tril()).all()
    bound = {1: 1.0, 2: 1.0, 127: 1.0, 128: 0.75, 255: 0.76, 256: 0.63, 1537: 0.57}[size]
    assert covered.sum() <= bound * size**2


@pytest.mark.parametrize(("size", "most"), [(1279, 1), (1280, 2), (3072, 4), (4608, 4)])
def test_an_accelerator_has_few_column_blocks(size: int, most: int) -> None:
    blocks = column_blocks(size, gpu=True)
    assert len(blocks) == most
    assert (blocks[0][0], blocks[-1][1]) == (0, size)
    assert all(one[1] == other[0] for one, other in pairwise(blocks))


def test_images_are_multiplied_at_once_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch adds a batch of products into one matrix one by one there."""
    monkeypatch.setattr(devices, "on_gpu", lambda _: True)
    calls = Counting()
    for size, positions in ((40, 49), (150, 200), (150, 9)):
        rows = randn(64, size, positions).permute(0, 2, 1).unsqueeze(0)
        with calls:
            add_moment(torch.zeros(1, size, size, dtype=torch.float64), rows)
    assert calls.counts["addbmm_"] == 0
    assert calls.counts["bmm"] == 2
    assert calls.counts["addmm_"] == 1


class Counting(TorchFunctionMode):
    """Counts calls by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [1, 5, 256, 600])
def test_mirror(size: int) -> None:
    whole = randn(2, size, size)
    whole = whole + whole.mT
    spoilt = torch.where(torch.ones(size, size).tril() > 0, whole, torch.nan)
    got = mirror(spoilt)
    assert got is spoilt
    assert torch.equal(got, whole)


def test_views_of_images_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels first and last both meet the product as they lie."""
    met: list[tuple[str, int]] = []

    def spy(name: str) -> None:
        plain = getattr(gram, name)

        def seen(total: Tensor, x: Tensor, *numbers: float) -> None:
            met.append((name, x.untyped_storage().data_ptr()))
            plain(total, x, *numbers)

        monkeypatch.setattr(gram, name, seen)

    spy("add_rows")
    spy("add_maps")
    first = randn(2, 3, 4, 5)
    last = first.contiguous(memory_format=torch.channels_last)
    for x in (first, last):
        total = torch.zeros(1, 3, 3, dtype=torch.float64)
        add_moment(total, x.reshape(2, 1, 3, 20).permute(1, 0, 3, 2))
    expected = [("add_maps", first), ("add_rows", last)]
    assert met == [(name, x.untyped_storage().data_ptr()) for name, x in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("huge", [1, gram.HUGE])
def test_sums_begin_where_vectors_do(
    dtype: torch.dtype, huge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "HUGE", huge)
    kept = []  # so that each begins somewhere else
    for size in range(1, 40):
        for zero in (True, False):
            total = gram.new_sum(3, size, torch.ones(1, dtype=dtype), zero=zero)
            assert total.shape == (3, size, size)
            assert total.is_contiguous()
            assert not zero or (total == 0).all()
            assert total.dtype == dtype
            assert total.data_ptr() % 64 == 0
            kept.append(total)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("size", [1, 7, 8])
def test_ones_beside_rows(size: int, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator rows are multiples of 16 bytes apart, which its products need."""
    monkeypatch.setattr(devices, "on_gpu", lambda _: gpu)
    rows = randn(2, 3, 4, size)
    got = gram.with_ones(rows)
    assert torch.equal(got, torch.cat([rows, torch.ones(2, 3, 4, 1, dtype=rows.dtype)], 3))
    assert not gpu or got.stride(2) % 8 == 0
    assert torch.equal(gram.with_ones(rows[:, :, 1:]), got[:, :, 1:]), "again"


def test_bias_row() -> None:
    rows = randn(2, 3, 4, 5)
    total = torch.zeros(2, 6, 6, dtype=torch.float64)
    add_moment(total[:, :-1, :-1], rows, 0.5)
    add_bias(total, rows.sum((1, 2)), 12, 0.5)
    ones = torch.cat([rows, torch.ones(2, 3, 4, 1)], 3).flatten(1, 2)
    compare(mirror(total), 0.5 * ones.mT @ ones, "with a bias", rtol=1e-12)
    written = torch.full_like(total, torch.nan)
    add_moment(written[:, :-1, :-1], rows, 0.5, beta=0)
    add_bias(written, rows.sum((1, 2)), 12, 0.5, beta=0)
    compare(mirror(written), 0.5 * ones.mT @ ones, "written", rtol=1e-12)
