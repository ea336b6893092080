"""`soframe.checkpoint.Whole` lets torch.distributed.checkpoint save a state in one entry."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import soframe
from soframe.checkpoint import PlainPlanner, PlainReader, Whole
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over
from tests.state.test_plain_metadata import Calls
from tests.state.test_resume import equal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

CASE = Case({"statistics_every": 2, "solve_every": 3, "strategy": "mem-opt"})
AT, STEPS = 4, 7


def state_of(run: Run) -> dict[str, Any]:
    return {"model": run.model, "own": Whole(run.preconditioner)}


def save(rank: int, ranks: int, folder: Path) -> Tensor:
    run = Run(CASE, rank, ranks, None, mean_over())
    for step in range(STEPS):
        if step == AT:
            dcp.save(state_of(run), checkpoint_id=folder)
        run.step(step)
    return run.weights()


@pytest.mark.distributed
def test_what_two_ranks_saved_goes_on_alone(tmp_path: Path) -> None:
    expected, _ = run_ranks(save, 2, tmp_path)
    for plain in (False, True):
        run = Run(CASE)
        how: dict[str, Any] = {"checkpoint_id": tmp_path}
        if plain:
            how = {"storage_reader": PlainReader(tmp_path), "planner": PlainPlanner()}
        dcp.load(state_of(run), no_dist=True, **how)
        run.train(range(AT, STEPS))
        torch.testing.assert_close(run.weights(), expected, rtol=0, atol=1e-10)


MAKE = {
    "optimizer": lambda model: soframe.Optimizer(model, "soap-muon", lr=0.1),
    "trust region": lambda model: soframe.TrustRegion(model, "squared-error"),
    "stochastic": soframe.StochasticTrustRegion,
}


@pytest.mark.parametrize("kind", MAKE)
def test_every_optimizer_can_be_given_to_it(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[Any, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return MAKE[kind](model), model

    (trained, model), (again, _) = make(), make()
    x = torch.ones(4, 3, dtype=torch.float64)

    def loss() -> Tensor:
        value = 0.5 * model(x).square().sum(1).mean()
        if kind == "optimizer":
            model.zero_grad()
            value.backward()
        return value

    for _ in range(2):
        trained.step(loss)
    dcp.save({"optimizer": Whole(trained)}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"optimizer": Whole(again)}, checkpoint_id=tmp_path, no_dist=True)
    if kind == "optimizer":  # its state is in bytes, which depend on how tensors are stored
        assert again.param_groups[0]["lr"] == trained.param_groups[0]["lr"]
        again, trained = again.preconditioner, trained.preconditioner
    assert equal(again.state_dict(), trained.state_dict())


def test_nothing_that_is_saved_is_called() -> None:
    file = io.BytesIO()
    torch.save(Calls(pytest.fail, "called"), file)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        Whole(nn.Linear(1, 1)).load_state_dict({"whole": file.getvalue()})
