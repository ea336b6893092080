"""Runs that are kept, and steps that are timed in turns."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

import soframe
from experiments import runs
from experiments.config import RunConfig
from experiments.environment import sources
from experiments.records import RunRecord
from experiments.train import ALONE, WorkloadRun

SGD = RunConfig("digits-autoencoder", "sgd", lr=0.002, steps=3, evaluate_every=2)


@pytest.mark.slow
def test_a_run_is_trained_once_and_read_again(tmp_path: Path) -> None:
    told: list[RunRecord] = []
    other = SGD.but(seed=1)
    found = runs.kept([SGD, other, SGD], tmp_path, tell=told.append)
    assert [one.config for one in told] == [SGD, other]
    assert found[0] == found[2] == told[0]
    assert found[0] != found[1]
    assert [row.step for row in found[0].rows] == [0, 2, 3]
    assert found[0].last.loss < found[0].rows[0].loss
    told.clear()
    kept: list[int] = []
    third = SGD.but(seed=2)
    again = runs.kept([other, SGD, third], tmp_path, tell=told.append, on_kept=kept.append)
    assert again[:2] == [found[1], found[0]]
    assert [one.config for one in told] == [third]
    assert kept == [2]  # of before
    # What was interrupted is done anew: the file comes last, and whole.
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 3
    stored = json.loads((tmp_path / f"{runs.digest(SGD, 1)}.json").read_text())
    assert stored["config"]["lr"] == SGD.lr


def test_names_tell_runs_apart() -> None:
    names = {
        runs.digest(SGD, 1),
        runs.digest(SGD, 2),
        runs.digest(SGD, 1, "another text"),
        runs.digest(SGD.but(weight_decay=0.1), 1),
        runs.digest(SGD.but(steps=4), 1),
    }
    assert len(names) == 5
    assert runs.digest(SGD.but(), 1) in names


def test_a_change_of_the_code_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a module that a workload imports, in soframe, or in the experiments."""
    (tmp_path / "own_layers.py").write_text("WIDTH = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = sources()
    importlib.import_module("own_layers")
    try:
        first = sources()
        assert first == sources() != before
        (tmp_path / "own_layers.py").write_text("WIDTH = 5\n")
        assert sources() != first
    finally:
        del sys.modules["own_layers"]
    assert sources() == before
    (tmp_path / "soframe").mkdir()
    monkeypatch.setattr(soframe, "__file__", str(tmp_path / "soframe" / "__init__.py"))
    moved = sources()
    (tmp_path / "soframe" / "added.py").write_text("")
    assert sources() != moved


def test_a_run_that_diverged_is_kept(tmp_path: Path) -> None:
    lost = SGD.but(lr=1e9, steps=30)
    first = runs.kept([lost], tmp_path)[0]
    again = runs.kept([lost], tmp_path)[0]
    assert not math.isfinite(first.last.loss)
    assert again.last.loss == math.inf
    assert again.last.step == first.last.step


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.thorough
def test_runs_at_a_time_and_runs_of_two_processes_end_alike(tmp_path: Path) -> None:
    alone = runs.kept([SGD, SGD.but(seed=1)], tmp_path / "one")
    beside = runs.kept([SGD, SGD.but(seed=1)], tmp_path / "two", at_once=2)
    (shared,) = runs.kept([SGD], tmp_path / "one", processes=2)
    assert [one.last.loss for one in beside] == [one.last.loss for one in alone]
    assert shared.last.loss == pytest.approx(alone[0].last.loss, rel=1e-4)
    assert shared.sent_bytes_per_step["gradients"] > 0
    assert len(list((tmp_path / "one").iterdir())) == 3


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[float, int]] = []

    def take(self: WorkloadRun, steps: int) -> float:
        taken.append((self.config.lr, steps))
        return len(taken) * 1.0

    monkeypatch.setattr(WorkloadRun, "take", take)
    configs = [SGD, SGD.but(lr=0.1)]
    times = runs.turns(ALONE, configs, cycles=2, period=4, turn=2)
    assert taken == [(0.002, 2), (0.1, 2)] * 5
    # The first turns warm up; a period has two turns of two steps.
    assert times == [[(3 + 5) / 4, (7 + 9) / 4], [(4 + 6) / 4, (8 + 10) / 4]]
    with pytest.raises(ValueError, match="turns of 3 steps do not make up a period of 4"):
        runs.turns(ALONE, configs, cycles=1, period=4, turn=3)


@pytest.mark.parametrize(
    ("target", "steps"), [(2.5, 180.0), (2.2, 195.0), (2.05, 240.0), (2.0, 300.0), (1.9, None)]
)
def test_steps_are_read_off_between_lengths(target: float, steps: float | None) -> None:
    losses = {180: 2.3, 210: 2.1, 240: 2.05, 300: 2.0}
    assert runs.steps_to(target, losses) == (None if steps is None else pytest.approx(steps))
