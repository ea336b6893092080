import dataclasses
import math
import random

import pytest
from harness import tuning
from harness.search import SPACES, Choice, Range
from harness.time_to_target import BENCHMARKS

from soframe.experiments.tuning import TUNING_SEED, Protocol, Trial, Tuned, load
from tests.experiments.helpers import record

DIGITS = BENCHMARKS["digits-autoencoder"]
PROTOCOL = Protocol("digits-autoencoder", DIGITS.targets, seconds=8.0)


def trial(reached=0, seconds=None, loss=1.0, draw=0):
    return Trial(draw, 2.0, {"lr": 0.1}, reached, seconds, None if seconds is None else 10, loss)


def test_a_range_is_shared_out():
    values = Range(1e-4, 1.0).draws(random.Random(0), 8)
    parts = [int(math.log10(value / 1e-4) * 2) for value in values]
    assert sorted(parts) == list(range(8))
    assert parts != sorted(parts)
    assert all(value == float(f"{value:.2g}") for value in values)


@pytest.mark.parametrize(("count", "counts"), [(8, [2, 6]), (4, [1, 3])])
def test_choices_are_shared_out(count, counts):
    draws = Choice(("constant", "cosine", "cosine", "cosine")).draws(random.Random(1), count)
    assert [draws.count("constant"), draws.count("cosine")] == counts
    orders = {tuple(Choice((5, 10)).draws(random.Random(seed), 4)) for seed in range(9)}
    assert len(orders) > 2


@pytest.mark.parametrize("optimizer", SPACES)
def test_every_optimizer_gets_as_many_draws_and_the_same_ones_again(optimizer):
    draws = tuning.draw(optimizer, PROTOCOL)
    assert len(draws) == 8
    assert draws == tuning.draw(optimizer, PROTOCOL)
    assert draws != tuning.draw(optimizer, dataclasses.replace(PROTOCOL, seed=1))
    assert all(set(draw) == set(SPACES[optimizer]) for draw in draws)
    decayed = tuning.draw(optimizer, dataclasses.replace(PROTOCOL, workload="byte-gpt"))
    assert {draw["weight_decay"] for draw in decayed} == {0.0, 0.1}


def test_further_beats_sooner_and_sooner_beats_lower():
    trials = [
        trial(loss=0.1),
        trial(loss=math.inf),
        trial(reached=1, seconds=1.0, loss=0.04),
        trial(reached=2, seconds=5.0, loss=0.03),
        trial(reached=2, seconds=4.0, loss=0.05),
    ]
    order = sorted(trials, key=lambda t: t.rank)
    assert order == [trials[4], trials[3], trials[2], trials[0], trials[1]]


def test_a_trial_is_judged_by_the_lowest_target_it_reached():
    run = record(losses=(3.0, 2.0, 0.9, math.inf, 0.45), targets=(1.0, 0.5, 0.4))
    judged = tuning.judge(3, 2.0, {"lr": 1.0}, run)
    assert judged == Trial(3, 2.0, {"lr": 1.0}, reached=2, seconds=2.0, step=40, loss=0.45)
    none = tuning.judge(0, 2.0, {}, record(losses=(math.nan, 3.0), targets=(1.0,)))
    assert (none.reached, none.seconds, none.step, none.loss) == (0, None, None, 3.0)


def test_halving_trains_the_best_of_each_rung_longer(monkeypatch):
    ran = []

    def fake(worker, config):
        if config.stop_at_target:
            ran.append(config)
        # The learning rate nearest to 0.01 is best, and nothing reaches a target.
        loss = 1.0 + abs(math.log(config.lr / 0.01))
        return record(losses=(9.0, loss), targets=config.targets, seconds=0.5)

    monkeypatch.setattr(tuning, "train", fake)
    told = []
    outcome = tuning.tune("sgd", PROTOCOL, told.append)
    assert [config.seconds for config in ran] == [2.0] * 8 + [4.0] * 4 + [8.0]
    assert {config.seed for config in ran} == {TUNING_SEED}
    assert {config.clock for config in ran} == {"cpu"}
    assert {config.targets for config in ran} == {DIGITS.targets}
    assert len(told) == len(outcome.trials) == 13
    drawn = [draw["lr"] for draw in tuning.draw("sgd", PROTOCOL)]
    assert [config.lr for config in ran[:8]] == drawn
    nearest = sorted(drawn, key=lambda lr: abs(math.log(lr / 0.01)))
    assert [config.lr for config in ran[8:]] == [*nearest[:4], nearest[0]]
    assert outcome.best.settings["lr"] == nearest[0]
    # A cosine ends with its rung: ten steps took half a second.
    lengths = {config.seconds: config.schedule_steps for config in ran if config.schedule_steps}
    assert lengths == {s: 20 * s for s in lengths}
    assert lengths.keys() >= {2.0, 4.0}


def test_outcomes_survive_the_disk(tmp_path):
    outcome = Tuned(PROTOCOL, "soap", (trial(1, 1.0), trial()))
    outcome.save(tmp_path)
    assert load("digits-autoencoder", "soap", tmp_path) == outcome
    with pytest.raises(FileNotFoundError, match="muon was never tuned on digits-autoencoder"):
        load("digits-autoencoder", "muon", tmp_path)


@pytest.mark.parametrize(
    ("chosen", "best", "expected"),
    [
        (trial(1, 2.9), trial(1, 2.0), True),
        (trial(1, 3.1), trial(1, 2.0), False),
        (trial(1, 0.1), trial(2, 2.0), False),
        (trial(2, 9.0), trial(1, 2.0), True),
        (trial(loss=0.1), trial(1, 2.0), False),
        (trial(loss=0.29), trial(loss=0.2), True),
        (trial(loss=0.31), trial(loss=0.2), False),
        (trial(1, 50.0), trial(loss=0.2), True),
    ],
)
def test_a_choice_holds_up_within_the_tolerance(chosen, best, expected):
    assert tuning.holds_up(chosen, best, tolerance=1.5) is expected


def test_what_runs_with_its_defaults_is_not_tuned():
    with pytest.raises(ValueError, match="trust-region runs with its defaults"):
        tuning.draw("trust-region", PROTOCOL)
