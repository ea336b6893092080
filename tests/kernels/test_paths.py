"""Every path of a convolution's factor against patches by hand, for every geometry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from soframe.kernels import unfold
from soframe.kernels.dispatch import PATHS, choose
from soframe.kernels.geometry import Axis, Geometry, patch_sums, segments
from soframe.kernels.gram import mirror
from soframe.testing import compare
from tests.curvature import randn

LAYOUTS = ["plain", "channels last", "transposed", "strided"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers, elsewhere in memory."""
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "strided":
        wide = x.new_full((*x.shape[:3], 2 * x.shape[3]), torch.nan)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def by_hand(x: Tensor, geometry: Geometry) -> Tensor:
    """``[groups, features, features]``: patches cut out one after another."""
    rows, columns = geometry.rows, geometry.columns
    padded = x.new_zeros(
        *x.shape[:2],
        rows.before + rows.size + rows.after,
        columns.before + columns.size + columns.after,
    )
    padded[
        :,
        :,
        rows.before : rows.before + rows.size,
        columns.before : columns.before + columns.size,
    ] = x
    size = geometry.features
    total = x.new_zeros(geometry.groups, size, size)
    for image in padded:
        for i in range(rows.out):
            for j in range(columns.out):
                top, left = i * rows.stride, j * columns.stride
                patch = image[:, top:, left:][
                    :,
                    : rows.dilation * (rows.kernel - 1) + 1 : rows.dilation,
                    : columns.dilation * (columns.kernel - 1) + 1 : columns.dilation,
                ]
                patch = patch.unflatten(0, (geometry.groups, -1)).permute(0, 2, 3, 1).flatten(1)
                total += patch[:, :, None] * patch[:, None]
    return total


@st.composite
def axes(draw: st.DrawFn, kernel: int = 4) -> Axis:
    size = st.integers(1, 7)
    pad, some = st.integers(0, 3), st.integers(1, 3)
    axis = Axis(
        draw(size), draw(st.integers(1, kernel)), draw(some), draw(some), draw(pad), draw(pad)
    )
    assume(axis.out >= 1)
    return axis


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    groups, channels = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]))
    return Geometry(draw(st.integers(1, 3)), groups, channels, draw(axes()), draw(axes()))


def image(geometry: Geometry, seed: int = 0) -> Tensor:
    channels = geometry.groups * geometry.channels
    return randn(geometry.batch, channels, geometry.rows.size, geometry.columns.size, seed=seed)


def added(path: str, x: Tensor, geometry: Geometry, scale: float = 1.0) -> Tensor:
    """What a path adds to ones, which lie within a larger matrix as they do with a bias."""
    size = geometry.features
    whole = x.new_ones(geometry.groups, size + 1, size + 1)
    PATHS[path](whole[:, :-1, :-1], x, geometry, scale)
    assert (whole[:, -1] == 1).all()
    assert (whole[:, :, -1] == 1).all()
    return (mirror(whole[:, :-1, :-1]) - 1) / scale


@given(geometry=geometries(), layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_every_path_is_the_sum_over_patches(geometry: Geometry, layout: str, seed: int) -> None:
    x = image(geometry, seed)
    expected = by_hand(x, geometry)
    own = laid_out(x, layout)
    for path in PATHS:
        if path != "pointwise":
            got = added(path, own, geometry, 0.25)
            compare(got, expected, path, rtol=1e-10, atol=1e-12)
    assert torch.equal(own, x), "the input was changed"
    sums = unfold.patches(x, geometry).sum((1, 2))
    compare(patch_sums(own, geometry), sums, "sums of patches", rtol=1e-10, atol=1e-12)


@given(
    geometry=st.builds(
        Geometry, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), axes(1), axes(1)
    ),
    layout=st.sampled_from(LAYOUTS),
)
@settings(max_examples=30)
def test_kernels_of_one_position(geometry: Geometry, layout: str) -> None:
    x = image(geometry)
    own = added("pointwise", laid_out(x, layout), geometry)
    compare(own, by_hand(x, geometry), "pointwise", rtol=1e-10, atol=1e-12)
    assert choose(geometry) == "pointwise"


@given(axis=axes())
@settings(max_examples=100)
def test_segments_cover_each_block_once(axis: Axis) -> None:
    met: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s in segments(axis):
        assert s.count > 0
        for k in range(s.first, s.first + s.step * s.kernels, s.step):
            at = [s.start + axis.stride * i for i in range(s.count)]
            met.setdefault((k, k + s.other), []).extend((u, u + s.shift) for u in at)
    for k in range(axis.kernel):
        for other in range(axis.kernel):
            at = [
                (
                    axis.stride * t + axis.dilation * k - axis.before,
                    axis.stride * t + axis.dilation * other - axis.before,
                )
                for t in range(axis.out)
            ]
            inside = [(u, v) for u, v in at if 0 <= u < axis.size and 0 <= v < axis.size]
            assert sorted(met.get((k, other), [])) == inside


def test_products_are_shared() -> None:
    """A 3 x 3 kernel takes 13 products of whole maps, not 45."""
    axis = Axis(28, 3, before=1, after=1)
    pairs = [(r, c) for r in segments(axis) for c in segments(axis)]
    below = [(r, c) for r, c in pairs if (r.other, c.other) <= (0, 0)]
    large = [(r, c) for r, c in below if r.count * c.count > 26**2 - 1]
    assert len(large) == 13
    assert sum(r.count * c.count for r, c in below) < 14 * 28**2


ORDINARY: list[dict[str, Any]] = [
    {"channels": 16, "size": 12, "kernel": 3, "stride": 1, "padding": 1},
    {"channels": 40, "size": 9, "kernel": 3, "stride": 2, "padding": 1},
    {"channels": 3, "size": 17, "kernel": 7, "stride": 2, "padding": 3},
    {"channels": 24, "size": 9, "kernel": 3, "stride": 1, "padding": 0},
]


@pytest.mark.parametrize("options", ORDINARY, ids=str)
@pytest.mark.parametrize("path", [path for path in PATHS if path != "pointwise"])
@pytest.mark.parametrize("border", [1.0, 1e4])
def test_single_precision(options: dict[str, int], path: str, border: float) -> None:
    """No path subtracts: a border 1e4 times the rest costs blocks without it no digits."""
    axis = Axis(options["size"], options["kernel"], options["stride"], 1, *[options["padding"]] * 2)
    geometry = Geometry(4, 1, options["channels"], axis, axis)
    x = image(geometry)
    x[:, :, -1] *= border
    x[:, :, :, -1] *= border
    exact = added("unfold", x, geometry)
    single = x.new_zeros(exact.shape, dtype=torch.float32)
    PATHS[path](single, x.float(), geometry, 1.0)
    error = (mirror(single).double() - exact).abs()
    # Relative to what a sum of absolute values may come to, entry by entry.
    bound = added("unfold", x.abs(), geometry)
    assert float((error / bound).max()) < 1e-6, (path, options)


@given(geometry=geometries())
@settings(max_examples=30)
def test_a_geometry_has_a_path(geometry: Geometry) -> None:
    assert choose(geometry) in PATHS


CHOICES: list[tuple[str, str, tuple[int, ...]]] = [
    # batch, channels, size, kernel, stride, padding
    ("pointwise", "1 x 1", (8, 64, 56, 1, 1, 0)),
    ("rows", "the stem of ResNet-50", (8, 3, 224, 7, 2, 3)),
    ("rows", "the stem of ResNet-20", (64, 3, 32, 3, 1, 1)),
    ("shifts", "ResNet-20, first stage", (64, 16, 32, 3, 1, 1)),
    ("shifts", "ResNet-50, last stage", (8, 512, 7, 3, 1, 1)),
    ("unfold", "nothing to share", (8, 16, 2, 3, 1, 1)),
]


@pytest.mark.parametrize(("path", "case", "numbers"), CHOICES)
def test_choices(path: str, case: str, numbers: tuple[int, ...]) -> None:
    batch, channels, size, kernel, stride, padding = numbers
    axis = Axis(size, kernel, stride, 1, padding, padding)
    assert choose(Geometry(batch, 1, channels, axis, axis)) == path, case
