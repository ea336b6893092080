"""Whether the average gets better: against means and standard errors as they are defined."""

import math
import statistics
from dataclasses import asdict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from soframe.trust_region.trend import (
    APART,
    ERRORS,
    LEAST,
    LONGER,
    MOST,
    SHORTER,
    STALLED,
    Trend,
)

EPS = 1e-7


def shares(changes: list[float]) -> list[float]:
    """After each difference, from all of them since the last verdict."""
    found, share = [], 1.0
    since: list[float] = []
    for change in changes:
        since.append(change)
        if len(since) >= LEAST:
            mean = statistics.fmean(since)
            shows = abs(mean) > ERRORS * statistics.stdev(since) / math.sqrt(len(since))
            if shows or len(since) == MOST:
                factor = (SHORTER if mean > 0 else LONGER) if shows else STALLED
                share, since = min(1.0, share * factor), []
        found.append(share)
    return found


@given(
    st.lists(st.tuples(st.integers(-8, 8), st.integers(1, 99)), min_size=1, max_size=60),
    st.sampled_from([0.1, 3.0]),
)
def test_shares_are_those_of_means_and_standard_errors(
    levels: list[tuple[int, int]], noise: float
) -> None:
    """The run is resumed at each."""
    changes = [0.1 * level + noise * math.sin(1.0 + 7.7 * n) for level, n in levels]
    own, found = Trend(), []
    for change in changes:
        before = own.share
        assert own.learn(5.0 + change, 5.0, EPS) == (own.share < before)
        found.append(own.share)
        own = Trend(**asdict(own))
    assert found == pytest.approx(shares(changes))


def after(*changes: float) -> float:
    own = Trend()
    for change in changes:
        own.learn(5.0 + change, 5.0, EPS)
    return own.share


def test_verdicts() -> None:
    assert after(*[0.1] * LEAST) == SHORTER
    assert after(*[0.1] * (LEAST - 1)) == 1.0
    assert after(*[0.1] * LEAST, *[-0.1] * LEAST) == SHORTER * LONGER
    assert after(*[-0.1] * 10 * LEAST) == 1.0  # never above one
    assert after(*[0.1, -0.1] * (MOST // 2)) == STALLED
    assert after(*[0.1, -0.1] * (MOST // 2 - 1)) == 1.0


def test_what_is_below_rounding_or_not_finite_says_nothing() -> None:
    assert after(*[0.0, 5.0 * EPS / 2] * 10 * MOST) == 1.0
    own = Trend()
    for now, earlier in ((1.0, math.inf), (math.nan, math.nan), (1.0, math.nan)):
        assert not own.learn(now, earlier, EPS)
    assert own == Trend()
    for now in (math.inf, math.nan):
        own = Trend()
        assert own.learn(now, 1.0, EPS)  # the average is ruined
        assert own.share == SHORTER


def test_averages_are_apart() -> None:
    own = Trend()
    assert own.due(5)
    assert not own.begin(5)  # there is no earlier one
    assert not own.due(4 + APART)
    assert own.due(5 + APART)
    assert own.begin(5 + APART)
    assert not own.due(6 + APART)
