"""Ranks are killed and started again, by torchrun, or fewer of them, and training goes on."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.harness import RankFailure, run_ranks
from tests.robustness.elastic import SAVE_EVERY, Death, Plan, train
from tests.robustness.kill_trials import Trial, run_trial, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def ends(folder: Path, ranks: int) -> list[tuple[int, Tensor]]:
    return [torch.load(folder / f"end-{ranks}-{rank}.pt") for rank in range(ranks)]


@pytest.mark.thorough
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path):
    (whole := tmp_path / "whole").mkdir()
    plan, death = Plan("comm-opt"), Death(6, 1, "solve")
    undisturbed = run_ranks(train, 2, whole, plan)
    (folder := tmp_path / "killed").mkdir()
    done = torchrun(2, 1, folder, plan, death)
    assert done.returncode == 0, done.stdout
    assert (folder / "died").exists()
    assert f"-{int(signal.SIGKILL)}" in done.stdout  # the agent says how its worker ended
    for (first, weights), (_, expected) in zip(ends(folder, 2), undisturbed, strict=True):
        assert first == SAVE_EVERY
        assert torch.equal(weights, expected)


def test_fewer_ranks_go_on_from_the_checkpoint(tmp_path):
    plan = Plan("sharded")
    (folder := tmp_path / "ranks").mkdir()
    failures = run_ranks(
        train, 4, folder, plan, Death(5, 2, "backward"), check=False, group_timeout=10
    )
    assert all(isinstance(failure, RankFailure) for failure in failures)
    assert failures[2].exitcode == -signal.SIGKILL
    (alone := tmp_path / "alone").mkdir()
    shutil.copytree(folder / "saved", alone / "saved")
    first, expected = train(0, 1, alone, plan)
    assert first == SAVE_EVERY
    for began, weights in run_ranks(train, 2, folder, plan):
        assert began == SAVE_EVERY
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.thorough
def test_what_strikes_leaves_the_weights_of_the_undisturbed_run(tmp_path):
    """In a sharded save; `test_durable.py` is of plain ones, and ranks that stop take minutes."""
    trial = Trial(1, "sharded", True, Death(10, 1, "save", signal.SIGKILL, 0.3))
    outcome = run_trial(trial, tmp_path, undisturbed=None)
    assert outcome.hit, outcome
    assert outcome.equal, outcome
    assert outcome.resumed_at in (0, 5, 10), outcome
