import dataclasses
import math
import re

import pytest
from harness import target_report
from harness.target_report import Ratio, Report, Spread
from rich.console import Console

from soframe.experiments.config import RunConfig
from tests.experiments.helpers import record

TARGETS = (1.0, 0.5)


def runs(optimizer, *curves, seconds=1.0):
    """One run for each curve; evaluations are 10 steps and some seconds apart."""
    return [
        record(
            losses=(3.0, *curve),
            targets=TARGETS,
            seconds=seconds,
            config=RunConfig("digits-autoencoder", optimizer, lr=0.1, seconds=60.0, seed=seed),
        )
        for seed, curve in enumerate(curves)
    ]


OWN = runs("trust-region", (0.9, 0.4), (2.0, 0.9, 0.3), (0.8, 0.7, 0.6, 0.4), seconds=2.0)
ADAM = runs("adamw", (2.0,) * 9 + (0.9,), (2.0,) * 11 + (0.9,), (2.0,) * 7 + (0.9,))
MUON = runs("muon", (2.0, 2.0, 0.4), (2.0, 0.8, 2.0, 2.0), (2.0, 2.0, 2.0, 0.4))
REPORT = Report.of("digits-autoencoder", TARGETS, [*OWN, *ADAM, *MUON])


def lines(target, report=REPORT):
    return {line.optimizer: line for line in report.lines if line.target == target}


def test_medians_and_spreads_are_over_the_seeds():
    own = lines(0.5)["trust-region"]
    assert (own.steps, own.seconds) == (Spread(30, 20, 40), Spread(6.0, 4.0, 8.0))
    assert (own.seeds, own.reached) == (3, 3)
    # 2 s for every 10 steps; the mean, whatever single steps took.
    assert own.milliseconds_per_step == 200.0
    assert own.best_loss == 0.4


def test_a_missed_target_counts_as_infinite():
    muon, adam = lines(0.5)["muon"], lines(0.5)["adamw"]
    assert (muon.reached, muon.seconds) == (2, Spread(4.0, 3.0, math.inf))
    assert (adam.reached, adam.seconds.median, adam.trained) == (0, math.inf, 10.0)
    # Half of an even number of seeds is not enough for a median.
    assert Spread.of([1.0, math.inf]).median == math.inf


def test_ratios_are_those_of_medians():
    first, second = lines(1.0), lines(0.5)
    assert first["trust-region"].against_baseline == Ratio(10.0 / 2.0)
    assert first["adamw"].against_baseline == Ratio(1.0)
    # Muon gets to 1.0 in 3, 2 and 4 s.
    assert first["trust-region"].against_peer == Ratio(3.0 / 2.0)
    assert first["trust-region"].steps_against_peer == Ratio(30 / 10)
    assert first["adamw"].against_peer == Ratio(3.0 / 10.0)
    # Adam never got to 0.5 in 10 s: the ratio is a bound.
    assert second["trust-region"].against_baseline == Ratio(10.0 / 6.0, is_bound=True)
    assert str(second["trust-region"].against_baseline) == ">1.67"
    assert second["adamw"].against_peer is None
    assert second["muon"].against_peer == Ratio(1.0)


def test_without_a_peer_that_gets_there_the_ratio_is_a_bound():
    report = Report.of("digits-autoencoder", TARGETS, [*OWN, *ADAM])
    assert lines(0.5, report)["trust-region"].against_peer == Ratio(10.0 / 6.0, is_bound=True)
    assert lines(0.5, report)["trust-region"].steps_against_peer is None
    assert "no other optimizer got there in 60 s" in report.sentences()[1]


def test_the_trust_region_is_no_peer_of_its_own():
    report = Report.of("digits-autoencoder", TARGETS, OWN)
    line = lines(1.0, report)["trust-region"]
    assert (line.against_baseline, line.against_peer) == (None, None)


def test_runs_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="seeds"):
        Report.of("digits-autoencoder", TARGETS, [*OWN, *ADAM[:2]])
    longer = [dataclasses.replace(run, config=run.config.but(seconds=61.0)) for run in ADAM]
    with pytest.raises(ValueError, match="budgets"):
        Report.of("digits-autoencoder", TARGETS, [*OWN, *longer])


def test_the_table_says_when_or_how_far():
    screen = Console(width=140)
    with screen.capture() as capture:
        screen.print(target_report.table(REPORT))
    text = re.sub(r" {2,}", " | ", capture.get())
    assert "K-FAC, trust region | 30 (20-40) | 6.0 (4.0-8.0) | 200.0 | >1.67 | 0.67" in text
    assert "Muon | 40 (30-never) | 4.0 (3.0-never)" in text
    assert "AdamW | not reached | 0.9 after 10 s" in text
    assert "3 seed(s)" in capture.get()


@pytest.mark.parametrize("width", [80, 100])
def test_nothing_is_cut_where_there_is_little_room(width):
    screen = Console(width=width)
    with screen.capture() as capture:
        screen.print(target_report.table(REPORT))
    assert "…" not in capture.get()
    words = set(capture.get().split())
    assert {"AdamW", "Muon", "0.5", "10.0", "200.0", ">1.67", "0.67"} <= words


def test_sentences_compare_with_the_best_peer():
    first, second = REPORT.sentences()
    assert first == (
        "To 1: K-FAC, trust region 2.0 s and 10 steps; the fastest other, Muon, 3.0 s and 30 "
        "steps: 1.50 times as long."
    )
    assert second.endswith("0.67 times as long.")
    slow = Report.of("digits-autoencoder", (0.1,), [*OWN, *ADAM])
    assert slow.sentences() == ["To 0.1: K-FAC, trust region did not get there in 60 s."]


def test_the_report_names_what_it_was_measured_with():
    assert set(REPORT.where) >= {"processor", "cores", "threads", "clock", "torch"}
    assert REPORT.as_dict()["summary"] == REPORT.sentences()
    assert (REPORT.seeds, REPORT.budget) == ((0, 1, 2), 60.0)
