"""Damping policies, and the mode of the processor for denormal numbers."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import soframe
from soframe.derivatives.denormals import are_flushed, flushed_denormals
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
    for _ in range(3):
        own.observe(ratio)
    assert own.at(0) == bound


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


def test_policies_go_by_name() -> None:
    names = {
        "constant": ConstantDamping,
        "levenberg-marquardt": LevenbergMarquardt,
        "relative": RelativeDamping,
    }
    assert soframe.available("damping") == names
    assert KINDS["damping"].build("constant", DampingPolicy) == ConstantDamping()


# -- denormal numbers ------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["kept", "flushed"])
def mode(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The mode at the beginning."""
    assert torch.set_flush_denormal(request.param)
    yield request.param
    torch.set_flush_denormal(False)


def nothing() -> None:
    pass


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("then", [nothing, fail])
def test_the_mode_is_put_back(mode: bool, then: Callable[[], None]) -> None:
    assert are_flushed() == mode
    try:
        with flushed_denormals():
            assert are_flushed()
            assert float(torch.tensor(1e-40) * 1.0) == 0.0
            then()
    except ZeroDivisionError:
        pass
    assert are_flushed() == mode


def test_an_inactive_context_changes_nothing(mode: bool) -> None:
    with flushed_denormals(active=False):
        assert are_flushed() == mode
    assert are_flushed() == mode


THREADS = """
import torch
from soframe.derivatives.denormals import flushed_denormals

torch.set_num_threads(2)
with flushed_denormals():
    torch.ones(2**22).mul_(2)  # the first that threads share
denormal = torch.full((2**22,), 1e-40)
print(int((denormal * 0.5 == 0).sum()))
"""


@pytest.mark.slow
def test_threads_that_start_meanwhile_keep_the_user_s_mode() -> None:
    """A thread has the mode of its maker, and nobody could set it back."""
    run = subprocess.run(
        [sys.executable, "-c", THREADS], check=True, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.strip() == "0"
