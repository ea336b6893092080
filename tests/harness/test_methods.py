"""The benchmark of methods: what it reads off, and that all contenders can be built."""

from __future__ import annotations

import json
from pathlib import Path

import methods
import pytest
from harness.rates import TriedRates

from soframe.experiments import gpt
from soframe.experiments.config import RunConfig
from soframe.experiments.optimizers import build_optimizer


@pytest.mark.parametrize("name", methods.CONTENDERS)
def test_contenders_can_be_built(name: str) -> None:
    if "pytorch_optimizer" in name:
        pytest.importorskip("pytorch_optimizer")
    config = methods.CONTENDERS[name].config(0.02, 10, seed=0)
    groups = build_optimizer(gpt.byte_gpt(), config).param_groups
    own = [g for g in groups if not g.get("method", "").startswith("auxiliary")]
    own = [g for g in own if g.get("use_muon", True)]
    if name in ("muon, plain", "soap, pytorch_optimizer"):
        own = groups[:1]  # one optimizer for each part
    others = [group for group in groups if group not in own]
    assert [group["lr"] for group in own] == [0.02]
    assert others or "all parameters" in name
    assert [group["lr"] for group in others] == [methods.AUXILIARY_LR] * len(others)


def loss(config: RunConfig) -> float:
    return 1 / (config.steps + config.lr)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> methods.Runs:
    class Here:
        def __init__(self, processes: int, mp_context: object) -> None: ...

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *error: object) -> None: ...

        map = staticmethod(map)

    monkeypatch.setattr(methods, "STEPS", 4)
    monkeypatch.setattr(methods, "LENGTHS", (1, 2, 3, 4))
    monkeypatch.setattr(methods, "FIRST", 2)
    monkeypatch.setattr(methods, "_TURN", 1)
    monkeypatch.setattr(methods, "TUNED", TriedRates(tmp_path / "tuned.json"))
    monkeypatch.setattr(methods, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(methods, "final_loss", loss)
    return methods.Runs(tmp_path / "runs.json")


@pytest.mark.slow
def test_a_report_of_few_steps(runs: methods.Runs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'muon' was not tuned for 4 steps.*add --tune"):
        methods.report(["soap-muon"], [0], runs, 1, 1)
    methods.tune(["muon", "soap-muon"], runs, 1)
    assert methods.report(["muon"], [0], runs, 1, 1)["rows"]["muon"]["lr"] == 0.06
    found = methods.report(["soap-muon"], [0, 1], runs, 1, 1)
    assert found["target"] == pytest.approx(1 / 4.06)
    row = found["rows"]["soap-muon"]
    assert row["steps_ratio"] == 1.0
    assert row["seconds_ratio"] == row["step_ratio"] > 0
    assert json.loads(json.dumps(found))["rows"]["muon"]["steps"] == 4
    assert methods.table(found).row_count == 2
    other = methods.report(["muon"], [0], runs, 1, 1, reference="soap-muon")
    assert list(other["rows"]) == ["soap-muon", "muon"]
    assert (
        other["rows"]["soap-muon"]["steps_ratio"] == other["rows"]["soap-muon"]["step_ratio"] == 1
    )
    methods.plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.slow
def test_another_implementation_has_the_learning_rate_of_the_first(runs: methods.Runs) -> None:
    pytest.importorskip("pytorch_optimizer")
    methods.tune(["muon, pytorch_optimizer"], runs, 1)
    assert list(methods.TUNED.scores("4 steps")) == ["muon"]
    found = methods.report(["muon, pytorch_optimizer"], [0], runs, 1, 1)
    assert [row["lr"] for row in found["rows"].values()] == [0.06, 0.06]


def test_losses_after_some_steps_are_of_the_best_rate_so_far(runs: methods.Runs) -> None:
    names = ["muon", "muon, pytorch_optimizer"]
    with pytest.raises(ValueError, match=r"'muon' has no learning rate that was tried.*--tune"):
        methods.losses_after(2, names, [0], runs, 1)
    methods.TUNED.keep("4 steps", [("muon", 0.5, 1.0), ("muon", 0.25, 0.9)])
    found = methods.losses_after(2, names, [0, 1], runs, 1)
    assert list(found) == [f"{name}, lr 0.25" for name in names]
    assert list(found.values()) == [[1 / 2.25] * 2] * 2
    assert methods.losses_after(2, ["muon"], [0], runs, 1, 0.5) == {"muon, lr 0.5": [1 / 2.5]}


@pytest.mark.slow
@pytest.mark.thorough
def test_plain_muon_is_a_rounding_apart(runs: methods.Runs) -> None:
    methods.TUNED.keep("4 steps", [("muon", 0.03, 1.0)])
    found = methods.apart(2, ["muon", "muon, plain", "normuon"], 0)
    assert found["muon"][0] == 0.0
    assert 0 < found["muon, plain"][0] < 1e-3 < found["normuon"][0]
    assert found["muon, plain"][1] == pytest.approx(found["muon"][1], rel=1e-4)


def test_trials_are_ranked_by_their_best_losses(runs: methods.Runs) -> None:
    methods.TUNED.keep("4 steps", [("a", 0.1, 2.0), ("a", 0.2, 1.5), ("b", 0.1, 1.0)])
    methods.TUNED.keep("4 steps", [("a", 0.3, float("inf")), ("c", 0.1, 1.2)])
    table = methods.trials_table()
    columns = [list(column.cells) for column in table.columns]
    assert columns[1:4] == [["b", "c", "a"], ["0.1", "0.1", "0.2"], ["1.000", "1.200", "1.500"]]
    assert columns[4][2] == "0.1: 2.000, 0.3: inf"


@pytest.mark.parametrize(
    ("target", "tried"),
    [
        (0.3, {2, 3, 4}),
        (0.34, {2, 3, 4}),
        (0.51, {1, 2}),
        (1.1, {1, 2}),
        (0.2, {2, 4, 5}),  # near: the next ones
        (0.13, {2, 4, 5, 6, 8}),
        (0.124, {2, 4, 5, 6, 8}),  # not reached at all
        (0.1, {2, 4, 8}),  # far, and the greatest does not reach
    ],
)
def test_a_target_is_bracketed(
    runs: methods.Runs, monkeypatch: pytest.MonkeyPatch, target: float, tried: set[int]
) -> None:
    monkeypatch.setattr(methods, "LENGTHS", (1, 2, 3, 4, 5, 6, 8))
    monkeypatch.setattr(methods, "FAR", 0.14)
    found = methods.last_losses("muon", 0.0001, [0], target, runs, 1)
    assert set(found) == tried


def test_runs_that_have_ended_are_not_repeated(
    runs: methods.Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [methods.CONTENDERS["muon"].config(0.02, 3, seed) for seed in (0, 1)]
    first = runs.losses(configs[:1], 1, "")
    done: list[int] = []
    monkeypatch.setattr(methods, "final_loss", lambda config: done.append(config.seed) or 0.5)
    again = methods.Runs(runs.path)
    assert again.losses(configs, 1, "") == [*first, 0.5]
    assert done == [1]
    other = methods.CONTENDERS["muon, q k v apart"].config(0.02, 3, 0)
    assert again.losses([other], 1, "") == [0.5]
