"""The benchmark of KAISA's claim, at toy size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import kaisa
from experiments.models import resnet20_of_bytes
from experiments.optimizers import build_optimizer, build_preconditioner
from tests.experiments.helpers import record

SIZE = kaisa.Size(images=60, batch=20, epochs=2.0, lengths=(0.5,))


@pytest.mark.parametrize("name", kaisa.CONTENDERS)
def test_contenders_can_be_built(name: str) -> None:
    one = kaisa.CONTENDERS[name]
    config = kaisa.configuration(name, one.lrs[0], SIZE, 0.5, seed=3)
    assert (config.steps, config.batch_size, config.seed) == (3, 20, 3)
    assert (config.schedule, config.stop_at_target) == ("linear", False)
    model = resnet20_of_bytes(0, torch.float32)
    optimizer = build_optimizer(model, config, "cross-entropy", full_batch=False)
    assert optimizer.param_groups[0]["lr"] == one.lrs[0]
    preconditioner = build_preconditioner(model, optimizer, config)
    if name == "K-FAC 10/100":
        assert preconditioner is not None
        assert (
            config.preconditioner["statistics_every"],
            config.preconditioner["solve_every"],
        ) == (
            10,
            100,
        )
    assert len({len(other.lrs) for other in kaisa.CONTENDERS.values()}) == 1
    if preconditioner is not None:
        preconditioner.close()


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kaisa, "PERIOD", 2)
    monkeypatch.setattr(kaisa, "TURN", 1)
    short = {
        name: dataclasses.replace(one, lrs=one.lrs[:1]) for name, one in kaisa.CONTENDERS.items()
    }
    monkeypatch.setattr(kaisa, "CONTENDERS", short)


@pytest.mark.usefixtures("_toy")
@pytest.mark.slow
def test_epochs_and_seconds_are_read_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After 3 steps K-FAC is above SGD's 0.8, which it would have reached after 2 of them.
    ends = {("sgd", 6): 0.8, ("sgd", 3): 0.5, ("kfac", 3): 0.7, ("kfac", 6): 0.9}

    class Fake(kaisa.Machinery):
        def accuracies(self, configs, processes):  # type: ignore[no-untyped-def]
            assert processes == 1
            return [ends[c.optimizer, c.steps] + (0.1 if c.seed else -0.1) for c in configs]

    kept = record(sent_bytes_per_step={"gradients": 7.0})
    monkeypatch.setattr(kaisa.runs, "kept", lambda *args, **kwargs: [kept])
    times = [[1.0, 2.0, 9.0], [1.2, 2.2, 9.0]]
    monkeypatch.setattr(kaisa, "launch", lambda *args, **kwargs: lambda *rest: [times])
    lrs = {"SGD": 0.1, "K-FAC 10/100": 0.2}
    how = Fake(tmp_path, at_once=1, cycles=3)
    names = ["K-FAC 10/100"]
    found = kaisa.report(names, SIZE, lrs=lrs, seeds=[0, 1], processes=1, how=how)
    assert found["target"] == pytest.approx(0.8)
    sgd, kfac = found["rows"]["SGD"], found["rows"]["K-FAC 10/100"]
    assert (sgd["steps"], sgd["epochs"], sgd["seconds_ratio"]) == (pytest.approx(6), 2.0, 1.0)
    assert kfac["steps"] == pytest.approx(4.5)
    assert kfac["epochs"] == pytest.approx(1.5)
    assert kfac["step_ratio"] == pytest.approx(1.1)
    assert kfac["seconds_ratio"] == pytest.approx(0.75 * 1.1)
    assert kfac["accuracies"] == {3: pytest.approx([0.6, 0.8]), 6: pytest.approx([0.8, 1.0])}
    assert kaisa.table(found, SIZE).row_count == 2
    assert len(kaisa.figure(found, SIZE).axes) == 2
