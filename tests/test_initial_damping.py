"""The benchmark of initial dampings: which settings race, what is printed, which runs fail."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from harness.time_to_target import BENCHMARKS
from typer.testing import CliRunner

from benchmarks import initial_damping
from soframe.experiments.config import RunConfig
from soframe.trust_region import LevenbergMarquardt

app = typer.Typer()
app.command()(initial_damping.main)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def steps_of(config: RunConfig) -> int:
    """As if one part took thrice as long, and a damping of 100 never got to the second target."""
    return (300 if config.options["parts"] == 1 else 100) + config.seed


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    seen: list[RunConfig] = []

    def race(configs: list[RunConfig]) -> list[SimpleNamespace]:
        seen.extend(configs)
        records = []
        for config in configs:
            steps, first = steps_of(config), config.targets[0]
            fails = config.options["damping"] == LevenbergMarquardt(initial=100.0)

            def reached(target: float, steps: int = steps, own: Any = (fails, first)) -> Any:
                return SimpleNamespace(step=steps) if target == own[1] or not own[0] else None

            rows = [SimpleNamespace(seconds=0.05 * steps, step=steps)]
            records.append(SimpleNamespace(rows=rows, reached=reached))
        return records

    monkeypatch.setattr(initial_damping, "race", race)
    return seen


def test_every_setting_races_with_the_others_of_its_seed(raced: list[RunConfig]) -> None:
    result = run("curves", "--dampings", "3,100", "--parts", "1,3", "--seeds", "0,4", "--json")
    found = [(c.seed, c.options["damping"].at(0), c.options["parts"]) for c in raced]
    each = [(damping, parts) for damping in (3.0, 100.0) for parts in (1, 3)]
    assert found == [(seed, *settings) for seed in (0, 4) for settings in each]
    assert {config.workload for config in raced} == {"curves"}
    rows = json.loads(result.stdout)
    targets = list(BENCHMARKS["curves"].targets[:2])
    assert [row["target"] for row in rows] == targets * 4
    by = {(row["damping"], row["parts"], row["target"]): row["steps"] for row in rows}
    assert by[3.0, 1, targets[1]] == [300, 304]
    assert by[3.0, 3, targets[1]] == [100, 104]
    assert by[100.0, 3, targets[0]] == [100, 104]
    assert by[100.0, 3, targets[1]] == []
    assert all(row["ms_per_step"] == pytest.approx(50) for row in rows)
    assert result.exit_code == 4  # two seeds from 100, with one part and with three


def test_the_table_shows_medians_and_failures(raced: list[RunConfig]) -> None:
    result = run("digits-autoencoder", "--dampings", "3,100", "--seeds", "0,1,2")
    assert len(raced) == 6
    assert "101 (100 to 102)" in result.stdout
    assert " - " in result.stdout
    assert result.exit_code == 3


def test_nothing_fails_where_all_get_there(raced: list[RunConfig]) -> None:
    assert run("--dampings", "1,3", "--seeds", "0").exit_code == 0
    assert [config.workload for config in raced] == ["curves"] * 2 + ["digits-autoencoder"] * 2


def test_a_run_that_is_too_short_has_failed() -> None:
    result = run("digits-autoencoder", "--dampings", "3", "--seeds", "0", "--steps", "5", "--json")
    assert [row["steps"] for row in json.loads(result.stdout)] == [[], []]
    assert result.exit_code == 1
