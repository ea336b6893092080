"""Arguments and batches of any kind: a class works, or says by name what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from tests.fuzz import (
    EXAMPLES,
    OPTIMIZERS,
    PRECONDITIONERS,
    STOCHASTIC_TRUST_REGIONS,
    Case,
    cases,
    check,
    fuzzed,
)

OUTCOMES: Counter[str] = Counter()


@pytest.mark.timeout(3600 if EXAMPLES else 120)
@fuzzed(few=1200)
@given(case=cases(PRECONDITIONERS.settings))
def test_the_preconditioner(case: Case) -> None:
    outcome = check(PRECONDITIONERS, case)
    OUTCOMES[outcome] += 1
    assert outcome != "refused without a word"


@pytest.mark.slow
def test_each_way_of_ending_is_met() -> None:
    """The fuzz is no use if all of its cases are refused, or none is: a few would not tell."""
    if not OUTCOMES:
        test_the_preconditioner()
    assert OUTCOMES["works"] > 20
    assert OUTCOMES["refused"] > 20
    assert OUTCOMES["an error that names something"] > 0


@pytest.mark.timeout(3600 if EXAMPLES else 120)
@fuzzed(few=50)
@given(case=cases(OPTIMIZERS.settings))
def test_the_optimizer(case: Case) -> None:
    assert check(OPTIMIZERS, case) != "refused without a word"


@pytest.mark.timeout(3600 if EXAMPLES else 120)
@fuzzed(few=50)
@given(case=cases(STOCHASTIC_TRUST_REGIONS.settings))
def test_the_stochastic_trust_region(case: Case) -> None:
    assert check(STOCHASTIC_TRUST_REGIONS, case) != "refused without a word"
