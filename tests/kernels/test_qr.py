"""Orthogonal factors by Cholesky, as on a GPU with fast float64, beside Householder's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.kernels import devices
from soframe.kernels.factorisations import orthonormal
from soframe.solvers import Basis, solve_stack
from soframe.solvers.base import retry
from tests import kit
from tests.curvature import randn
from tests.examples import examples

DTYPES = st.sampled_from([torch.float32, torch.float64])


def by_cholesky(matrix: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "fast_double", lambda _: True)
        return orthonormal(matrix)


def leading(found: Tensor, expected: Tensor) -> Tensor:
    """The absolute products of columns, of the leading half."""
    half = -(-found.shape[-1] // 2)
    return (found * expected).sum(-2)[:, :half].abs()


@settings(max_examples=examples(60))
@given(
    groups=st.integers(1, 3),
    size=st.integers(1, 40),
    digits=st.floats(0, 12),
    kind=st.sampled_from(["any", "columns", "iteration"]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_orthogonal_up_to_condition_numbers_of_1e12(
    groups: int, size: int, digits: float, kind: str, dtype: torch.dtype, seed: int
) -> None:
    """And with the span of each number of leading columns that Householder's have in float64."""
    left, right = (torch.linalg.qr(randn(groups, size, size, seed=seed + n))[0] for n in (0, 100))
    values = torch.logspace(0, -digits, size, dtype=torch.float64)
    if kind == "any":
        matrix = (left * values) @ right.mT
    elif kind == "columns":
        matrix = left * values
    else:  # a factor times a basis near its own
        near = torch.linalg.qr(left + 1e-2 * randn(groups, size, size, seed=seed + 200))[0]
        matrix = (left * values) @ (left.mT @ near)
    matrix = matrix.to(dtype)
    found = by_cholesky(matrix)
    assert found.dtype == dtype
    eye = torch.eye(size, dtype=torch.float64)
    tolerance = 5e-7 if dtype == torch.float32 else 1e-13
    assert (found.double().mT @ found.double() - eye).abs().amax() <= tolerance
    exact = torch.linalg.qr(matrix.double())[0]
    assert (leading(found.double(), exact) - 1).abs().amax() <= tolerance


def test_zeros_give_the_identity_and_nan_stays() -> None:
    matrix = torch.stack([torch.zeros(3, 3), torch.eye(3) * torch.nan, 2 * torch.eye(3)])
    found = by_cholesky(matrix)
    assert torch.equal(found[[0, 2]], torch.eye(3).repeat(2, 1, 1))
    assert found[1].isnan().all()


@pytest.mark.parametrize("failing", range(3))
def test_a_group_that_fails_in_any_pass_is_nan(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cholesky, passes = torch.linalg.cholesky_ex, itertools.count()

    def fails_once(gram: Tensor) -> tuple[Tensor, Tensor]:
        lower, info = cholesky(gram)
        if next(passes) == failing:
            info[1] = 1
        return lower, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails_once)
    found = by_cholesky(randn(3, 4, 4))
    assert next(passes) == 3
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_groups_that_fail_are_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A basis that is lost fails alone, and its factor is solved from scratch."""
    monkeypatch.setattr(devices, "fast_double", lambda _: True)
    factors = torch.diag_embed(torch.tensor([[4.0, 2.0, 1.0], [9.0, 3.0, 1.0]]))
    vectors = torch.stack([torch.eye(3), torch.full((3, 3), torch.nan)])
    last = {"vectors": vectors, "order": torch.ones(2, 3)}
    data, good = solve_stack(Basis(), factors, torch.zeros(2), last)
    assert good.tolist() == [True, False]
    data, reasons = retry(Basis(), factors, torch.zeros(2), data, [1])
    assert not reasons
    torch.testing.assert_close(data["vectors"].abs(), torch.eye(3).repeat(2, 1, 1))


def test_large_groups_are_decomposed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = randn(5, 4, 4)
    whole = by_cholesky(matrix)
    monkeypatch.setattr(devices, "MOST", 2 * 16)
    torch.testing.assert_close(by_cholesky(matrix), whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize("method", ["soap", "kl-soap"])
def test_training_as_with_householder(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signs of columns differ, and no update depends on them."""
    weights = []
    for fast in (False, True):
        monkeypatch.setattr(devices, "fast_double", lambda _, fast=fast: fast)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        own = kit.precondition(model, method)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = randn(12, 5), torch.arange(12) % 3
        weights.append(
            kit.train(
                model,
                lambda model, _, x=x, y=y: nn.functional.cross_entropy(model(x), y),
                range(12),
                own,
                sgd,
            )
        )
    torch.testing.assert_close(*weights, rtol=0, atol=1e-9)
