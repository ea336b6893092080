"""The benchmark of methods: what it reads off, and that all contenders can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import methods
from experiments import models
from experiments.config import RunConfig
from experiments.optimizers import build_optimizer
from experiments.tuning import TriedRates


@pytest.mark.parametrize("name", methods.CONTENDERS)
def test_contenders_can_be_built(name: str) -> None:
    if "pytorch_optimizer" in name:
        pytest.importorskip("pytorch_optimizer")
    config = methods.CONTENDERS[name].config(0.02, 10, seed=0)
    groups = build_optimizer(
        models.byte_gpt(), config, "cross-entropy", full_batch=False
    ).param_groups
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
    monkeypatch.setattr(methods, "STEPS", 4)
    monkeypatch.setattr(methods, "LENGTHS", (1, 2, 3, 4))
    monkeypatch.setattr(methods, "FIRST", 2)
    monkeypatch.setattr(methods, "_TURN", 1)
    monkeypatch.setattr(methods, "TUNED", TriedRates(tmp_path / "tuned.json"))
    own = methods.Runs(tmp_path, 1)
    monkeypatch.setattr(methods.Runs, "losses", lambda self, configs: [loss(c) for c in configs])
    return own


def test_losses_after_some_steps_are_of_the_best_rate_so_far(runs: methods.Runs) -> None:
    names = ["muon", "muon, pytorch_optimizer"]
    with pytest.raises(ValueError, match=r"'muon' has no learning rate that was tried.*--tune"):
        methods.losses_after(2, names, [0], runs)
    methods.TUNED.keep("4 steps", [("muon", 0.5, 1.0), ("muon", 0.25, 0.9)])
    found = methods.losses_after(2, names, [0, 1], runs)
    assert list(found) == [f"{name}, lr 0.25" for name in names]
    assert list(found.values()) == [[1 / 2.25] * 2] * 2
    assert methods.losses_after(2, ["muon"], [0], runs, 0.5) == {"muon, lr 0.5": [1 / 2.5]}


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
    found = methods.last_losses("muon", 0.0001, [0], target, runs)
    assert set(found) == tried
