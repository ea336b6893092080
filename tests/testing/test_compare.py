"""Dense algebra against its definitions, and what a failed comparison says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soframe.testing import compare, dense_preconditioned
from tests.examples import examples
from tests.testing.test_dense import randn


@given(o=st.integers(1, 3), i=st.integers(1, 3), damping=st.floats(1e-3, 10))
@settings(max_examples=examples(16), deadline=None)
def test_preconditioned_solves_the_damped_system(o: int, i: int, damping: float) -> None:
    root, gradient = randn(o * i, o * i), randn(o, i, seed=1)
    fisher = root @ root.T
    solution = dense_preconditioned(fisher, gradient, damping)
    assert solution.shape == gradient.shape
    product = (fisher @ solution.flatten()).reshape(o, i) + damping * solution
    compare(product, gradient, "F x + damping x", rtol=1e-7)
    with pytest.raises(RuntimeError, match="singular"):
        dense_preconditioned(torch.zeros(o * i, o * i), gradient, 0.0)


def test_compare_names_a_wrong_scale() -> None:
    expected = torch.tensor([[0.0, 1.0], [2.0, -4.0]], dtype=torch.float64)
    with pytest.raises(AssertionError) as caught:
        compare(3 * expected, expected, "factor G")
    message = str(caught.value)
    for part in (
        "factor G: relative error 2.000e+00",
        "largest absolute error 8.0",
        "median 3, min 3, max 3 (3 of 4 entries",
        "a constant factor of 3",
    ):
        assert part in message, message
    with pytest.raises(AssertionError) as caught:
        compare(expected + torch.tensor([0.0, 0.0, 1.0, 0.0]).reshape(2, 2), expected, "one entry")
    assert "median 1, min 1, max 1.5" in str(caught.value)
    assert "constant factor" not in str(caught.value)


def test_compare_tolerances() -> None:
    expected = randn(5, 5)
    assert compare(expected, expected, "equal") == 0.0
    assert 0.0 < compare(expected * (1 + 1e-11), expected, "near") < 2e-11
    compare(expected.float(), expected, "float32")
    with pytest.raises(AssertionError):
        compare(expected.float().double(), expected, "float64 with float32's error")
    with pytest.raises(AssertionError):
        compare(expected * (1 + 1e-3), expected.float(), "float32")
    compare(torch.zeros(2), torch.zeros(2), "zeros")
    compare(torch.full((2,), 1e-13), torch.zeros(2), "below atol")
    with pytest.raises(AssertionError, match="zero everywhere"):
        compare(torch.ones(2), torch.zeros(2), "not zero")
    with pytest.raises(AssertionError, match="shape"):
        compare(torch.ones(2, 1), torch.ones(2), "broadcast")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_compare_never_accepts_what_is_not_finite(bad: float) -> None:
    broken = torch.tensor([1.0, bad], dtype=torch.float64)
    for actual, expected in ((broken, torch.ones(2)), (torch.ones(2), broken), (broken, broken)):
        with pytest.raises(AssertionError, match="not finite"):
            compare(actual, expected, "broken")
