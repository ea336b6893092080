"""Every path of a convolution's factor against patches by hand, for every geometry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soframe.kernels import devices, rowwise, unfold
from soframe.kernels.dispatch import PATHS, choose
from soframe.kernels.geometry import Axis, Geometry, patch_sums, segments
from soframe.kernels.gram import mirror
from soframe.layers import conv
from soframe.testing import compare
from tests.curvature import randn
from tests.examples import examples

LAYOUTS = ["plain", "channels last", "transposed", "strided", "one of several"]


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
    if layout == "one of several":
        several = torch.cat([torch.full_like(x, torch.nan), x])
        return several.contiguous(memory_format=torch.channels_last)[len(x) :]
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
    pad, some = st.integers(0, 3), st.integers(1, 3)
    elements, dilation, before, after = (
        draw(st.integers(1, kernel)),
        draw(some),
        draw(pad),
        draw(pad),
    )
    least = max(1, dilation * (elements - 1) + 1 - before - after)  # for one output
    size = draw(st.integers(least, max(7, least)))
    return Axis(
        size=size,
        kernel=elements,
        stride=draw(some),
        dilation=dilation,
        before=before,
        after=after,
    )


@st.composite
def geometries(draw: st.DrawFn, most_groups: int = 3) -> Geometry:
    shapes = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]
    groups, channels = draw(st.sampled_from([one for one in shapes if one[0] <= most_groups]))
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


@given(
    geometry=geometries(),
    layout=st.sampled_from(LAYOUTS),
    gpu=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(80))
def test_every_path_is_the_sum_over_patches(
    geometry: Geometry, layout: str, gpu: bool, seed: int
) -> None:
    """As a processor takes it, and as an accelerator does."""
    x = image(geometry, seed)
    expected = by_hand(x, geometry)
    own = laid_out(x, layout)
    for path in PATHS:
        if path != "pointwise":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(devices, "on_gpu", lambda _: gpu)
                got = added(path, own, geometry, 0.25)
            compare(got, expected, path, rtol=1e-10, atol=1e-12)
    assert torch.equal(own, x), "the input was changed"
    patches = unfold.patches(x, geometry)
    compare(
        patch_sums(own, geometry), patches.sum((1, 2)), "sums of patches", rtol=1e-10, atol=1e-12
    )
    views = unfold.windows(own, geometry)
    assert torch.equal(views.flatten(4).flatten(2, 3), patches)


@given(geometry=geometries(most_groups=1), layout=st.sampled_from(LAYOUTS))
@settings(max_examples=examples(60))
def test_products_of_rows_are_those_of_one_matrix(geometry: Geometry, layout: str) -> None:
    x = image(geometry)
    own = laid_out(x, layout)
    for path in ("shifts", "rows"):
        for wanted in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rowwise, "serves", lambda _, wanted=wanted: wanted)
                got = added(path, own, geometry, 0.25)
            compare(got, by_hand(x, geometry), path, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("path", sorted(set(PATHS) - {"pointwise"}))
def test_an_image_that_is_one_of_several(path: str) -> None:
    """It is contiguous, channels last, and begins in the midst of their memory."""
    axis = Axis(size=4, kernel=3, stride=1, dilation=1, before=1, after=1)
    geometry = Geometry(1, 1, 2, axis, axis)
    assert rowwise.serves(geometry)
    x = image(geometry)
    own = laid_out(x, "one of several")
    assert own.storage_offset() > 0
    compare(added(path, own, geometry), by_hand(x, geometry), path, rtol=1e-12)


def test_where_rows_have_products_of_their_own() -> None:
    """Not where there are more channels than a row has positions, nor for groups."""
    assert rowwise.serves(square(8, 1, 128, 28, 3))
    assert not rowwise.serves(square(8, 1, 256, 14, 3))
    assert not rowwise.serves(square(64, 2, 16, 32, 3))


@given(
    geometry=st.builds(
        Geometry, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), axes(1), axes(1)
    ),
    layout=st.sampled_from(LAYOUTS),
)
@settings(max_examples=examples(30))
def test_kernels_of_one_position(geometry: Geometry, layout: str) -> None:
    x = image(geometry)
    own = added("pointwise", laid_out(x, layout), geometry)
    compare(own, by_hand(x, geometry), "pointwise", rtol=1e-10, atol=1e-12)
    assert choose(geometry) == "pointwise"


@given(axis=axes())
@settings(max_examples=examples(100))
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
@pytest.mark.covering(together=2)
def test_single_precision(options: dict[str, int], path: str, border: float) -> None:
    """A border 1e4 times the rest costs blocks without it no digits."""
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
@settings(max_examples=examples(30))
def test_a_geometry_has_a_path(geometry: Geometry) -> None:
    assert choose(geometry) in PATHS


def square(batch: int, groups: int, channels: int, size: int, kernel: int) -> Geometry:
    axis = Axis(size, kernel, before=kernel // 2, after=kernel // 2)
    return Geometry(batch, groups, channels, axis, axis)


CHOICES: list[tuple[str, str, tuple[int, ...]]] = [
    # batch, channels, size, kernel, stride, padding
    ("pointwise", "1 x 1", (8, 64, 56, 1, 1, 0)),
    ("rows", "the stem of ResNet-50", (8, 3, 224, 7, 2, 3)),
    ("rows", "the stem of ResNet-20", (64, 3, 32, 3, 1, 1)),
    ("shifts", "the first stride of ResNet-20", (64, 16, 32, 3, 2, 1)),
    ("rows", "8 channels", (64, 8, 32, 3, 1, 1)),
    ("rows", "one channel", (128, 1, 28, 3, 1, 1)),
    ("shifts", "ResNet-20, first stage", (64, 16, 32, 3, 1, 1)),
    ("shifts", "ResNet-50, last stage", (8, 512, 7, 3, 1, 1)),
    ("unfold", "LeNet-5, a few images", (8, 1, 28, 5, 1, 0)),
    ("unfold", "nothing to share", (8, 16, 2, 3, 1, 1)),
]


@pytest.mark.parametrize(("path", "case", "numbers"), CHOICES)
def test_choices(path: str, case: str, numbers: tuple[int, ...]) -> None:
    batch, channels, size, kernel, stride, padding = numbers
    axis = Axis(size, kernel, stride, 1, padding, padding)
    assert choose(Geometry(batch, 1, channels, axis, axis)) == path, case


@pytest.mark.parametrize(("threads", "path"), [(1, "shifts"), (8, "rows")])
def test_threads_share_wide_products(threads: int, path: str) -> None:
    """Kernel columns side by side are 112 wide; shifts multiply 16 channels."""
    assert choose(square(64, 1, 16, 14, 7), threads) == path


@pytest.mark.parametrize(("groups", "path"), [(1, "shifts"), (2, "rows")])
def test_groups_are_copied_for_each_product(groups: int, path: str) -> None:
    """The 8 channels of a shift are slower to copy than the 56 numbers of a row side by side."""
    assert choose(square(64, groups, 8, 28, 7)) == path


ON_A_GPU = [
    ("unfold", (64, 1, 64, 8, 3, 1)),
    ("unfold", (8, 1, 3, 224, 7, 2)),
    ("unfold", (8, 32, 4, 28, 3, 1)),
    ("unfold", (8, 96, 1, 28, 3, 1)),
    ("rows", (32, 1, 64, 56, 3, 1)),
    ("rows", (32, 1, 256, 14, 3, 1)),
    ("rows", (128, 1, 128, 16, 3, 1)),
    ("pointwise", (32, 1, 256, 14, 1, 1)),
]
"""The fastest, as measured but for the copy of patches: batch, groups, channels of a group, size of
the map, kernel, stride."""


@pytest.mark.parametrize(("path", "case"), ON_A_GPU)
def test_choices_on_a_gpu(path: str, case: tuple[int, ...]) -> None:
    batch, groups, channels, size, kernel, stride = case
    axis = Axis(size, kernel, stride, 1, kernel // 2, kernel // 2)
    geometry = Geometry(batch, groups, channels, axis, axis)
    assert choose(geometry, 2, gpu=True) == path


@pytest.mark.parametrize("gpu", [False, True])
def test_layers_choose_by_their_device(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(devices, "on_gpu", lambda _: gpu)
    monkeypatch.setattr(
        conv, "choose", lambda _, threads, gpu: asked.append((threads, gpu)) or "unfold"
    )
    helper = conv.Conv2dHelper(torch.nn.Conv2d(1, 1, 3))
    helper.input_moment((torch.ones(2, 1, 4, 4),), helper.output_rows(torch.ones(2, 1, 2, 2)))
    assert asked == [(torch.get_num_threads(), gpu)]
