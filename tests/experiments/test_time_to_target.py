"""Time to target: whose settings run, medians, ratios and bounds."""

import dataclasses
import math

import pytest

from benchmarks import time_to_target
from benchmarks.time_to_target import BENCHMARKS, Line, Spread, configuration, report, sentences
from experiments.config import RunConfig
from experiments.runs import race
from experiments.train import ALONE, train
from experiments.tuning import TUNING_SEED, Trial, Tuned
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
LINES = report([*OWN, *ADAM, *MUON])


def lines(target, found=LINES):
    return {line.optimizer: line for line in found if line.target == target}


def test_reported_runs_have_the_settings_that_were_chosen(tmp_path):
    path, targets = tmp_path / "tuned.json", BENCHMARKS["digits-autoencoder"].targets
    best = Trial({"lr": 0.02, "options.adamw_lr": 0.004, "schedule_steps": 70}, 2, 9.0, 10, 1.0)
    other = Trial({"lr": 0.1, "schedule_steps": None}, 1, 3.0, 10, 1.0)
    Tuned(targets, 8.0, 1, "", (best, other)).save(path, "digits-autoencoder", "muon")
    fields = {"seconds": 5.0, "seed": 3, "tuned": path}
    muon = configuration("digits-autoencoder", "muon", target=None, **fields)
    assert (muon.lr, muon.options, muon.schedule_steps) == (0.02, {"adamw_lr": 0.004}, 70)
    assert (muon.targets, muon.evaluate_every, muon.seed) == (targets, 25, 3)
    first = configuration("digits-autoencoder", "muon", target=targets[0], **fields)
    assert (first.lr, first.targets) == (0.1, targets[:1])
    own = configuration("digits-autoencoder", "trust-region", target=None, **fields)
    # Nothing but the run itself is set: the library's defaults decide.
    plain = RunConfig("digits-autoencoder", "trust-region", lr=1.0, seconds=5.0, seed=3)
    assert own == plain.but(targets=targets, evaluate_every=5)
    with pytest.raises(ValueError, match="tuned on"):
        configuration("curves", "muon", target=None, seed=TUNING_SEED, tuned=path)


def test_medians_and_spreads_are_over_the_seeds():
    own = lines(0.5)["trust-region"]
    assert (own.steps, own.seconds, own.reached) == (Spread(30, 20, 40), Spread(6.0, 4.0, 8.0), 3)
    # 2 s for every 10 steps; the mean, whatever single steps took.
    assert (own.milliseconds_per_step, own.best_loss) == (200.0, 0.4)
    muon, adam = lines(0.5)["muon"], lines(0.5)["adamw"]
    assert (muon.reached, muon.seconds) == (2, Spread(4.0, 3.0, math.inf))
    assert (adam.reached, adam.seconds.median, adam.trained) == (0, math.inf, 10.0)
    # Half of an even number of seeds is not enough for a median.
    assert Spread.of([1.0, math.inf]).median == math.inf


def ratios(line: Line):
    return line.against_baseline, line.against_peer, line.steps_against_peer


def test_ratios_are_those_of_medians():
    first, second = lines(1.0), lines(0.5)
    # Muon gets to 1.0 in 3, 2 and 4 s.
    assert ratios(first["trust-region"]) == ("5.00", "1.50", "3.00")
    assert ratios(first["adamw"]) == ("1.00", "0.30", "0.30")
    # Adam never got to 0.5 in 10 s: the ratio is a bound.
    assert second["trust-region"].against_baseline == ">1.67"
    assert (second["adamw"].against_peer, second["muon"].against_peer) == ("-", "1.00")
    without = lines(0.5, report([*OWN, *ADAM]))["trust-region"]
    assert ratios(without) == (">1.67", ">1.67", "-")
    alone = lines(1.0, report(OWN))["trust-region"]
    assert (alone.against_baseline, alone.against_peer) == ("-", "-")


def test_runs_that_cannot_be_compared_are_refused():
    longer = [dataclasses.replace(run, config=run.config.but(seconds=61.0)) for run in ADAM]
    for other in (ADAM[:2], longer):
        with pytest.raises(ValueError, match="runs to compare differ"):
            report([*OWN, *other])


@pytest.mark.slow
def test_the_table_says_when_or_how_far_and_files_are_written(tmp_path, capsys):
    time_to_target.show("digits-autoencoder", [*OWN, *ADAM, *MUON], tmp_path)
    text = " | ".join(part for part in capsys.readouterr().out.split("  ") if part.strip())
    assert "30 (20-40)" in text
    assert "6.0 (4.0-8.0)" in text
    assert "40 (30-never)" in text
    assert "0.9 after 10 s" in text
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png", ".svg"}


def test_sentences_compare_with_the_best_peer():
    first, second = sentences(LINES, 60.0)
    assert first == (
        "To 1: K-FAC, trust region 2.0 s and 10 steps; the fastest other, Muon, 3.0 s and 30 "
        "steps: 1.50 times as long."
    )
    assert second.endswith("0.67 times as long.")


@pytest.mark.slow
def test_runs_take_turns_and_are_what_they_would_be_alone():
    muon = RunConfig("digits-autoencoder", "muon", lr=0.02, steps=2, evaluate_every=1, seed=5)
    # Solving at every step, so that what the Fisher draws at each of them matters.
    own = muon.but(optimizer="trust-region", lr=1.0, options={"solve_every": 1})
    seen = []
    raced = race(
        [own, muon], turn=1e-9, on_turn=lambda runs: seen.append([len(run.rows) for run in runs])
    )
    assert seen == [[2, 2], [3, 3]]
    for config, run in zip([own, muon], raced, strict=True):
        alone = train(ALONE, config)
        assert [row.loss for row in run.rows] == [row.loss for row in alone.rows]
    with pytest.raises(ValueError, match="one number of threads"):
        race([own, muon.but(threads=2)])
