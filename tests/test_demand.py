"""Solves on demand: no step solves, and `Curvature.solve` does at once, on all ranks."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from tests.curvature import fill, preconditioner, randn
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.training import Case, Run, mean_over

DAMPING = 0.3


def data(step: int) -> tuple[Tensor, Tensor]:
    return randn(6, 3, seed=step), randn(6, 2, seed=step + 50)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1).mean() / 2


def gradient_of(model: nn.Module, step: int) -> Tensor:
    """Leave the gradients of a step in the model, and return the one of its weight."""
    x, y = data(step)
    model.zero_grad()
    mean_loss(model(x), y).backward()
    gradient = model.get_parameter("weight").grad
    assert gradient is not None
    return gradient


def dense(model: nn.Module, steps: int) -> Tensor:
    """Return K-FAC's damped matrix of plain means over the batches so far."""
    x, y = (torch.cat(parts) for parts in zip(*map(data, range(steps)), strict=True))
    errors = (model(x) - y).detach()  # each sample's gradient of the outputs
    matrix = torch.kron(errors.T @ errors, x.T @ x) / len(x) ** 2
    return matrix + DAMPING * torch.eye(len(matrix), dtype=matrix.dtype)


def follower(model: nn.Module, **settings: Any) -> soframe.Preconditioner:
    """Return a preconditioner that follows plain means and solves on demand."""
    return preconditioner(
        model,
        solver="eigen",
        damping=DAMPING,
        decay="mean",
        statistics_every=1,
        solve_every="demand",
        **settings,
    )


def test_updates_are_of_the_means_at_the_last_demand() -> None:
    model = fill(nn.Linear(3, 2, bias=False))
    own = follower(model)
    for step in range(3):
        plain = gradient_of(model, step).clone()
        own.step()
        assert torch.equal(gradient_of_now(model), plain)  # nothing is solved yet
    with pytest.raises(RuntimeError, match=r"no curvature yet of Linear: .* solve\(\) it"):
        own.curvature.trace()
    for steps in (3, 5):
        own.curvature.solve()
        matrix = dense(model, steps)
        trace = matrix.trace() - DAMPING * len(matrix)
        for step in (steps, steps + 1):
            plain = gradient_of(model, step).clone()
            own.step()
            wanted = torch.linalg.solve(matrix, plain.flatten()).view_as(plain)
            torch.testing.assert_close(gradient_of_now(model), wanted, rtol=1e-9, atol=1e-12)
            assert own.curvature.trace() == pytest.approx(float(trace), rel=1e-9)
    assert own.metrics()["blocks"]["Linear"]["factors"]["A"]["solve_age"] == 2
    own.close()


def gradient_of_now(model: nn.Module) -> Tensor:
    gradient = model.get_parameter("weight").grad
    assert gradient is not None
    return gradient


def test_products_after_a_demand_are_of_its_averages() -> None:
    model = fill(nn.Linear(3, 2, bias=False))
    own = follower(model)
    gradient_of(model, 0)
    own.step()
    own.curvature.solve()
    first = own.curvature.trace()
    gradient_of(model, 1)
    own.step()
    assert own.curvature.trace() == first
    own.curvature.solve()  # without a step in between
    assert own.curvature.trace() != first
    own.close()


def test_the_scale_of_ekfac_begins_anew_at_a_demand() -> None:
    model = fill(nn.Linear(3, 2, bias=False))
    own = follower(model, method="ekfac")
    (block,) = own.blocks
    for step in range(4):
        gradient_of(model, step)
        own.step()
        assert ("S" in block.record.masses) == (step in (2,))
        if step != 1:
            own.curvature.solve()
    own.close()


def test_an_optimizer_solves_on_demand() -> None:
    model = fill(nn.Linear(3, 2, bias=False))
    own = soframe.Optimizer(
        model,
        "kfac",
        solver="eigen",
        lr=0.1,
        damping=DAMPING,
        decay="mean",
        kl_clip=None,
        statistics_every=1,
        solve_every="demand",
    )
    before, plain = model.weight.detach().clone(), gradient_of(model, 0).clone()
    start = copy.deepcopy(model)
    own.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * plain)
    own.preconditioner.curvature.solve()
    before, plain = model.weight.detach().clone(), gradient_of(model, 1).clone()
    own.step()
    update = torch.linalg.solve(dense(start, 1), plain.flatten()).view_as(plain)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * update)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solve_every": "on demand"}, r"a callable of the step that .*, or 'demand', not 'on d"),
        ({"solve_every": "demand", "background": 2}, "Leave them out, or pass a number"),
        ({"solve_every": "demand", "stagger": True}, "Leave them out, or pass a number"),
        ({"statistics_every": "demand"}, "statistics_every must be a positive integer"),
    ],
)
def test_settings_that_do_not_go_with_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preconditioner(fill(nn.Linear(3, 2)), **settings)


def test_a_demand_without_statistics_is_an_error() -> None:
    model = fill(nn.Linear(3, 2))
    own = follower(model)
    with pytest.raises(RuntimeError, match="call it after a step that has taken some"):
        own.curvature.solve()
    own.close()
    with pytest.raises(RuntimeError, match=re.escape("fit() solves a curvature of data")):
        soframe.Curvature(model).solve()
    with pytest.raises(ValueError, match="TrustRegion needs solve_every= a number"):
        soframe.TrustRegion(model, "squared-error", solve_every="demand")


# -- ranks and states ------------------------------------------------------------------------------

SHARDS = {1: ((4, 8),), 2: ((4, 2), (6,)), 4: ((2, 1), (3,), (1, 1, 1), (3,))}
DEMANDS = (1, 4)
STEPS = 6


def case_of(strategy: str, ranks: int) -> Case:
    options = {
        "strategy": strategy,
        "solver": "eigen",
        "decay": "mean",
        "solve_every": "demand",
    }
    return Case(options, shards=SHARDS[ranks], loss_average="global")


def run_of(rank: int, ranks: int, strategy: str) -> Run:
    average = mean_over() if ranks > 1 else None
    return Run(case_of(strategy, ranks), rank, ranks, average=average)


def go_on(run: Run, steps: range) -> Tensor:
    for step in steps:
        run.step(step)
        if step in DEMANDS:
            run.preconditioner.curvature.solve()
    return run.weights()


def halfway(rank: int, ranks: int, strategy: str, at: int) -> Any:
    run = run_of(rank, ranks, strategy)
    go_on(run, range(at))
    states = run.preconditioner.state_dict(), run.model.state_dict()
    return copy.deepcopy(states), go_on(run, range(at, STEPS))


def resumed(rank: int, ranks: int, strategy: str, at: int, states: Any) -> Tensor:
    run = run_of(rank, ranks, strategy)
    state, weights = states
    run.model.load_state_dict(weights)
    run.preconditioner.load_state_dict(state)
    return go_on(run, range(at, STEPS))


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded"])
@pytest.mark.parametrize(
    ("first", "then", "at"),
    [
        (2, 1, 1),  # before the first demand
        (2, 4, 3),
        pytest.param(4, 2, 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.covering(together=1)
def test_ranks_solve_together_and_others_go_on(
    strategy: str, first: int, then: int, at: int
) -> None:
    _, wanted = halfway(0, 1, "comm-opt", at)
    results = run_ranks(halfway, first, strategy, at)
    for _, weights in results:
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-9)
    for weights in run_ranks(resumed, then, strategy, at, results[0][0]):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-9)


def differs(rank: int, ranks: int) -> None:
    preconditioner(fill(nn.Linear(3, 2)), solve_every="demand" if rank else 7, statistics_every=1)


@pytest.mark.distributed
def test_ranks_that_differ_are_told_so() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(differs, 2)
    for failure in raised.value.failures:
        assert "solve_every" in str(failure)
