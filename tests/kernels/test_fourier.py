"""Factors by the Fourier transform of the image."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from soframe.kernels import fourier, scratch
from soframe.kernels.geometry import Axis, Geometry
from soframe.testing import compare
from tests.curvature import randn
from tests.examples import examples
from tests.kernels.test_paths import added, by_hand, geometries, image, square


@given(
    geometry=geometries(),
    chunk=st.sampled_from([1, 100, 2**23]),
    cached=st.sampled_from([1, 200, 2**19]),
    few=st.sampled_from([0, 64]),
    kept=st.sampled_from([0, 2**23]),
)
@settings(max_examples=examples(80))
def test_however_much_is_done_at_once(
    geometry: Geometry, chunk: int, cached: int, few: int, kept: int
) -> None:
    x = image(geometry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fourier, "CHUNK", chunk)
        patch.setattr(fourier, "CACHED", cached)
        patch.setattr(fourier, "FEW", few)
        patch.setattr(scratch, "KEPT", kept)
        got = added("fourier", x, geometry, 0.25)
    compare(got, by_hand(x, geometry), "factor", rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("few", [0, 64])
def test_blocks_above_the_diagonal_stay(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourier, "FEW", few)
    axis = Axis(7, 3)  # without padding, where windows meet the image in several kernel positions
    geometry = Geometry(2, 1, 2, axis, axis)
    total = torch.zeros(1, 18, 18, dtype=torch.float64)
    fourier.add(total, image(geometry), geometry, 1.0)
    for row in range(9):
        assert not total[0, 2 * row : 2 * row + 2, 2 * row + 2 :].any()


def test_what_it_serves() -> None:
    assert fourier.serves(square(2, 1, 3, 5, 3))
    assert not fourier.serves(square(2, 2, 3, 5, 3))
    assert not fourier.serves(Geometry(2, 1, 3, Axis(5, 3, stride=2), Axis(5, 3)))
    assert not fourier.serves(Geometry(2, 1, 3, Axis(5, 3), Axis(5, 3, stride=2)))


def test_memory_is_kept_for_the_next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the largest needs, up to a bound; of every thread and dtype its own."""
    monkeypatch.setattr(scratch, "_kept", scratch._Kept())
    large, small = square(4, 1, 3, 6, 3), square(2, 1, 2, 5, 3)
    added("fourier", image(small), small)
    first = scratch._kept.flat[torch.float64]
    added("fourier", image(large), large)
    kept = scratch._kept.flat[torch.float64]
    assert len(kept) > len(first)
    added("fourier", image(small), small)
    assert scratch._kept.flat == {torch.float64: kept}
    monkeypatch.setattr(scratch, "_kept", scratch._Kept())
    monkeypatch.setattr(scratch, "KEPT", 10)
    added("fourier", image(large), large)
    assert scratch._kept.flat == {}


@pytest.mark.parametrize("columns", [1, 3])
def test_images_of_a_part_are_as_many_as_stay_in_caches(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or as the products have elements, which every part adds to."""
    taken = []

    def mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        taken.append(right.shape[1])
        return torch.matmul(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    geometry = Geometry(5, 1, 2, Axis(6, 3), Axis(6, columns))
    x = image(geometry)
    products = (6 + 2) * ((6 + columns - 1) // 2 + 1) * 2**2
    for cached in (1, 2 * products):
        monkeypatch.setattr(fourier, "CACHED", cached)
        compare(added("fourier", x, geometry), by_hand(x, geometry), "factor", rtol=1e-10)
        images = max(cached, products) // (2 * 6 * 6)
        assert taken == [2 * 6 * min(images, 5 - start) for start in range(0, 5, images)]
        taken.clear()


@given(geometries())
@example(square(64, 1, 2, 8, 3))
@settings(max_examples=examples(40))
def test_the_work_of_the_border_is_what_is_multiplied(geometry: Geometry) -> None:
    if not fourier.serves(geometry):
        return
    counted = 0
    for strips in fourier._strips(geometry):
        with FlopCounterMode(display=False) as counter:
            fourier._lines(image(geometry), strips)
        counted += counter.get_total_flops() // 2
    assert fourier.border_work(geometry) == counted
    if geometry == square(64, 1, 2, 8, 3):  # four lines, with zeros between, at three distances
        assert counted == 4 * 3 * 64 * (8 + 2) * 2**2


def test_threads_have_memory_of_their_own() -> None:
    geometry = square(3, 1, 4, 7, 3)
    images = [image(geometry, seed) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: added("fourier", x, geometry), images))
    for got, x in zip(found, images, strict=True):
        compare(got, by_hand(x, geometry), "factor", rtol=1e-10)
    like, everyone = torch.ones(1), threading.Barrier(2)

    def places() -> list[int]:
        found = [scratch.memory(like, (7,))[0].data_ptr()]
        everyone.wait()  # both threads have theirs
        return [*found, scratch.memory(like, (7,))[0].data_ptr()]

    with ThreadPoolExecutor(2) as pool:
        one, other = (future.result() for future in [pool.submit(places) for _ in range(2)])
    assert one[0] == one[1] != other[0] == other[1]


def test_what_needs_gradients_is_served() -> None:
    geometry = square(2, 1, 3, 5, 3)
    x = image(geometry).requires_grad_()
    got = added("fourier", x, geometry)
    assert not got.requires_grad
    compare(got, by_hand(x.detach(), geometry), "factor", rtol=1e-10)


def test_channels_of_other_scales_keep_their_digits() -> None:
    """Errors are relative to what the two channels of an entry come to."""
    geometry = square(8, 1, 6, 8, 3)
    x = image(geometry) * 10.0 ** (3 * torch.arange(-3.0, 3.0).double()).view(-1, 1, 1)
    exact = by_hand(x, geometry)[0]
    single = torch.zeros(1, *exact.shape)
    fourier.add(single, x.float(), geometry, 1.0)
    lengths = x.square().sum((0, 2, 3)).sqrt().repeat(9)
    error = (single[0].double() - exact).tril().abs() / torch.outer(lengths, lengths)
    assert float(error.max()) < 1e-6


def test_a_channel_of_zeros_has_a_factor_of_zeros() -> None:
    geometry = square(4, 1, 3, 8, 3)
    x = randn(4, 3, 8, 8).float()
    x[:, 1] = 0
    total = torch.zeros(1, 27, 27)
    fourier.add(total, x, geometry, 1.0)
    assert not total[0].view(9, 3, 27)[:, 1].any()
