"""Damping policies."""

import math
from typing import Any

import pytest

import soframe
from soframe.registry import KINDS
from soframe.trust_region import (
    ConstantDamping,
    DampingPolicy,
    LevenbergMarquardt,
    RelativeDamping,
)

FACTOR = 0.5**3


def policy(**settings: Any) -> LevenbergMarquardt:
    return LevenbergMarquardt(**({"initial": 2.0, "omega": 0.5, "interval": 3} | settings))


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.76, 2.0 * FACTOR),
        (1e9, 2.0 * FACTOR),
        (0.75, 2.0),
        (0.5, 2.0),
        (0.25, 2.0),
        (0.24, 2.0 / FACTOR),
        (-3.0, 2.0 / FACTOR),
        (math.nan, 2.0 / FACTOR),
        (-math.inf, 2.0 / FACTOR),
    ],
)
def test_levenberg_marquardt_follows_the_ratio(ratio: float, expected: float) -> None:
    own = policy()
    own.observe(ratio)
    assert own.at(0) == own.at(100) == expected


@pytest.mark.parametrize(("ratio", "bound"), [(1.0, 0.5), (0.0, 3.0)])
def test_levenberg_marquardt_stays_within_its_bounds(ratio: float, bound: float) -> None:
    own = policy(low=0.5, high=3.0)
    assert not own.at_cap()
    for _ in range(3):
        own.observe(ratio)
    assert own.at(0) == bound
    assert own.at_cap() == (bound == 3.0)


@pytest.mark.parametrize(
    ("bounds", "first", "begun"),
    [
        ({}, 3.0, {0.3: 0.3, 30.0: 30.0}),
        ({"low": 5.0, "high": 8.0}, 5.0, {0.3: 5.0, 6.0: 6.0, 30.0: 8.0}),
        ({"low": 0.5, "high": 2.0}, 2.0, {0.3: 0.5, 30.0: 2.0}),
        ({"low": 7.0, "high": 7.0}, 7.0, {0.3: 7.0, 30.0: 7.0}),
    ],
    ids=str,
)
def test_a_search_begins_and_ends_within_the_bounds(
    bounds: dict[str, float], first: float, begun: dict[float, float]
) -> None:
    own = LevenbergMarquardt(**bounds)
    assert own.to_be_measured()
    assert own.at(0) == first
    for found, expected in begun.items():
        own.begin(found)
        assert own.at(0) == expected
    own.restart()
    assert own.at(0) == first
    assert not policy().to_be_measured()


def test_a_policy_goes_on_from_its_state() -> None:
    own, other = policy(), policy(initial=1.0)
    own.observe(1.0)
    other.load(own.state())
    assert other.at(0) == own.at(0) == 2.0 * FACTOR


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial": 0.0}, "0 < low <= initial <= high"),
        ({"low": 0.0}, "0 < low <= initial <= high"),
        ({"low": 3.0}, "0 < low <= initial <= high"),
        ({"high": 1.0}, "0 < low <= initial <= high"),
        ({"high": math.inf}, "0 < low <= initial <= high"),
        ({"initial": math.nan}, "0 < low <= initial <= high"),
        ({"omega": 0.0}, r"omega must be in \(0, 1\), not 0.0"),
        ({"omega": 1.0}, r"omega must be in \(0, 1\), not 1.0"),
        ({"interval": 0}, "interval must be at least 1, not 0"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**settings)


def test_a_constant_may_be_a_schedule() -> None:
    own = ConstantDamping(lambda step: 1.0 / (1 + step))
    assert [own.at(step) for step in range(3)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert own.interval == 0
    own.observe(-math.inf)
    own.load(own.state())
    assert own.at(0) == 1.0
    assert not own.at_cap()


def test_policies_go_by_name() -> None:
    names = {
        "constant": ConstantDamping,
        "levenberg-marquardt": LevenbergMarquardt,
        "relative": RelativeDamping,
    }
    assert soframe.available("damping") == names
    assert KINDS["damping"].build("constant", DampingPolicy) == ConstantDamping()
