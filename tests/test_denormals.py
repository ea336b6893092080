"""The benchmark of denormals: three modes from one state, and what it counts."""

from __future__ import annotations

import pytest
import torch

from benchmarks import denormals
from benchmarks.denormals import MODES, Training, times
from soframe.experiments.train import numerics


def test_all_modes_are_timed_from_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, float]] = []
    step = Training.step

    def noting(self: Training) -> float:
        flushed = bool((torch.full((1,), 1e-39) * 1.0 == 0.0).item())
        seen.append((flushed, step(self)))
        return seen[-1][1]

    monkeypatch.setattr(Training, "step", noting)
    with numerics(1):
        found, (small, numbers) = times("digits-autoencoder", 1, 2, rows=40)
    assert [flushed for flushed, _ in seen] == [True] + 2 * [False, False, True]
    assert {len(each) for each in found.values()} == {2}
    assert found.keys() == MODES.keys()
    losses = [loss for _, loss in seen[1:]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert losses[3] < losses[0]
    assert small < numbers


def test_denormals_are_counted() -> None:
    with numerics(1):
        run = Training("digits-autoencoder", False, rows=40)
        torch.set_flush_denormal(False)
        run.step()
        before, numbers = denormals.denormals(run.optimizer)
        factor = next(iter(run.optimizer.preconditioner.blocks[0].running.values()))
        factor.zero_()
        factor[..., :3].fill_(1e-39)
        after, same = denormals.denormals(run.optimizer)
    assert same == numbers
    assert after - before == factor[..., :3].numel()
