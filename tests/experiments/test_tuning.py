import dataclasses
import json
import math

import pytest

from soframe.experiments import tuning
from soframe.experiments.demo import configurations
from soframe.experiments.tuning import OPTIMIZERS, WORKLOADS, Protocol, Trial, Tuned
from soframe.experiments.workloads import workload
from tests.experiments.helpers import record


def trial(seconds=None, loss=1.0, **settings):
    return Trial(settings or {"lr": 0.1}, seconds, None if seconds is None else 10, loss)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_draws_are_repeatable_and_differ(optimizer):
    settings = tuning.draw(optimizer, 12, seed=4)
    assert settings == tuning.draw(optimizer, 12, seed=4)
    assert settings != tuning.draw(optimizer, 12, seed=5)
    assert len({json.dumps(s) for s in settings}) > 6
    # More trials begin with the same ones.
    assert tuning.draw(optimizer, 16, seed=4)[:12] == settings


def test_log_uniform_stays_in_its_range_and_covers_it():
    import random

    generator = random.Random(0)
    draw = tuning.log_uniform(1e-4, 1.0)
    values = [draw(generator) for _ in range(400)]
    assert min(values) >= 1e-4
    assert max(values) <= 1.0
    # A quarter of the draws for each factor of ten.
    for low in (1e-4, 1e-3, 1e-2, 1e-1):
        assert 70 < sum(low <= value < 10 * low for value in values) < 130


def test_the_fastest_trial_wins_and_reaching_beats_any_loss():
    trials = [
        trial(loss=1e-9),
        trial(loss=math.inf),
        trial(seconds=3.0, loss=0.2),
        trial(seconds=2.0, loss=0.3),
    ]
    order = sorted(trials, key=lambda t: t.rank)
    assert order == [trials[3], trials[2], trials[0], trials[1]]


def test_a_trial_is_judged_by_the_recorded_rows():
    run = record(losses=(3.0, 2.0, 0.9, math.inf, math.nan))
    hit = tuning.judge({"lr": 1.0}, run, target=1.0)
    assert (hit.seconds, hit.step, hit.loss) == (1.0, 20, 0.9)
    missed = tuning.judge({"lr": 1.0}, run, target=0.5)
    assert (missed.seconds, missed.step, missed.loss) == (None, None, 0.9)
    assert tuning.judge({}, record(losses=(math.nan,)), target=0.5).loss == math.inf


@pytest.mark.parametrize(
    ("chosen", "best", "expected"),
    [
        (trial(2.9), trial(2.0), True),
        (trial(3.1), trial(2.0), False),
        (trial(None, 0.1), trial(2.0), False),
        (trial(None, 0.29), trial(None, 0.2), True),
        (trial(None, 0.31), trial(None, 0.2), False),
        (trial(50.0), trial(None, 0.2), True),
    ],
)
def test_a_choice_holds_up_within_the_tolerance(chosen, best, expected):
    assert tuning.holds_up(chosen, best, tolerance=1.5) is expected


def test_outcomes_survive_the_disk(tmp_path):
    outcome = Tuned(Protocol("digits-cnn"), "kfac", 0.1, (trial(1.0), trial()))
    outcome.save(tmp_path)
    assert tuning.load("digits-cnn", "kfac", tmp_path) == outcome
    with pytest.raises(FileNotFoundError, match="sgd was never tuned on digits-cnn"):
        tuning.load("digits-cnn", "sgd", tmp_path)


def test_settings_become_a_configuration():
    settings = {
        "lr": 0.5,
        "betas": [0.8, 0.9],
        "preconditioner.damping": 0.03,
        "schedule_steps": 300,
    }
    config = tuning.configure("digits-cnn", "kfac", settings, seconds=2.0, seed=3)
    assert (config.lr, config.betas, config.seconds, config.seed) == (0.5, (0.8, 0.9), 2.0, 3)
    assert config.preconditioner == {"damping": 0.03}
    assert config.schedule == "cosine"
    constant = tuning.configure("digits-cnn", "sgd", {"lr": 1.0, "schedule_steps": None}, steps=2)
    assert constant.schedule == "constant"


def test_tuning_runs_every_draw_with_the_same_budget(monkeypatch):
    ran = []

    def run(config):
        ran.append(config)
        return record(losses=(3.0, 1.0 + config.lr))

    monkeypatch.setattr(tuning, "run", run)
    protocol = Protocol("digits-autoencoder", trials=5, seconds=7.0)
    told = []
    outcome = tuning.tune("sgd", protocol, on_trial=told.append)
    lrs = [settings["lr"] for settings in tuning.draw("sgd", 5, protocol.seed)]
    assert [config.lr for config in ran] == lrs
    assert {config.seconds for config in ran} == {7.0}
    assert {config.seed for config in ran} == {tuning.TUNING_SEED}
    assert {config.clock for config in ran} == {"cpu"}
    assert outcome.best.loss == 1.0 + min(lrs)
    assert len(told) == len(outcome.trials) == 5


@pytest.mark.parametrize("name", WORKLOADS)
def test_stored_outcomes_obey_one_protocol(name):
    outcomes = [tuning.load(name, optimizer) for optimizer in OPTIMIZERS]
    assert len({outcome.protocol for outcome in outcomes}) == 1
    protocol = outcomes[0].protocol
    assert protocol.workload == name
    assert protocol.seed == tuning.TUNING_SEED
    for outcome, optimizer in zip(outcomes, OPTIMIZERS, strict=True):
        assert outcome.optimizer == optimizer
        assert outcome.target == min(workload(name).targets)
        assert list(outcome.trials) == sorted(outcome.trials, key=lambda t: t.rank)
        # The trials are those that the search space and the seed give, neither fewer nor others.
        drawn = tuning.draw(optimizer, protocol.trials, protocol.seed)
        stored = [json.dumps(t.settings, sort_keys=True) for t in outcome.trials]
        assert sorted(stored) == sorted(json.dumps(s, sort_keys=True) for s in drawn)


def test_the_demo_runs_tuned_settings_with_equal_budgets_on_another_seed():
    configs = configurations("digits-autoencoder", budget=90.0, seed=0)
    assert [c.label for c in configs] == [
        "SGD",
        "AdamW",
        "K-FAC, comm-opt",
        "K-FAC, mem-opt",
        "K-FAC, hybrid-opt",
        "K-FAC, trust region",
    ]
    assert {c.targets for c in configs} == {(0.3, 0.15, 0.05)}
    assert configs[-1].options == {}
    assert len({c.seconds for c in configs}) == 1
    plain = {
        dataclasses.replace(c, strategy="") == configs[2].but(strategy="") for c in configs[2:5]
    }
    assert plain == {True}
    with pytest.raises(ValueError, match="tuned on"):
        configurations("digits-autoencoder", budget=90.0, seed=tuning.TUNING_SEED)
    with pytest.raises(ValueError, match="budget must be positive"):
        configurations("digits-autoencoder", budget=0.0, seed=0)


def test_names_of_optimizers_are_checked():
    assert tuning.optimizers([]) == OPTIMIZERS
    assert tuning.optimizers(["kfac"]) == ("kfac",)
    known = "sgd, adamw, kfac, trust-region"
    with pytest.raises(ValueError, match=f"no optimizer 'lion'; there are: {known}"):
        tuning.optimizers(["lion"])


def test_the_trust_region_needs_no_tuning():
    config = tuning.tuned("digits-cnn", "trust-region", steps=3)
    assert (config.lr, config.options, config.schedule) == (1.0, {}, "constant")
    with pytest.raises(ValueError, match="trust-region runs with its defaults"):
        tuning.draw("trust-region", 2, seed=0)
