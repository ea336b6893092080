"""One block explained: the numbers of each rank in the last window, its factors, its update."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import soframe
from tests.curvature import closing, randn
from tests.distributed.harness import run_ranks


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def passes(model: nn.Module, sizes: list[int]) -> None:
    model.zero_grad()
    for seed, size in enumerate(sizes):
        (model(randn(size, 3, seed=seed)).square().sum(1).mean() / len(sizes)).backward()


def test_the_last_window_by_its_numbers() -> None:
    model = model_of()
    own = soframe.Preconditioner(model, statistics_every=1, damping=0.5)
    with closing(own):
        own.measure(norms=True)
        passes(model, [2])
        own.step()
        passes(model, [3, 5])
        gradient = torch.cat([model[0].weight.grad, model[0].bias.grad.unsqueeze(1)], 1).norm()
        own.step()
        found = own.explain("0")
        factor = own.blocks[0].running["A"][0]
    (rank,) = found.ranks
    named = {key: rank[key] for key in ("step", "calls", "passes", "samples", "rows")}
    assert named == {"step": 1, "calls": 2, "passes": 2, "samples": 8, "rows": 8}
    assert rank["contributes to"] == rank["holds"] == rank["solves"] == ["A", "G"]
    assert rank["makes the update"]
    a, g = found.factors["A"], found.factors["G"]
    assert (a["degree"], a["mean over"], g["degree"], g["mean over"]) == (0, "samples", 2, "rows")
    # The mean of two passes of a half each: the sums of both count as one mean.
    assert (a["multiplier"], a["divisor"]) == (0.5, 1.0)
    assert g["multiplier"] == 2.0
    assert a["trace"] == pytest.approx(float(factor.trace()), rel=1e-9)
    assert found.block["damping"] == 0.5
    assert found.update["gradient_norm"] == pytest.approx(float(gradient), rel=1e-9)
    assert found.update["updates"] == 2
    assert found.reasons == []
    assert json.loads(json.dumps(found.as_dict()))["name"] == "0"
    assert "factor G" in str(found)


def test_each_factor_has_the_divisor_of_its_mean() -> None:
    """Of a convolution with six positions: means over samples, and over rows."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(18, 1)).double()
    own = soframe.Preconditioner(model, statistics_every=1)
    with closing(own):
        model(randn(5, 2, 3, 4)).square().mean().backward()
        own.step()
        found = own.explain("0")
    assert found.ranks[0]["rows"] == 5 * 6
    assert (found.factors["A"]["divisor"], found.factors["G"]["divisor"]) == (1.0, 6.0)


def test_what_a_block_lacks_has_a_reason() -> None:
    model = model_of()
    own = soframe.Preconditioner(model)
    with closing(own):
        found = own.explain("2")
    text = " ".join(found.reasons)
    assert "no window that takes them has ended" in text
    assert "no second-order data yet" in text
    assert "measure(norms=True)" in text
    own = soframe.Preconditioner(model, statistics_every=1)
    with closing(own):
        model[0](randn(3, 3)).square().mean().backward()
        own.step()
        found = own.explain("2")
    assert found.reasons[0].startswith("In the window of step 0 no rank called its layers")


def test_a_block_that_does_not_exist_is_named_with_the_others() -> None:
    own = soframe.Preconditioner(model_of())
    with closing(own), pytest.raises(ValueError, match="no block is named '1'; there are 0, 2"):
        own.explain("1")


def on_ranks(rank: int, ranks: int) -> dict[str, Any]:
    model = model_of()
    gradients = soframe.Distribution(gradients="local")
    own = soframe.Preconditioner(
        model, strategy="mem-opt", statistics_every=1, distribution=gradients
    )
    passes(model, [2] if rank == 0 else [3, 4])
    own.step()
    return own.explain("0", all_ranks=True).as_dict()


@pytest.mark.distributed
def test_every_rank_has_a_row() -> None:
    first, second = run_ranks(on_ranks, 2)
    assert [row["rank"] for row in first["ranks"]] == [0, 1]
    assert [row["samples"] for row in first["ranks"]] == [2, 7]
    assert [row["passes"] for row in first["ranks"]] == [1, 2]
    assert first["ranks"] == second["ranks"]
    # Each factor has one owner.
    solvers = [row["solves"] for row in first["ranks"]]
    assert sorted(solvers[0] + solvers[1]) == ["A", "G"]
    assert first["factors"]["A"]["divisor"] == 2.0  # a weight of one for each rank


@pytest.mark.parametrize(
    ("method", "solver", "damping"), [("soap", "Basis", None), ("kfac", "Inverse", 0.5)]
)
def test_a_block_has_the_solver_and_the_damping_that_it_reads(
    method: str, solver: str, damping: float | None
) -> None:
    model = model_of()
    methods = {"^0$": method, "": "kfac"}
    own = soframe.Preconditioner(model, methods, damping=0.5, statistics_every=1)
    with closing(own):
        passes(model, [3])
        own.step()
        found = own.explain("0.weight" if method == "soap" else "0")
    contributes = ["A", "G"] if method == "kfac" else []  # of gradients no rank has a part
    assert found.ranks[0]["contributes to"] == contributes
    assert found.block["solver"].startswith(solver)
    assert found.block["damping"] == damping
