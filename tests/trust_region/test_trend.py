"""Whether the loss falls: against means and standard errors as they are defined."""

import math
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from soframe.trust_region import trend
from soframe.trust_region.trend import ERRORS, LONGER, SHORTER, WINDOW, Trend


def shares(losses: list[float], penalties: list[float]) -> list[float]:
    """After each window, from all of its losses."""
    found, share = [], 1.0
    earlier: tuple[float, float] | None = None
    for number, penalty in enumerate(penalties):
        part = losses[number * WINDOW : (number + 1) * WINDOW]
        now = statistics.fmean(part) + penalty, statistics.variance(part) / WINDOW
        if earlier is None:
            earlier = now
        elif abs(now[0] - earlier[0]) > ERRORS * math.sqrt(now[1] + earlier[1]):
            share *= SHORTER if now[0] > earlier[0] else LONGER
            share, earlier = min(1.0, share), now
        found.append(share)
    return found


LEVELS = st.lists(st.integers(-8, 8), min_size=1, max_size=12)


@given(LEVELS, st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 3.0]), st.sampled_from([1, 1e6]))
def test_shares_are_those_of_means_and_standard_errors(
    levels: list[int], seed: int, decay: float, large: float
) -> None:
    """Also where losses are large beside their differences, and the run is resumed at each."""
    losses, penalties = [], []
    for number, level in enumerate(levels):
        noise = [math.sin(1.0 + 7.7 * (seed + i) + 1.3 * number) for i in range(WINDOW)]
        losses += [large + 0.3 * level + n for n in noise]
        penalties.append(decay * (number % 3))
    own, found = Trend(), []
    for at, loss in enumerate(losses):
        if own.learn(loss):
            before = own.share
            rose = own.judge(penalties[at // WINDOW])
            assert rose == (own.share < before)
            found.append(own.share)
        other = Trend()
        trend.check(own.state())
        other.load(own.state())
        own = other
    assert found == shares(losses, penalties)


def after(*levels: float, spread: float = 0.0) -> float:
    own = Trend()
    for level in levels:
        for i in range(WINDOW):
            if own.learn(level + spread * (-1) ** i):
                own.judge(0.0)
    return own.share


def test_a_plateau_changes_nothing_and_slow_progress_adds_up() -> None:
    # The standard error of a difference is 0.32, so that 0.65 shows, and 0.3 does not.
    assert after(0.0, 1.0, *[1.3] * 50, spread=1.0) == SHORTER
    assert after(0.0, 1.0, 0.7, 0.4, spread=1.0) == SHORTER
    assert after(0.0, 1.0, 0.7, 0.4, 0.1, spread=1.0) == SHORTER * LONGER
    assert after(0.0, 0.3, 0.6, 0.9, spread=1.0) == SHORTER
    assert after(*[1.0] * 5) == 1.0  # with no noise at all
    assert after(0.0, 1.0, *(1.0 - 0.1 * n for n in range(10))) == 1.0  # and never above one


@pytest.mark.parametrize(
    "change",
    [{"share": math.nan}, {"count": 1}, {"earlier": [1.0]}, {"earlier": [1.0, "2"]}, {"more": 1.0}],
)
def test_a_damaged_state_is_told(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the trend of the losses is"):
        trend.check({**Trend().state(), **change})
