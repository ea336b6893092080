"""The memory that batches under a cap are counted with is the memory that training holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soframe
from benchmarks import fixed_memory
from benchmarks.fixed_memory import (
    BATCHES,
    CAP,
    SMALL_SGD,
    Live,
    Race,
    count,
    largest_batch,
    per_sample,
    planned,
    saved,
)
from benchmarks.kaisa import SGD, Machinery, Size


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 30))


def loss(model: nn.Module, batch: int) -> Tensor:
    return F.mse_loss(model(torch.randn(batch, 40)), torch.zeros(batch, 30))


def test_saved_activations_are_those_of_autograd() -> None:
    model = net()
    # Inputs, tanh's outputs, which the next layer saves too, and outputs and targets of the loss.
    for batch in (2, 5):
        assert saved(model, partial(loss, model, batch)) == 4 * batch * (40 + 80 + 30 + 30)
    slope, constant = per_sample(lambda batch: saved(model, partial(loss, model, batch)), BATCHES)
    assert (slope, constant) == (4 * (40 + 80 + 30 + 30), 0)
    with pytest.raises(ValueError, match="no line"):
        per_sample(lambda batch: batch**2, BATCHES)


def test_counted_memory_is_held() -> None:
    batch = 64
    with Live() as live:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        preconditioner = soframe.Preconditioner(
            model, optimizer=optimizer, statistics_every=1, solve_every=1
        )
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, batch).backward()
            preconditioner.step()
            optimizer.step()
    held = preconditioner.memory_usage()["total"]
    preconditioner.close()
    curvature = planned(model, 1, "comm-opt", method="kfac")
    assert curvature[0] == held
    found = count(model, optimizer, partial(loss, model), curvature=curvature)
    assert found.weights == found.gradients == found.state == 4 * (40 * 80 + 80 + 80 * 30 + 30)
    assert found.window == 4 * (41**2 + 80**2 + 81**2 + 30**2)
    assert found.fixed == 3 * found.weights + sum(curvature)
    # The peak has temporary tensors too, but not all of the others at once.
    assert found.fixed - found.gradients < live.peak < 1.2 * found.at(batch)
    assert count(model, optimizer, partial(loss, model), ranks=4).buckets > 0


@pytest.mark.slow
def test_the_batch_is_the_largest_that_fits(tmp_path: Path) -> None:
    size = Size(images=60, batch=20, epochs=1.0, lengths=(0.5,))
    lrs = {SGD: 0.1, fixed_memory.KFAC: 0.05}
    how = Machinery(tmp_path, at_once=1, cycles=1)
    race = Race(CAP, size, lrs, ["comm-opt"], [0], how)
    config = race.config("comm-opt", 40)
    assert (config.strategy, config.lr, config.batch_size) == ("comm-opt", 0.1, 40)
    assert race.config(SMALL_SGD, 40).optimizer == "sgd"
    memory = race.memory("comm-opt", 1)
    batch = largest_batch(CAP, memory.fixed, memory.per_sample)
    assert batch == 32
    assert largest_batch(CAP - 1_000_000, memory.fixed, memory.per_sample) == 31
    model, _, preconditioner = fixed_memory.build(config)
    bare = memory.fixed - memory.saved
    assert preconditioner is not None
    for number, fits in ((batch, True), (batch + 1, False)):
        held = saved(model, partial(fixed_memory.loss_of, model, number))
        assert (bare + held <= CAP) == fits
    preconditioner.close()
    with pytest.raises(ValueError, match=r"no sample of .* fits"):
        Race(1_000, size, lrs, ["comm-opt"], [0], how).counted(2)


def test_training_stops_at_the_first_length_with_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake(Machinery):
        def accuracies(self, configs: Any, processes: int) -> list[float]:
            assert processes == 4
            [config] = configs
            return [{"sgd": 0.5, "kfac": 0.7}[config.optimizer] * config.steps / 6]

    memory = fixed_memory.Memory(1, 1, 1, 1, 0, 0, 0, 10)
    monkeypatch.setattr(Race, "memory", lambda self, label, ranks: memory)
    # K-FAC's steps take twice as long.
    monkeypatch.setattr(Race, "times", lambda self, batches, ranks: [[1.0], [2.0], [1.0]])
    size = Size(images=60, batch=20, epochs=2.0, lengths=(0.5, 0.8))
    lrs = {SGD: 0.1, fixed_memory.KFAC: 0.05}
    race = Race(54, size, lrs, ["comm-opt"], [0], Fake(tmp_path, at_once=1, cycles=1))
    found = race.report(4)
    rows = found["rows"]
    assert {label: row["batch"] for label, row in rows.items()} == dict.fromkeys(rows, 5)
    assert found["target"] == pytest.approx(0.5)
    assert list(rows["comm-opt"]["accuracies"]) == [3, 5]
    assert list(rows[SMALL_SGD]["accuracies"]) == [3, 5, 6]
    steps = 3 + 2 * (0.5 - 0.35) / (0.7 * 5 / 6 - 0.35)
    assert rows["comm-opt"]["epochs"] == pytest.approx(steps * 20 / 60)
    assert rows["comm-opt"]["seconds_ratio"] == pytest.approx(steps * 2 / 6)
    assert rows[SGD]["seconds_ratio"] == pytest.approx(1.0)
    assert fixed_memory.table(found).row_count == 3
    assert fixed_memory.memory_table(found).row_count == 6
