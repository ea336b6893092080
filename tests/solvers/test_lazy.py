"""Factors that have hardly changed are not solved again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.solvers import Eigen, Inverse, OrthogonalIteration, Relative, Solver
from soframe.solvers.lazy import Lazy, sketch
from soframe.specs import FactorSpec
from soframe.testing import check_solver, compare
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, train_alone, train_cases
from tests.examples import examples
from tests.solvers.dense import spectrum

INNER = [Eigen(), Inverse(), OrthogonalIteration()]


@pytest.mark.slow
@pytest.mark.parametrize("solver", INNER, ids=repr)
def test_it_is_the_solver_within(solver: Solver) -> None:
    check_solver(Lazy(solver))


@given(groups=st.integers(1, 3), n=st.integers(1, 40), size=st.floats(1e-3, 1))
@settings(max_examples=examples(30))
def test_the_sketch_measures_the_change(groups: int, n: int, size: float) -> None:
    before = spectrum(groups, n, 1e-3)
    change = size * (spectrum(groups, n, 1e-1, seed=1) - before)
    exact = torch.linalg.matrix_norm(change) / torch.linalg.matrix_norm(before)
    after = before + change
    upper = 99 * torch.ones(n, n).double().triu(1)
    moved = torch.linalg.matrix_norm(sketch(after.tril() + upper) - sketch(before))
    ratio = moved / torch.linalg.matrix_norm(sketch(before)) / exact.clamp(min=1e-300)
    # One entry is measured exactly; else eight vectors are wrong by a factor of three at most.
    assert bool(((ratio > 1 / 3) & (ratio < 3) | (exact < 1e-12)).all()), ratio
    mean = torch.linalg.matrix_norm(sketch(torch.eye(400).double()[None])) / 400**0.5
    compare(mean / 8**0.5, torch.ones(1).double(), "norm", rtol=0.05)


@pytest.mark.parametrize("solver", INNER, ids=repr)
@pytest.mark.parametrize(("size", "kept"), [(0.0, True), (1e-3, True), (0.5, False)])
def test_what_has_changed_is_solved(solver: Solver, size: float, kept: bool) -> None:
    lazy, damping = Lazy(solver, tolerance=0.05), torch.full((2,), 0.1).double()
    before = spectrum(2, 9, 1e-3)
    now = before.clone()
    now[1] = (1 - size) * before[1] + size * spectrum(2, 9, 1e-3, seed=4)[1]  # one group
    last = lazy.solve(before, damping)
    data = lazy.solve_again(now, damping, last)
    assert all(torch.equal(data[name], last[name]) for name in last) == kept
    assert all(torch.equal(data[name][0], last[name][0]) for name in last), "it has not changed"
    if not kept:
        expected = solver.solve_again(now, damping, last)
        for name in expected:
            compare(data[name][1], expected[name][1], name, rtol=1e-12)
        assert torch.equal(data["sketch"][1], sketch(now)[1])


@pytest.mark.parametrize(("solver", "kept"), [(Eigen(), True), (Inverse(), False)], ids=repr)
def test_another_damping_matters_to_those_that_damp_factors(solver: Solver, kept: bool) -> None:
    lazy, matrix, damping = Lazy(solver), spectrum(1, 5, 1e-3), torch.full((1,), 0.1).double()
    last = lazy.solve(matrix, damping)
    data = lazy.solve_again(matrix, 2 * damping, last)
    assert all(torch.equal(data[name], last[name]) for name in last) == kept


def test_slow_changes_add_up() -> None:
    """What is compared is the factor of the last solve, not that of the last look."""
    lazy, damping = Lazy(Eigen(), tolerance=0.1), torch.full((1,), 0.1).double()
    factor = spectrum(1, 8, 1e-2)
    data, solves = lazy.solve(factor, damping), 0
    for _ in range(20):
        factor = 1.02 * factor
        again = lazy.solve_again(factor, damping, data)
        solves += not torch.equal(again["values"], data["values"])
        data = again
    assert 2 <= solves <= 5


def test_a_factor_of_a_wide_range_has_not_changed() -> None:
    """The ratio of its entries is beyond float32, and no number is divided by the least of them."""
    Counting.solves.clear()
    lazy, matrix = Lazy(Counting()), torch.diag(torch.tensor([1e20, 1.0, 1e-20]))[None]
    last = lazy.solve(matrix, torch.ones(1))
    lazy.solve_again(matrix.clone(), torch.ones(1), last)
    assert len(Counting.solves) == 1


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_tolerance_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match="tolerance must not be negative"):
        Lazy(Eigen(), value)


# -- through the preconditioner ------------------------------------------------------------------


@dataclass(frozen=True)
class Counting(Eigen):
    """Counts its solves."""

    solves: ClassVar[list[int]] = []

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        self.solves.append(len(matrix))
        return super().solve(matrix, damping)


def test_constant_factors_are_solved_once() -> None:
    Counting.solves.clear()
    every = {"statistics_every": 100, "solve_every": 2}
    run = Run(Case({"solver": Lazy(Counting()), **every})).train(range(6))
    assert len(Counting.solves) == 8  # four blocks are used
    assert torch.equal(run.weights(), train_alone(Case({"solver": "eigen", **every}, steps=6)))


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_are_one_process() -> None:
    options = {"solver": Lazy(Eigen(), tolerance=0.4), "solve_every": 1}
    alone = train_alone(Case(options, steps=6))
    assert not torch.allclose(alone, train_alone(Case({"solve_every": 1}, steps=6)))
    cases = [Case({"strategy": name, **options}, steps=6) for name in ("comm-opt", "mem-opt")]
    for own in run_ranks(train_cases, 3, cases):
        for weights in own:
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("around", [Lazy, Relative])
def test_the_inner_solver_may_be_a_name_or_a_class(around: type[Lazy | Relative]) -> None:
    assert around("inverse") == around(Inverse) == around(Inverse())
    with pytest.raises(ValueError, match="no solver 'nothing'; registered"):
        around("nothing")
    with pytest.raises(TypeError, match="a solver is a name"):
        around(3)


class Picky(Inverse):
    """Refuses all factors."""

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        return "not these"


def test_what_the_inner_solver_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot solve the factors of .*: not these"):
        soframe.Preconditioner(nn.Linear(3, 2), solver=Lazy(Picky()), kl_clip=None)
