import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import time_to_target
from harness.search import PEERS
from harness.time_to_target import BENCHMARKS, TRUST_REGION

from soframe.experiments.config import RunConfig
from soframe.experiments.train import train
from soframe.experiments.tuning import TUNING_SEED, Protocol, Trial, Tuned, load
from soframe.experiments.workloads import workload
from tests.experiments.helpers import SILENT
from tests.harness.helpers import require_one_protocol

ROOT = Path(__file__).parents[2]
DIGITS = BENCHMARKS["digits-autoencoder"]
PROTOCOL = Protocol("digits-autoencoder", DIGITS.targets, seconds=8.0)


def trial(reached=0, seconds=None, loss=1.0, draw=0):
    return Trial(draw, 2.0, {"lr": 0.1}, reached, seconds, None if seconds is None else 10, loss)


def test_reported_runs_have_the_settings_that_were_chosen(tmp_path):
    best = dataclasses.replace(
        trial(1, 1.0),
        settings={"lr": 0.02, "options.adamw_lr": 0.004, "schedule_steps": 70},
    )
    Tuned(PROTOCOL, "muon", (best, trial())).save(tmp_path)
    make = time_to_target.configuration
    muon = make(DIGITS, "muon", seconds=5.0, seed=3, folder=tmp_path)
    assert (muon.lr, muon.options, muon.schedule_steps) == (0.02, {"adamw_lr": 0.004}, 70)
    assert (muon.targets, muon.evaluate_every, muon.seed) == (DIGITS.targets, 25, 3)
    own = make(DIGITS, TRUST_REGION, seconds=5.0, seed=3, folder=tmp_path)
    # Nothing but the run itself is set: the library's defaults decide.
    plain = RunConfig("digits-autoencoder", "trust-region", lr=1.0, seconds=5.0, seed=3)
    assert own == plain.but(targets=DIGITS.targets, evaluate_every=5)
    with pytest.raises(ValueError, match="tuned on"):
        make(DIGITS, "muon", seconds=5.0, seed=TUNING_SEED, folder=tmp_path)


def test_for_a_target_the_trial_that_was_there_first_is_chosen(tmp_path):
    first, second, *_ = DIGITS.targets
    trials = [
        dataclasses.replace(trial(reached, seconds), settings={"lr": lr, "schedule_steps": None})
        for reached, seconds, lr in [(2, 9.0, 0.2), (1, 3.0, 0.1), (1, 4.0, 0.3), (0, None, 0.4)]
    ]
    tuned = Tuned(PROTOCOL, "soap", tuple(trials))
    tuned.save(tmp_path)
    assert tuned.soonest(first) == trials[1]
    assert tuned.soonest(second) == trials[0]
    assert tuned.soonest(DIGITS.targets[2]) == tuned.best == trials[0]
    with pytest.raises(ValueError, match="no target 7"):
        tuned.soonest(7.0)
    make = time_to_target.configuration
    run = make(DIGITS, "soap", seconds=5.0, seed=3, folder=tmp_path, target=first)
    assert (run.lr, run.targets) == (0.1, (first,))
    run = make(DIGITS, "soap", seconds=5.0, seed=3, folder=tmp_path, target=second)
    assert (run.lr, run.targets) == (0.2, (first, second))
    own = make(DIGITS, TRUST_REGION, seconds=5.0, seed=3, folder=tmp_path, target=first)
    assert (own.lr, own.targets) == (1.0, (first,))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_are_of_their_workloads(name):
    benchmark = BENCHMARKS[name]
    assert workload(name).name == benchmark.workload == name
    assert list(benchmark.targets) == sorted(benchmark.targets, reverse=True)


def test_every_peer_was_tuned_on_every_workload():
    workloads = ("byte-gpt", "curves", "digits-autoencoder")
    peers = ("adamw", "muon", "sgd", "shampoo", "soap")
    assert (sorted(BENCHMARKS), sorted(PEERS)) == ([*workloads], [*peers])
    stored = {path.name for path in time_to_target.FOLDER.iterdir()}
    assert stored == {f"{name}-{peer}.json" for name in workloads for peer in peers}


@pytest.mark.parametrize("path", sorted(time_to_target.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_stored_outcomes_obey_one_protocol(path):
    fields = json.loads(path.read_text())
    outcome = load(fields["protocol"]["workload"], fields["optimizer"], time_to_target.FOLDER)
    benchmark = BENCHMARKS[outcome.protocol.workload]
    assert path.stem == f"{benchmark.workload}-{outcome.optimizer}"
    assert outcome.protocol == Protocol(
        benchmark.workload, benchmark.targets, benchmark.tuning_seconds
    )
    require_one_protocol(outcome)


@pytest.mark.slow
def test_runs_take_turns_and_are_what_they_would_be_alone():
    muon = RunConfig("digits-autoencoder", "muon", lr=0.02, steps=4, evaluate_every=1, seed=5)
    # Solving at every step, so that what the Fisher draws at each of them matters.
    own = muon.but(optimizer="trust-region", lr=1.0, options={"solve_every": 1})
    configs = [own, muon]
    seen = []
    raced = time_to_target.race(
        configs, turn=1e-9, on_turn=lambda runs: seen.append([len(run.rows) for run in runs])
    )
    assert seen == [[2, 2], [3, 3], [4, 4], [5, 5]]
    for config, run in zip(configs, raced, strict=True):
        alone = train(SILENT, config)
        assert [row.loss for row in run.rows] == [row.loss for row in alone.rows]
    with pytest.raises(ValueError, match="positive"):
        time_to_target.race(configs, turn=0.0)
    with pytest.raises(ValueError, match="one number of threads"):
        time_to_target.race([configs[0], configs[1].but(threads=2)])


@pytest.mark.slow
def test_the_benchmark_runs_from_tuning_to_report(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    output, tuned = tmp_path / "report", tmp_path / "tuned"
    names = "trust-region,soap,shampoo"
    options = ["digits-autoencoder", "--optimizers", names, "--tune", "--trials", "2"]
    options += ["--seconds", "0.1", "--seeds", "3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "time_to_target.py")]
    result = subprocess.run(
        [*command, *options, "--output", str(output), "--tuned", str(tuned)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((output / "digits-autoencoder.json").read_text())
    assert report["seeds"] == [3]
    optimizers = [run["config"]["optimizer"] for run in report["runs"]]
    assert optimizers == ["trust-region", "soap", "shampoo"]
    assert len(report["lines"]) == 3 * len(optimizers)
    assert all(run["rows"][-1]["loss"] < run["rows"][0]["loss"] for run in report["runs"])
    assert (output / "digits-autoencoder.svg").stat().st_size > 10_000
    assert len(list(tuned.glob("*.json"))) == 2
    assert "K-FAC, trust region" in result.stdout
