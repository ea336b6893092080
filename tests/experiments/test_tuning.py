"""Tuning: what is tried, what is chosen, and what is stored."""

import math
from pathlib import Path

import pytest

from benchmarks import suite, time_to_target
from experiments import tuning
from experiments.problems import PROBLEMS
from experiments.tuning import Trial, TriedRates, Tuned, configure, load, tune
from tests.experiments.helpers import record

STORED = [
    *((tuning.DEMO, w, o) for w in ("digits-autoencoder", "digits-cnn") for o in ("sgd", "kfac")),
    *(
        (time_to_target.TUNED, w, o)
        for w in time_to_target.BENCHMARKS
        for o in time_to_target.PEERS
    ),
    *((suite.TUNED, w, o) for w in PROBLEMS for o in suite.PEERS),
]


def test_settings_become_a_configuration():
    settings = {"lr": 0.5, "betas": [0.9, 0.99], "preconditioner.damping": 0.1}
    config = configure("curves", "kfac", {**settings, "schedule_steps": 70}, seconds=3.0)
    assert (config.lr, config.betas, config.preconditioner) == (0.5, (0.9, 0.99), {"damping": 0.1})
    assert (config.schedule, config.schedule_steps, config.seconds) == ("cosine", 70, 3.0)
    assert configure("curves", "sgd", {"lr": 1.0, "schedule_steps": None}, steps=1).schedule == (
        "constant"
    )


def test_every_stored_outcome_can_be_run_and_has_the_best_first():
    for path, workload, optimizer in STORED:
        outcome = load(path, workload, optimizer)
        assert list(outcome.trials) == sorted(outcome.trials, key=lambda trial: trial.rank)
        for trial in outcome.trials:
            configure("curves", optimizer, trial.settings, steps=1)
    with pytest.raises(FileNotFoundError, match="muon was never tuned on digits-cnn"):
        load(tuning.DEMO, "digits-cnn", "muon")


def test_further_beats_sooner_and_sooner_beats_lower():
    def trial(reached, seconds, loss):
        return Trial({}, reached, seconds, None, loss)

    ordered = [trial(2, 9.0, 1.0), trial(1, 1.0, 2.0), trial(1, 3.0, 0.1)]
    ordered += [trial(0, None, 3.0), trial(0, None, math.inf)]
    shuffled = [ordered[index] for index in (3, 1, 4, 0, 2)]
    assert sorted(shuffled, key=lambda one: one.rank) == ordered
    outcome = Tuned((0.5, 0.3), 9.0, 1, "", tuple(ordered))
    assert outcome.soonest(0.5) == ordered[1]
    assert outcome.soonest(0.3) == outcome.best == ordered[0]
    found = Trial.of({"lr": 1}, record(losses=(3.0, 2.0, 0.9, 1.1, 0.4), targets=(1.0, 0.5, 0.1)))
    assert found == Trial({"lr": 1}, 2, 2.0, 40, 0.4)


@pytest.mark.parametrize(("best", "is_at_an_end"), [(0.03, True), (0.01, True), (0.02, False)])
def test_a_best_rate_at_an_end_of_those_tried_is_marked(best, is_at_an_end):
    rates = sorted((0.01, 0.02, 0.03), key=lambda rate: rate != best)
    trials = [Trial({"lr": rate}, 0, None, None, 1.0) for rate in rates]
    outcome = Tuned((), None, 1, "", tuple(trials), 50)
    assert outcome.mark == "3 trials of 50 steps" + is_at_an_end * " (rate at an end)"
    assert Tuned((), None, 1, "", tuple(trials[:2]), 50).mark == "2 trials of 50 steps"


@pytest.mark.slow
def test_the_search_gets_to_the_best_settings_the_same_way_again(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    tried = []

    def trained(worker, config):
        """The nearer the rate is to 0.1, the sooner it is at 1.0; far away it never is."""
        tried.append(config)
        far = abs(math.log(config.lr / 0.1))
        losses = (9.0, 2.0 + far) if far > 2 else (9.0, *(2.0,) * int(5 * far), 0.9)
        return record(losses=losses, targets=config.targets, seconds=0.5, config=config)

    monkeypatch.setattr(tuning, "train", trained)

    def search():
        return tune(
            "curves",
            "sgd",
            targets=(1.0,),
            seconds=8.0,
            trials=20,
            space={"lr": (1e-4, 10.0), "momentum": [0.8, 0.9]},
            on_trial=lambda trial: None,
        )

    first, again = search(), search()
    assert first == again
    assert abs(math.log(first.best.settings["lr"] / 0.1)) < 0.5
    assert {config.seed for config in tried} == {tuning.TUNING_SEED}
    assert {config.schedule_seconds for config in tried} == {None, 2.0, 4.0, 8.0}
    timed = [trial.settings for trial in first.trials if "schedule_steps" in trial.settings]
    assert timed[0]["schedule_steps"] in (40, 80, 160)  # twenty steps a second
    first.save(tmp_path / "kept.json", "curves", "sgd")
    assert load(tmp_path / "kept.json", "curves", "sgd") == first
    with pytest.raises(ValueError, match="nothing to tune"):
        tune("curves", "trust-region", targets=(), seconds=1.0, trials=1)


def test_the_best_rate_of_all_that_had_to_be_tried(tmp_path: Path) -> None:
    rates = TriedRates(tmp_path / "rates.json")
    rates.keep("a", [("x", 0.1, 2.0), ("x", 0.2, 1.0), ("x", 0.4, math.inf)])
    rates.keep("a", [("y", 0.1, 3.0)])
    assert rates.best({"x": (0.1, 0.2, 0.4), "y": (0.1,)}, "a") == {"x": 0.2, "y": 0.1}
    assert TriedRates(rates.path, highest=True).best({"x": (0.1,)}, "a") == {"x": 0.1}
    with pytest.raises(ValueError, match=r"'y' was not tuned for a at 0\.2: add --tune"):
        rates.best({"y": (0.1, 0.2)}, "a")
