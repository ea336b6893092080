"""The benchmark of methods: what it reads off, and that all contenders can be built."""

from __future__ import annotations

import json
from pathlib import Path

import methods
import pytest

from soframe.experiments import gpt
from soframe.experiments.optimizers import build_optimizer


@pytest.mark.parametrize(
    ("target", "steps"), [(2.5, 180.0), (2.2, 195.0), (2.05, 240.0), (2.0, 300.0), (1.9, None)]
)
def test_steps_are_read_off_between_lengths(target: float, steps: float | None) -> None:
    losses = {180: 2.3, 210: 2.1, 240: 2.05, 300: 2.0}
    assert methods.steps_to(target, losses) == (None if steps is None else pytest.approx(steps))


@pytest.mark.parametrize("name", methods.CONTENDERS)
def test_contenders_can_be_built(name: str) -> None:
    config = methods.CONTENDERS[name].config(0.02, 10, seed=0)
    groups = build_optimizer(gpt.byte_gpt(), config).param_groups
    own = [g for g in groups if not g.get("method", "").startswith("auxiliary")]
    others = [group for group in groups if group not in own]
    assert [group["lr"] for group in own] == [0.02]
    assert [group["lr"] for group in others] == [methods.AUXILIARY_LR] * len(others)


def test_a_report_of_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "STEPS", 2)
    monkeypatch.setattr(methods, "LENGTHS", (1, 2))
    monkeypatch.setattr(methods, "_CYCLES", 1)
    monkeypatch.setattr(methods, "TUNED", tmp_path / "tuned.json")
    monkeypatch.setattr(
        methods,
        "final_losses",
        lambda configs, processes, what: [1 / (config.steps + config.lr) for config in configs],
    )
    (tmp_path / "tuned.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--tune --only 'muon'"):
        methods.report(["soap-muon"], [0], 1)
    methods.tune(["muon", "soap-muon"], 1)
    assert methods.best_lrs(["muon"]) == {"muon": 0.04}
    found = methods.report(["soap-muon"], [0, 1], 1)
    assert found["target"] == pytest.approx(1 / 2.04)
    row = found["rows"]["soap-muon"]
    assert row["steps_ratio"] == 1.0
    assert row["seconds_ratio"] == row["step_ratio"] > 0
    assert json.loads(json.dumps(found))["rows"]["muon"]["steps"] == 2
    assert methods.table(found).row_count == 2
