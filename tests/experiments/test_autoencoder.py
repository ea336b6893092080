"""The benchmark of Martens' autoencoder, at toy size."""

import math

import pytest
import torch

from benchmarks import autoencoder
from benchmarks.autoencoder import ALL_AT_ONCE, CONTENDERS, Job, Record
from experiments import models
from experiments.canvases import split

NAMES = [name for name in CONTENDERS if name != "kfac-pytorch"]


@pytest.mark.parametrize("name", NAMES)
def test_contenders_take_steps(name):
    job = Job(name, CONTENDERS[name].rates[0], 0, 2, (8, 3))
    record = autoencoder.run(job)
    assert record.steps == [0, 1, 2]
    assert len(record.seconds) == len(record.train) == len(record.held_out) == 3
    images = split(held_out=True)[0].double()
    model = models.autoencoder((784, 8, 3), 0, torch.float64)
    with torch.no_grad():
        error = (model(images) - images).square().sum(1).mean()
    assert record.held_out[0] == pytest.approx(float(error), rel=1e-4)
    assert record.train[-1] < record.train[0]


def test_every_contender_has_as_many_trials():
    assert {len(CONTENDERS[name].rates) for name in NAMES if name != ALL_AT_ONCE} == {4}


def test_rates_grow_and_fall_on_lines():
    factors = [autoencoder.factor(step, 300) for step in range(300)]
    assert factors[0] == pytest.approx(1 / 15)
    assert max(factors) == factors[14] == pytest.approx(286 / 300)
    assert factors[-1] == pytest.approx(1 / 300)


def record(name, errors, rate=0.1, seed=0):
    steps = list(range(0, 10 * len(errors), 10))
    return Record(
        Job(name, rate, seed, steps[-1], (8,)), steps, [s / 5 for s in steps], errors, errors
    )


def test_steps_and_seconds_to_the_error_of_adamw(tmp_path):
    runs = {
        "AdamW": [record("AdamW", [9.0, 5.0, 3.0]), record("AdamW", [9.0, 6.0, 5.0])],
        "K-FAC": [record("K-FAC", [9.0, 4.0, 1.0]), record("K-FAC", [9.0, 8.0, 2.0])],
        "SGD": [record("SGD", [9.0, 4.0, 3.9]), record("SGD", [9.0, 8.0, 7.0])],
    }
    cells = {row[0]: row[-2:] for row in autoencoder.lines(runs)}
    assert cells["K-FAC"] == ["15", "3.0"]  # after 10 and 20 steps, of 0.2 s
    assert cells["SGD"] == ["not reached", "-"]
    assert len(autoencoder.figure(runs, "title").axes) == 2


def test_the_best_rate_is_trained_and_kept(tmp_path, monkeypatch):
    taken = []

    def run(job):
        taken.append(job)
        return record(job.contender, [9.0, math.nan if job.rate > 0.02 else 1 - job.rate], job.rate)

    class Pool:
        def __init__(self, processes):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def imap_unordered(self, function, jobs):
            for job in jobs:
                yield Record(job, *list(vars(function(job)).values())[1:])

    monkeypatch.setattr(autoencoder, "run", run)
    monkeypatch.setattr(
        autoencoder, "get_context", lambda kind: type("Context", (), {"Pool": Pool})
    )
    path = tmp_path / "records.jsonl"
    runs = autoencoder.report(["AdamW", "SGD"], (8,), 10, path, 1)
    assert {found.job.rate for found in runs["SGD"]} == {0.01}  # higher ones diverged
    assert [found.job.seed for found in runs["SGD"]] == [0, 1, 2]
    count = len(taken)
    assert count == 2 * (4 + 3)
    again = autoencoder.report(["AdamW", "SGD"], (8,), 10, path, 1)
    assert len(taken) == count
    assert again == runs
