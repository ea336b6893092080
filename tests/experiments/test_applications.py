"""The benchmark of KAISA's applications: what it reads off, and that it goes on where it was."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks import applications
from benchmarks.applications import APPLICATIONS, Job, Records, Table

#: Dice by contender and steps, of seed 0; the others are 0.01 better and worse.
DICE = {
    ("SGD", 128): 0.84,
    ("SGD", 160): 0.90,
    ("K-FAC", 64): 0.80,
    ("K-FAC", 96): 0.95,
    ("SGD, large", 80): 0.70,
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    taken = []

    def trained(pair):
        job, _ = pair
        taken.append(job)
        name = f"{job.contender}, large" if job.batch > 16 else job.contender
        quality = 0.9 - abs(job.rate - 0.3)  # of tuning
        if job.seed != applications.TUNING_SEED:
            quality = DICE[name, job.steps] + (0.0, 0.01, -0.01)[job.seed]
        return job, {"dice": quality, "loss": 1.0}

    def memory(job):
        fixed = 48 if job.contender == "K-FAC" else 16
        return SimpleNamespace(
            fixed=fixed, per_sample=2, curvature=30, window=2, at=lambda batch: fixed + 2 * batch
        )

    def launch(function, ranks, **options):
        def call(jobs, cycles):
            by_name = {"SGD": [0.010, 0.010], "K-FAC": [0.012, 0.014]}
            return [[by_name[job.contender] for job in jobs]]

        return call

    monkeypatch.setattr(applications, "trained", trained)
    monkeypatch.setattr(applications, "memory", memory)
    monkeypatch.setattr(applications, "launch", launch)
    monkeypatch.setattr(Table, "planned", lambda self, contenders: {})
    unet = APPLICATIONS["unet"]
    kfac = dataclasses.replace(unet.contenders["K-FAC"], rates=(0.1, 0.3, 1.0))
    application = dataclasses.replace(
        unet, baselines={"SGD": unet.baselines["SGD"]}, contenders={"K-FAC": kfac}
    )

    def made():
        records = Records(tmp_path, SimpleNamespace(imap_unordered=map))
        return Table(application, records, ranks=(2,)), taken

    return made


def test_steps_and_time_are_read_off(table):
    row = table()[0].row()
    assert row["baseline"] == "SGD"
    assert row["target"] == pytest.approx(0.90)
    sgd, kfac = row["contenders"]["SGD"], row["contenders"]["K-FAC"]
    assert (sgd["rate"], kfac["rate"]) == (0.3, 0.3)
    assert (sgd["steps"], sgd["time_ratio"]) == (pytest.approx(160), pytest.approx(1.0))
    # Two thirds of the way from 64 to 96 steps; longer runs are not needed.
    assert kfac["steps"] == pytest.approx(64 + 32 * 2 / 3)
    assert list(kfac["qualities"]) == [64, 96]
    assert kfac["step_ratio"] == pytest.approx(1.3)
    assert kfac["step_ratio_spread"] == pytest.approx([1.2, 1.4])
    assert kfac["time_ratio"] == pytest.approx(1.3 * kfac["steps"] / 160)
    # K-FAC's 48 + 2 * 16 bytes leave the baseline (80 - 16) / 2 samples: half as many steps.
    memory = row["equal_memory"]
    assert (memory["batch"], memory["steps_of_baseline"], memory["rate"]) == (32, 80, 0.6)
    assert memory["target"] == pytest.approx(0.70)
    assert (memory["steps"], memory["at_most"]) == (64, True)
    assert memory["time_ratio"] == pytest.approx(1.3 * 64 / 80)
    assert [cells["ranks"] for cells in row["ranks"]] == [1, 2]
    assert row["ranks"][1]["steps"] == [160, 96]
    assert row["ranks"][1]["qualities"] == [
        pytest.approx([0.90, 0.91, 0.89]),
        pytest.approx([0.95, 0.96, 0.94]),
    ]


def test_kept_runs_are_not_trained_again(table):
    first, taken = table()
    row = first.row()
    trained = len(taken)
    assert trained == len(set(taken))
    with first.records.path.open("a", encoding="utf-8") as file:
        file.write('{"job": {"appl')  # a benchmark that was killed
    again, taken = table()
    assert again.row() == row
    assert len(taken) == trained


def test_a_run_that_diverged_is_the_worst(table):
    found, _ = table()
    jobs = [found.job("SGD", rate) for rate in (0.1, 0.3)]
    found.records.figures = {jobs[0]: {"dice": 0.1}, jobs[1]: {"dice": None}}
    assert min(jobs, key=found._error) == jobs[0]


def test_clips_are_the_same_at_every_rate(tmp_path):
    for rate in (0.1, 1.0):
        settings = Job("unet", "K-FAC", rate, 8, 16, 0).settings(tmp_path)
        assert settings.kl_clip / settings.rate**2 == pytest.approx(0.4)


@pytest.mark.thorough
def test_the_command_goes_on(tmp_path, capfd):
    arguments = ["--short", "--only", "detector", "--output", str(tmp_path), "--json"]
    assert applications.main(arguments) == 0
    first = json.loads(capfd.readouterr().out)  # of all processes
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8")
    assert applications.main(arguments) == 0
    again = json.loads(capfd.readouterr().out)
    assert again["applications"] == first["applications"]
    assert (tmp_path / "records.jsonl").read_text(encoding="utf-8") == lines
    row = first["applications"]["detector"]
    assert row["planned"]["step_ratio"] > 1
    assert row["equal_memory"]["curvature"] > 0
