"""Products by oneDNN and by torch: equal, and taken where they should be."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soframe.kernels import gram, products
from soframe.solvers import eigen, inverse
from soframe.testing import compare
from tests.curvature import randn
from tests.examples import examples

SINGLE = 3e-6  # relative to the largest entry, of sums of some thousand products

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="torch was built without oneDNN",
)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Products of any size go by oneDNN, whatever the processor; sizes of those that did."""
    monkeypatch.setattr(products, "LEAST_ROWS", 1)
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    taken: list[int] = []
    plain = products.serves

    def seen(x: Tensor, work: int) -> bool:
        if plain(x, work):
            taken.append(work)
            return True
        return False

    monkeypatch.setattr(products, "serves", seen)
    return taken


def single(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed).float()


def close(got: Tensor, expected: Tensor, what: str) -> None:
    scale = float(expected.abs().max())
    compare(got.double() / scale, expected / scale, what, rtol=0, atol=SINGLE)


@needs_onednn
@settings(deadline=None, max_examples=examples(40))
@given(
    rows=st.integers(1, 70),
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    layout=st.sampled_from(["contiguous", "transposed", "columns of a larger one"]),
)
def test_products_equal_those_in_double_precision(rows: int, m: int, n: int, layout: str) -> None:
    def laid_out(matrix: Tensor) -> Tensor:
        if layout == "transposed":
            return matrix.T.contiguous().T
        if layout == "contiguous":
            return matrix
        return torch.cat([matrix + 1, matrix], 1)[:, matrix.shape[1] :]

    left, right = laid_out(single(rows, m)), laid_out(single(rows, n, seed=1))
    whole = left.double().T @ right.double()
    with (
        mock.patch.multiple(products, LEAST_ROWS=1, LEAST_WORK=1, prefers_onednn=lambda: True),
        mock.patch.object(torch.Tensor, "__matmul__", side_effect=AssertionError("torch's")),
    ):
        inner = products.inner(left, right)
        times = products.times(left.T, right)
        batch = products.times(left.T.unsqueeze(0), right.unsqueeze(0))
        added = products.linear(left.T, right.T, added=torch.ones(m, n))
        in_place = torch.ones(m, n)
        products.add_inner(in_place, left, right, 0.5)
        biased = products.linear(left.T, right.T, torch.arange(n).float())
    # Sums may cancel: their error is that of what is added up.
    addends = left.double().abs().T @ right.double().abs()
    for got, expected, bound in (
        (inner, whole, addends),
        (times, whole, addends),
        (batch[0], whole, addends),
        (added, whole + 1, addends + 1),
        (in_place, 0.5 * whole + 1, 0.5 * addends + 1),
        (biased, whole + torch.arange(n), addends + torch.arange(n)),
    ):
        assert ((got - expected).abs() <= 1e-6 * bound + 1e-30).all()


def test_what_onednn_does_not_serve_is_torchs(onednn: list[int]) -> None:
    a, b = randn(40, 6), randn(40, 7)
    assert torch.equal(products.inner(a, b), a.T @ b)
    assert torch.equal(products.times(a.T, b), a.T @ b)
    total = torch.ones(6, 7, dtype=torch.float64)
    products.add_inner(total, a, b, 0.5)
    compare(total, 1 + 0.5 * a.T @ b, "in place", rtol=1e-12)
    three = randn(3, 6, 40)
    assert torch.equal(products.times(three, b.expand(3, -1, -1)), three @ b)
    x, weight = randn(2, 5, 6), randn(4, 6)
    start = randn(2, 5, 4)
    added = start.clone()
    found = products.linear(x, weight, added=added)
    compare(found, x @ weight.T + start, "linear", rtol=1e-12)
    assert found.data_ptr() == added.data_ptr()
    with pytest.raises(RuntimeError, match="dtype"):
        products.times(a.T, b.float())
    assert onednn == []


@needs_onednn
def test_what_needs_a_gradient_is_torchs(onednn: list[int]) -> None:
    left, right = single(5, 4).requires_grad_(), single(5, 3)
    (products.times(left.T, right) + products.inner(left, right)).sum().backward()
    assert left.grad is not None
    close(left.grad, 2 * right.double().sum(1, keepdim=True).expand(5, 4), "gradient")
    assert onednn == []
    with torch.no_grad():
        products.times(left.T, right)
    assert len(onednn) == 1


@needs_onednn
def test_inexact_settings_are_torchs_business(onednn: list[int]) -> None:
    a = single(40, 6)
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    for precision, taken in (("ieee", 1), ("bf16", 0), ("tf32", 0)):
        backend.fp32_precision = precision
        try:
            products.inner(a, a)
        finally:
            backend.fp32_precision = before
        assert len(onednn) == taken, precision
        onednn.clear()


def test_small_products_stay_where_calls_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    few, many = single(products.LEAST_ROWS - 1, 80), single(products.LEAST_ROWS, 80)
    exact = torch.backends.mkldnn.is_available()
    assert products.pays(many, many) == exact
    assert not products.pays(few, few)
    assert not products.serves(many, products.LEAST_WORK - 1)
    assert products.serves(many, products.LEAST_WORK) == exact
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    assert not products.pays(many, many)


ZEN_4 = {
    "avx512_f": True,
    "avx512_vnni": True,
    "avx_vnni": False,
    "avx512_vp2intersect": False,
    "cpu_name": "AMD EPYC",
    "l1d_cache_size": 32768,
}


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (ZEN_4 | {"avx_vnni": True}, True),
        (ZEN_4 | {"avx512_vp2intersect": True}, True),
        (ZEN_4 | {"l1d_cache_size": 49152}, True),
        (ZEN_4, False),
        ({"avx512_f": False, "avx_vnni": True, "cpu_name": "AMD EPYC"}, False),
        ({"avx512_f": True, "avx_vnni": True, "cpu_name": "Intel(R) Xeon(R)"}, False),
        ({}, False),
    ],
)
def test_which_processors(
    capabilities: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    products.prefers_onednn.cache_clear()
    try:
        there = hasattr(torch.ops.mkldnn, "_linear_pointwise")
        assert products.prefers_onednn() == (expected and there)
    finally:
        products.prefers_onednn.cache_clear()


@needs_onednn
@pytest.mark.parametrize("size", [1, 5, 100, 256, 257, 400, 700])
def test_moments_equal_those_by_columns(size: int, onednn: list[int]) -> None:
    """Of a sum within a larger matrix, as with a bias."""
    rows = single(30, size)
    start = single(size + 1, size + 1, seed=1)
    expected, got = start.double(), start.clone()
    gram.add_by_columns(expected[:-1, :-1], rows.double(), 0.5)
    gram.add_rows(got[:-1, :-1], rows, 0.5)
    close(got.tril(), expected.tril(), "rows")
    assert torch.equal(got[-1], start[-1])
    assert torch.equal(got[:, -1], start[:, -1])
    assert onednn
    if size > gram.SMALL:
        assert 0 < sum(onednn[1:]) <= 0.76 * 30 * size**2


@needs_onednn
@pytest.mark.parametrize("size", [3, 130, 300])
def test_moments_of_images_equal_those_by_columns(size: int, onednn: list[int]) -> None:
    maps = single(3, size, 10)
    expected = torch.zeros(size, size, dtype=torch.float64)
    gram.add_by_columns(expected, maps.double().mT.flatten(0, 1), 0.5)
    got = torch.zeros(size, size)
    gram.add_maps(got, maps, 0.5)
    close(got.tril(), expected.tril(), "maps")
    assert bool(onednn) == (size >= gram.SMALL)


@needs_onednn
def test_few_rows_are_transposed_at_once(
    onednn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "TRANSPOSED", 1)
    monkeypatch.setattr(gram, "LEAST_ROWS", 10)
    met: list[int] = []
    plain = gram.add_by_lines

    def seen(total: Tensor, lines: Tensor, scale: float) -> None:
        met.append(lines.shape[1])
        plain(total, lines, scale)

    monkeypatch.setattr(gram, "add_by_lines", seen)
    rows, maps = single(25, 140), single(5, 140, 4)
    got, expected = torch.zeros(140, 140), torch.zeros(140, 140, dtype=torch.float64)
    gram.add_rows(got, rows, 0.5)
    gram.add_maps(got, maps, 0.5)
    assert met == [10, 10, 5, 8, 8, 4]
    for every in (rows, maps.mT.flatten(0, 1)):
        gram.add_by_columns(expected, every.double(), 0.5)
    close(got.tril(), expected.tril(), "parts")


@needs_onednn
@pytest.mark.parametrize("solver", [inverse.Inverse(), eigen.Eigen()])
def test_solvers_apply_by_either(solver: inverse.Inverse | eigen.Eigen, onednn: list[int]) -> None:
    factors = [m @ m.T + torch.eye(len(m)) for m in (single(9, 9), single(14, 14, seed=1))]
    damping = torch.tensor([0.1])
    left, right = (solver.solve(m.unsqueeze(0), damping) for m in factors)
    gradient = single(1, 9, 14, seed=2)
    got = solver.apply(gradient, left=left, right=right, damping=0.1)
    got_right = solver.apply_right(gradient, right=right, damping=0.1)
    assert len(onednn) >= 3
    double = [{k: v.double() for k, v in data.items()} for data in (left, right)]
    wide = gradient.double()
    expected = solver.apply(wide, left=double[0], right=double[1], damping=0.1)
    close(got, expected, "both sides")
    expected = solver.apply_right(wide, right=double[1], damping=0.1)
    close(got_right, expected, "one side")


def test_a_layer_of_no_width_has_its_bias() -> None:
    x, weight, bias = torch.ones(2, 3, 0), torch.ones(4, 0), torch.arange(4.0)
    for added in (None, torch.zeros(2, 3, 4)):
        found = products.linear(x, weight, bias, added=added)
        assert torch.equal(found, bias.expand(2, 3, 4))
    none = products.linear(torch.ones(2, 3), torch.ones(0, 3), added=torch.ones(2, 0))
    assert none.shape == (2, 0)
