"""The suite of small problems: targets, whose trial counts, and what is kept of a run."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import suite
from experiments.problems import PROBLEMS, UNSEEN
from experiments.train import ALONE, WorkloadRun
from experiments.workloads import workload

app = typer.Typer()
app.command()(suite.main)


def configure(problem, name, seed):
    return suite.configuration(problem, name, seed, seconds=0.02, longer=2.0)


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_the_same_from_its_seed(name):
    losses = []
    for seed in (0, 0, 1):
        task = workload(f"problem:{name}").make(seed, torch.float32)
        torch.manual_seed(seed)
        loss = task.loss(task.model, *task.train)
        loss.backward()
        assert all(p.grad is not None for p in task.model.parameters())
        losses.append(loss.item())
    assert losses[0] == losses[1] != losses[2]
    assert set(UNSEEN) < set(PROBLEMS)


def test_a_target_is_what_single_precision_tells_from_zero():
    assert suite.resolved(0.0) == 2**-23
    assert suite.resolved(1e-6) == 1e-6
    assert suite.resolved(-0.5) == -0.5  # of a density, whose logarithm it is


@pytest.mark.slow
def test_runs_that_have_ended_are_not_repeated_and_adamw_sets_the_targets(tmp_path):
    names = ["trust-region", "stochastic-trust-region", "adamw", "muon"]
    rows = suite.measure("gaussian-natural", [0], names, configure, tmp_path)
    own, adamw, muon = rows  # with full batches the stochastic one takes no part
    assert adamw.ratios == (1.0,)
    assert own.targets == muon.targets == adamw.lowest
    assert own.error is None
    assert len(list(tmp_path.iterdir())) == 3
    assert suite.measure("gaussian-natural", [0], names, configure, tmp_path) == rows


def test_a_problem_that_is_refused_has_a_row_with_the_reason(tmp_path):
    names = ["trust-region", "adamw"]
    own, adamw = suite.measure("factorisation", [0], names, configure, tmp_path)
    assert own.error is not None
    assert not own.all_within(2.0)
    assert adamw.all_within(1.0)


def test_peers_without_a_rate_have_their_defaults():
    """And those with a schedule the time of the tuned peers, since it has to have an end."""
    found = {name: suite.configuration("vae", name, 0, 2.0, 2.0) for name in suite.UNTUNED}
    assert [one.optimizer for one in found.values()] == [
        *("prodigy", "prodigy", "dadapt-adam", "schedule-free", "adamw"),
    ]
    assert [one.seconds for one in found.values()] == [4.0, 2.0, 4.0, 4.0, 4.0]
    assert found["prodigy-cosine"].schedule_seconds == 2.0
    assert found["adamw-default"].lr == 1e-3


def test_a_schedule_free_peer_is_evaluated_at_its_average():
    pytest.importorskip("pytorch_optimizer")
    state = WorkloadRun(ALONE, configure("norms", "schedule-free", 0))
    state.take(3)
    there = [p.detach().clone() for p in state.model.parameters()]
    with state._averaged():
        pairs = list(zip(state.model.parameters(), there, strict=True))
        away = max(float((p - q).detach().abs().max()) for p, q in pairs)
    assert away > 1e-4
    for parameter, before in zip(state.model.parameters(), there, strict=True):
        torch.testing.assert_close(parameter, before)


def test_what_there_is_not():
    for arguments in (["nothing"], ["--optimizers", "adamw,sgd"], ["--optimizers", "soap"]):
        assert CliRunner().invoke(app, arguments).exit_code != 0
