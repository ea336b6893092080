"""Solves in the background: from copies, in a thread, put to use at their step and no other."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe import Preconditioner, TrustRegion
from soframe.comm import SingleProcess
from soframe.settings import grouped
from soframe.solvers import Eigen, Inverse, Lazy
from tests import kit
from tests.background import (
    EVERY,
    STEPS,
    Gated,
    Waits,
    in_use,
    still,
    under_way,
    wait_until_solved,
)
from tests.distributed.training import Run, make_net, same, snapshot


class Late(Eigen):
    """Takes another time at every solve."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        time.sleep(2e-3 * float(torch.rand(())) ** 2)
        return super().solve(matrix, damping)


# -- what is put to use, and when ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["inverse", "orthogonal-iteration"])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("after", [1, 3, 6, "ready"])
@pytest.mark.covering(together=2)
def test_data_are_those_of_so_many_steps_ago(runs, solver, stagger, after):
    """Factors, damping, last data and all; of the last turn, where that is due again before."""
    common = {"solver": solver, "stagger": stagger, "damping": lambda step: 0.02 * 1.3**step}
    plain = still(runs(**common))
    own = still(runs(Waits() if after == "ready" else None, background=after, **common))
    history = []
    lag = 1 if after == "ready" else min(after, EVERY)
    for step in range(STEPS):
        plain.step(step)
        history.append(in_use(plain))
        own.step(step)
        assert same(in_use(own), history[max(0, step - lag)]), step
    if stagger is False:
        assert not same(history[0], history[EVERY])
        assert same(history[0], history[EVERY - 1])


SOLVERS: dict[str, dict[str, Any]] = {
    "eigen": {"solver": Late()},
    "inverse": {"solver": "inverse", "stagger": True},
    "follows": {"solver": Eigen(follows=True), "stagger": True},
    "lazy": {"solver": Lazy(Eigen(follows=True), tolerance=0.3)},
    "warm": {"solver": "orthogonal-iteration", "stagger": True},
    "relative": {"solver": "inverse", "damping": "relative"},
    "newton-schulz": {"solver": "newton-schulz"},
}


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.covering(together=1)
def test_the_thread_changes_no_bit(runs, name, after):
    options = {"background": after, "solve_every": 3, **SOLVERS[name]}
    own, twin, plain = runs(**options), runs(Waits(), **options), runs(**SOLVERS[name])
    for step in range(STEPS):
        for run in (own, twin, plain):
            run.step(step)
        assert torch.equal(own.weights(), twin.weights()), step
        assert same(snapshot(own.preconditioner), snapshot(twin.preconditioner)), step
    assert own.preconditioner.counters == twin.preconditioner.counters
    assert not torch.equal(own.weights(), plain.weights())


def train_wide(backend: SingleProcess) -> Tensor:
    """Layers wide enough for several threads to share a factorisation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 300), nn.Tanh(), nn.Linear(300, 4))
    options = {"statistics_every": 1, "solve_every": 3, "background": 2, "kl_clip": None}
    own = Preconditioner(model, **grouped({"backend": backend, **options}))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return model(torch.randn(64, 256, generator=generator)).square().mean()

    weights = kit.train(model, loss, range(6), own, sgd)
    own.close()
    return weights


@pytest.mark.slow
def test_two_threads_change_no_bit():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(train_wide(SingleProcess()), train_wide(Waits()))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("after", "statistics_every"), [(2, 1), (3, 3)])
def test_eigenvalues_follow_what_has_landed(runs, after, statistics_every):
    """They are those of the factors of now, in the eigenvectors of the landed solve."""
    options = {"background": after, "statistics_every": statistics_every}
    own = still(runs(solver=Eigen(follows=True), **options))
    for step in range(9):
        own.step(step)
        for block in own.preconditioner.blocks:
            for factor, data in block.second_order.items():
                matrix, vectors = block.running[factor], data["vectors"]
                expected = (vectors * (matrix @ vectors)).sum(-2)
                torch.testing.assert_close(data["values"], expected, rtol=1e-10, atol=1e-12)


def test_a_solve_sees_neither_gradients_nor_autocast_nor_the_first_factors(runs):
    solver = Gated()
    solver.gate.set()
    own = runs(background=1, solver=solver)
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        own.train(range(EVERY + 2))
    factors = 2 * 4  # of the layers that are used
    first, rest = solver.seen[:factors], solver.seen[factors:]
    assert [one["beside"] for one in first] == [False] * factors
    assert rest == [{"beside": True, "gradients": False, "autocast": False}] * factors


def test_a_bad_batch_costs_its_update_alone(runs):
    """At the step that begins a solve, and at the one where it lands."""

    def spoil(run: Run) -> None:
        run.model.head.weight.grad.fill_(float("nan"))

    plain, own = still(runs()), still(runs(background=2))
    history = []
    for step in range(STEPS):
        between = spoil if step in (EVERY, EVERY + 2) else None
        plain.step(step, between)
        history.append(in_use(plain))
        own.step(step, between)
        assert same(in_use(own), history[max(0, step - 2)]), step
    assert own.preconditioner.counters["skipped_updates"] == 2


# -- ready -----------------------------------------------------------------------------------------


def test_ready_is_when_all_are_solved_and_not_before(runs):
    solver = Gated()
    own = still(runs(background="ready", solver=solver))
    own.train(range(EVERY + 1))
    before = in_use(own)
    for step in (EVERY + 1, EVERY + 2):
        own.step(step)
        assert same(in_use(own), before)
    solver.gate.set()
    wait_until_solved(own)
    assert same(in_use(own), before)
    own.step(EVERY + 3)
    assert not same(in_use(own), before)
    assert under_way(own) == 0


def test_what_is_due_again_lands_first(runs):
    solver = Gated()
    own, plain = still(runs(background="ready", solver=solver)), still(runs(solver="inverse"))
    history = []
    for step in range(2 * EVERY):
        own.step(step)
        plain.step(step)
        history.append(in_use(plain))
    threading.Timer(0.1, solver.gate.set).start()
    own.step(2 * EVERY)
    assert same(in_use(own), history[EVERY])


# -- what fails ------------------------------------------------------------------------------------


def test_a_factor_that_cannot_be_solved_keeps_its_data(runs, caplog):
    solver = Gated(error=torch.linalg.LinAlgError("not this one"))
    solver.gate.set()
    own = still(runs(background=2, solver=solver))
    own.step(0)
    before = in_use(own)
    with caplog.at_level(logging.WARNING, "soframe"):
        own.train(range(1, EVERY + 2))
        assert own.preconditioner.counters["failed_solves"] == 0
        own.step(EVERY + 2)
    assert own.preconditioner.counters["failed_solves"] == 8
    assert same(in_use(own), before)
    assert "head: factor A cannot be solved" in caplog.text


def test_what_a_solver_raises_is_raised_where_it_lands(runs):
    solver = Gated(error=KeyError("not this one"))
    solver.gate.set()
    own = runs(background=2, solver=solver)
    own.train(range(EVERY + 2))
    with pytest.raises(KeyError, match="not this one"):
        own.step(EVERY + 2)


@dataclass(frozen=True)
class Warns(Inverse):
    """Warns at every solve."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        warnings.warn("take care", RuntimeWarning, stacklevel=1)
        return super().solve(matrix, damping)


def test_warnings_are_not_lost(runs):
    own = runs(background=1, solver=Warns())
    with pytest.warns(RuntimeWarning, match="take care"):
        own.step(0)
    own.train(range(1, EVERY))
    with pytest.warns(RuntimeWarning, match="take care"):
        own.train(range(EVERY, EVERY + 2))


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), ("soon", ValueError), (1.5, TypeError), (True, TypeError)],
)
def test_values_that_are_none(value, error):
    with pytest.raises(error, match=r"background must be 0 .*, a positive number of steps"):
        Preconditioner(make_net(), kl_clip=None, background=value)


@pytest.mark.parametrize("value", [3, "ready"])
def test_a_trust_region_solves_in_the_step(value):
    with pytest.raises(ValueError, match="TrustRegion needs background=0"):
        TrustRegion(make_net(), loss="mse", background=value)
    TrustRegion(make_net(), loss="mse", background=0).close()
