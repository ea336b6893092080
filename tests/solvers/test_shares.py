"""Shares of the damping at the ends of their ranges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.solvers import Eigen, Inverse, Solver
from soframe.solvers.inverse import frame, pi_of, share
from soframe.specs import FactorSpec

PRECISION = 2.0**-20


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("traces", "damping", "pi"),
    [
        ((8.0, 2.0), 4.0, 2.0),
        ((0.5, 2.0), 1e-3, 0.5),
        # Both are a sixteenth of the precision of the root of the damping, within rounding.
        ((4 * PRECISION / 15.5, PRECISION / 4 / 15.5), 1.0, 4.0),
        # Less: the pi closest to one for which neither is visible beside its share.
        ((4 * PRECISION / 16.5, PRECISION / 4 / 16.5), 1.0, 4 * 16 / 16.5),
        ((PRECISION / 4 / 16.5, 4 * PRECISION / 16.5), 1.0, 16.5 / 16 / 4),
        ((2 * 4 * PRECISION / 16.5, 2 * PRECISION / 4 / 16.5), 4.0, 4 * 16 / 16.5),
        ((PRECISION / 17, PRECISION / 17), 1.0, 1.0),
        ((0.0, 3.0), 1.0, PRECISION / 16 / 3.0),
        ((3.0, 0.0), 1.0, 3.0 * 16 / PRECISION),
        ((0.0, 0.0), 1.0, 1.0),
        ((-1.0, -1.0), 1.0, 1.0),  # of rounding
    ],
)
def test_pi_is_hidden_where_the_damping_hides_the_factors(
    traces: tuple[float, float], damping: float, pi: float
) -> None:
    first, second = traces
    found = pi_of(vector(first), vector(second), vector(damping), PRECISION)
    assert found.tolist() == pytest.approx([pi])


@pytest.mark.parametrize(
    ("root", "pi", "shares"),
    [
        (2.0, 3.0, (6.0, 2.0 / 3.0)),
        # Neither share, nor the inverse of one, leaves the range up to 1e10.
        (1.0, 1e30, (1e10, 1e-10)),
        (1.0, 1e-30, (1e-10, 1e10)),
        (1e-3, 1e9, (1e4, 1e-10)),
        (1e-3, 1e-9, (1e-10, 1e4)),
        (1e3, 1e9, (1e10, 1e-4)),
        (1e3, 1e-9, (1e-4, 1e10)),
        (1e15, 1.0, (1e10, 1e10)),
        (1e-15, 1.0, (1e-10, 1e-10)),
        (0.0, 3.0, (0.0, 0.0)),
    ],
)
def test_shares_stay_within_the_range_of_numbers(
    root: float, pi: float, shares: tuple[float, float]
) -> None:
    first, second = share(vector(root**2), vector(pi), largest=1e10)
    assert (first.item(), second.item()) == pytest.approx(shares)


def test_shares_of_groups_are_their_own() -> None:
    first, second = share(vector(4.0, 0.0, 1.0), vector(3.0, 3.0, 0.5), largest=1e10)
    assert first.tolist() == pytest.approx([6.0, 0.0, 0.5])
    assert second.tolist() == pytest.approx([2 / 3, 0.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_a_dtype_can_be_inverted_in_it(dtype: torch.dtype) -> None:
    """At the largest trace beside the smallest, they are its largest number to the power 0.94."""
    limits = torch.finfo(dtype)
    traces = [torch.tensor([value], dtype=dtype) for value in (limits.max, limits.tiny)]
    first, second = Inverse().shares(traces, 1.0)
    expected = limits.max**0.94
    assert (first.item(), 1 / second.item()) == pytest.approx((expected, expected), rel=1e-3)
    assert {first.dtype, second.dtype} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_eigenvalues_up_to_a_limit(dtype: torch.dtype) -> None:
    """The largest product may be 2^20 times that of the mean traces."""
    limit = torch.finfo(dtype).max / 2**20
    for factor, is_beyond in ((0.9, False), (1.1, True)):
        traces = [torch.tensor([1.0, math.sqrt(limit) * factor], dtype=dtype) for _ in range(2)]
        traces[1][1] /= factor
        for found in Eigen().shares(traces, 0.5):
            assert found.isnan().tolist() == [False, is_beyond]
            assert found[0] == 0.5
    # Of different numbers of groups the largest of each counts.
    uneven = [torch.tensor([1.0, math.sqrt(limit) * 1.1], dtype=dtype), traces[1][1:]]
    assert all(found.isnan().all() for found in Eigen().shares(uneven, 0.5))
    small = [torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([3.0], dtype=dtype)]
    assert [found.tolist() for found in Eigen().shares(small, 0.5)] == [[0.5, 0.5], [0.5]]


@pytest.mark.parametrize("solver", [Inverse(split="full"), Inverse(), Inverse(split="sqrt")])
def test_the_only_factor_has_the_whole_damping(solver: Solver) -> None:
    (found,) = solver.shares([vector(5.0, 7.0)], 0.25)
    assert found.tolist() == [0.25, 0.25]
    if solver == Inverse(split="full"):
        three = solver.shares([vector(5.0)] * 3, 0.25)
        assert [one.tolist() for one in three] == [[0.25]] * 3
    else:
        with pytest.raises(ValueError, match="between two factors, not 3"):
            solver.shares([vector(5.0)] * 3, 0.25)


@pytest.mark.parametrize("split", ["pi", "sqrt", "full"])
def test_the_damping_is_shared_between_two_factors_of_as_many_groups(split: Any) -> None:
    solver = Inverse(split=split)
    one, two = (FactorSpec("A", "right", groups, 3) for groups in (1, 2))
    for factors, is_supported in (
        ([one], True),
        ([one, one], True),
        ([two, two], True),
        ([one, two], split == "full"),
        ([one, one, one], split == "full"),
    ):
        why = solver.unsupported(factors)
        assert why is None if is_supported else "pass split='full'" in str(why)


@pytest.mark.parametrize(
    ("size", "extra"),
    [(511, 0), (512, 16), (513, 15), (520, 8), (528, 0), (752, 0), (753, 31), (767, 17), (768, 16)],
)
def test_rows_are_a_multiple_of_16_and_not_of_256(size: int, extra: int) -> None:
    assert frame(size) == extra
