"""Multipliers and divisors by hand: of calls, of ranks, and of what is empty."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from soframe.methods.scaling import Contribution, Counts, OfMeans, Scale
from soframe.specs import FactorSpec

LINEAR, CONVOLUTION = nn.Linear(2, 2), nn.Conv2d(2, 2, 2)
GRAD_SCALE = 8.0


def counts(*calls: tuple[int, int, float, list[float] | None, float]) -> Counts:
    made = Counts()
    for call in calls:
        made.add(*call)
    return made


def test_calls_of_a_pass_add_up_with_its_weight() -> None:
    made = counts(
        (0, 4, 12.0, [12.0, 6.0], 1.0),
        (0, 4, 4.0, [4.0, 0.0], 0.5),
        (1, 3, 3.0, None, 2.0),
    )
    assert made.samples == {0: 4, 1: 3}
    assert made.rows == {0: 12.0 + 2.0, 1: 6.0}
    assert made.group_rows == {0: [12.0 + 2.0, 6.0]}
    assert (made.calls, made.since) == (3, 0)
    assert (Counts().calls, Counts().rows) == (0, {})


@pytest.mark.parametrize(
    ("scale", "multipliers"),
    [
        # The loss is a mean over the samples of each pass: g is g0 over five.
        (Scale(), (1 / 5, 1 / 8, 5 / 64)),
        (Scale(own_gradients=True), (1 / 5, 1 / 5, 1 / 5)),
        (Scale(loss_average="sum"), (1.0, 1 / 8, 1 / 64)),
        (Scale(loss_average="global"), (1.0, 1 / 8, 1 / 64)),
        (Scale(loss_average="sum", own_gradients=True), (1.0, 1.0, 1.0)),
        # The loss of a batch of five is a fifth of its sum.
        (OfMeans(loss_average="sum"), (1.0, 5 / 8, 25 / 64)),
    ],
)
@pytest.mark.parametrize("users", [1, 3])
def test_the_multipliers_of_a_call(
    scale: Scale, multipliers: tuple[float, ...], users: int
) -> None:
    found = scale.call(LINEAR, 5, 2, 7, GRAD_SCALE, users)
    assert found == pytest.approx((multipliers[0] * users, *multipliers[1:]))
    if users == 1:
        assert scale.call(LINEAR, 5, 2, 7, GRAD_SCALE) == pytest.approx(multipliers)


def test_a_call_of_no_sample_has_numbers() -> None:
    assert Scale().call(LINEAR, 0, 0, 1, 1.0) == (1.0, 1.0, 0.0)
    assert OfMeans(loss_average="sum").call(LINEAR, 0, 0, 1, 2.0) == (1.0, 0.5, 0.25)
    assert Scale(own_gradients=True).call(LINEAR, 1, 1, 1, 1.0) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("module", "divisor"), [(LINEAR, 1), (CONVOLUTION, 7**2)])
def test_kaisas_multipliers_are_those_of_rows(module: nn.Module, divisor: int) -> None:
    """Of two samples at seven positions."""
    found = Scale("kaisa").call(module, 5, 2, 7, GRAD_SCALE)
    row = 1 / (2 * 7 * divisor)
    assert found == pytest.approx((row, math.nan, row / 64), nan_ok=True)


MADE: Any = (
    (0, 4, 12.0, [12.0, 6.0], 1.0),
    (1, 2, 4.0, [4.0, 0.0], 1.0),
)


def test_a_rank_without_passes_contributes_nothing() -> None:
    nothing = Contribution((0.0, 0.0, 0.0), 0.0, 0.0, ())
    assert Contribution() == nothing
    for scaling in ("fisher", "kaisa"):
        assert Scale(scaling).contribution(Counts(), {}) == nothing  # type: ignore[arg-type]
    assert Scale().contribution(Counts(), {0: 0, 1: 0}) == nothing


def test_the_contribution_of_a_rank_with_local_means() -> None:
    """Of three passes, of which one is empty."""
    passes = {0: 4, 1: 2, 2: 0}
    found = Scale().contribution(counts(*MADE), passes)
    assert found.multipliers == pytest.approx((1 / 3, 1.0, 3.0))
    assert found.input_weight == pytest.approx(2 / 3)
    # Positions of a sample, over the passes: three, two and none.
    assert found.output_weight == pytest.approx((12 / 4 + 4 / 2) / 3)
    assert found.group_weights == pytest.approx(((3 + 2) / 3, 1.5 / 3))
    own = Scale(own_gradients=True).contribution(counts(*MADE), passes)
    assert own == (pytest.approx((1 / 3, 1 / 3, 1 / 3)), *found[1:])
    # Other stages of a pipeline do not tell their samples: -1 is not empty.
    assert Scale().contribution(counts(*MADE), {0: 4, -1: 0}).input_weight == 1.0
    # A pass whose samples did not reach the block is not empty either.
    assert Scale().contribution(counts(*MADE[:1]), {0: 4, 1: 2}).input_weight == 1.0


def test_the_contribution_of_a_rank_with_one_mean_over_all() -> None:
    found = Scale(loss_average="global").contribution(counts(*MADE), {0: 4, 1: 2, 2: 7})
    assert found == ((1.0, 1.0, 1.0), 13, 16.0, (16.0, 6.0))
    alone = Scale(loss_average="sum").contribution(counts((0, 4, 12.0, None, 1.0)), {0: 5})
    assert alone == ((1.0, 1.0, 1.0), 4, 12.0, ())


def test_kaisas_contribution_counts_calls() -> None:
    found = Scale("kaisa").contribution(counts(*MADE), {0: 4, 1: 2})
    assert found.multipliers == pytest.approx((1.0, math.nan, 1.0), nan_ok=True)
    assert found[1:] == (2, 2, ())


def test_a_factor_is_divided_by_its_samples_or_rows() -> None:
    made = Contribution(input_weight=3.0, output_weight=5.0)
    samples, rows = (
        FactorSpec(name, "left", 1, 2, mean_over=over)
        for name, over in (("A", "samples"), ("G", "rows"))
    )
    assert (made.weight(samples), made.weight(rows)) == (3.0, 5.0)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (Scale(loss_average="global", world_size=4), (12 / 4) ** 2),
        (Scale(loss_average="global"), 12.0**2),
        (Scale(loss_average="global", world_size=4, own_gradients=True), 1.0),
        (Scale(loss_average="local", world_size=4), 1.0),
        (Scale("kaisa", "global", world_size=4), 1.0),
    ],
)
def test_gradients_of_a_global_mean_are_scaled_by_all_samples(
    scale: Scale, expected: float
) -> None:
    spec = FactorSpec("G", "left", 1, 2, degree=2)
    assert scale.gradient_scale(spec, 12.0) == expected
