"""Diagonal factors ``[groups, n]``: solved and applied as the matrices that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.solvers import (
    Basis,
    Eigen,
    Inverse,
    NewtonSchulz,
    OrthogonalIteration,
    Problem,
    Relative,
    Solver,
    retry,
    solve_stack,
    solve_stacks,
)
from soframe.solvers.base import mean_trace
from soframe.solvers.scaled import Rooted
from soframe.testing import compare
from tests.curvature import randn

SOLVERS: list[Solver] = [
    Eigen(),
    OrthogonalIteration(),
    Inverse(),
    Inverse(split="full"),
    NewtonSchulz(),
    Relative(Eigen()),
    Relative(Inverse()),
    Rooted(Eigen()),
]
SIDES = ["left", "right", "both"]


def diagonal(n: int, seed: int = 0) -> Tensor:
    """Return positive numbers ``[2, n]`` on both sides of one."""
    return 0.2 + 3 * torch.rand(2, n, generator=torch.Generator().manual_seed(seed)).double()


def applied(solver: Solver, gradient: Tensor, left: Tensor, right: Tensor) -> Tensor:
    shares = solver.shares([mean_trace(right), mean_trace(left)], 0.1)
    data_right = solver.solve(right, shares[0])
    data_left = solver.solve(left, shares[1])
    return solver.apply(gradient, left=data_left, right=data_right, damping=0.1)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_a_diagonal_is_the_matrix_with_it(solver: Solver, sides: str) -> None:
    left, right, gradient = diagonal(3), diagonal(4, seed=1), randn(2, 3, 4)
    expected = applied(solver, gradient, torch.diag_embed(left), torch.diag_embed(right))
    kept = gradient.clone()
    found = applied(
        solver,
        gradient,
        torch.diag_embed(left) if sides == "right" else left,
        torch.diag_embed(right) if sides == "left" else right,
    )
    compare(found, expected, sides)
    assert torch.equal(gradient, kept)


def test_a_solver_around_another_declares_what_that_takes() -> None:
    assert all(solver.diagonals for solver in SOLVERS)
    for around in (Relative, Rooted):
        assert not around(Basis()).diagonals
        assert [around(kind()).damps_factors for kind in (Eigen, Inverse)] == [False, True]
        assert [around(Eigen(follows=follows)).follows for follows in (True, False)] == [
            True,
            False,
        ]
        assert [around(kind()).continues for kind in (Eigen, NewtonSchulz)] == [False, True]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_a_diagonal_without_a_left_factor(solver: Solver) -> None:
    right, gradient = diagonal(4), randn(2, 3, 4)
    (share,) = solver.shares([mean_trace(right)], 0.1)
    found = []
    for matrix in (right, torch.diag_embed(right)):
        data = solver.solve(matrix, share)
        found.append(solver.apply_right(gradient, right=data, damping=0.1))
    compare(*found, "with the identity on the left")


@pytest.mark.parametrize("solver", [Eigen(), Inverse(split="full"), Relative(Eigen())], ids=repr)
def test_the_identity_is_solved_where_a_solver_has_no_shorter_way(solver: Solver) -> None:
    """What is written once, `Solver.apply_right`, is what each solver's own comes to."""
    right, gradient = torch.diag_embed(diagonal(4)), randn(2, 3, 4)
    (share,) = solver.shares([mean_trace(right)], 0.1)
    data = solver.solve(right, share)
    if isinstance(solver, Relative):
        # The identity has the mean trace one.
        assert torch.equal(data["mean_trace"], mean_trace(right))
    own = solver.apply_right(gradient, right=data, damping=0.1)
    compare(Solver.apply_right(solver, gradient, right=data, damping=0.1), own, "by the identity")


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_rounding_below_zero_is_no_curvature(solver: Solver) -> None:
    below, zero = diagonal(4), diagonal(4)
    below[0, 2], zero[0, 2] = -1e-17, 0.0
    found = []
    for right in (below, zero):
        data = solver.solve(right, solver.shares([mean_trace(right)], 0.1)[0])
        found.append(solver.apply_right(randn(2, 3, 4), right=data, damping=0.1))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_diagonals_follow() -> None:
    solver, now = Eigen(follows=True), diagonal(4)
    now[1, 3] = -1e-9
    data = solver.solve(diagonal(4, seed=3), torch.zeros(2).double())
    followed = solver.follow(now, data)
    assert followed is not None
    assert followed.keys() == {"values"}
    assert torch.equal(followed["values"], now.clamp(min=0))
    assert Eigen().follow(now, data) is None
    # Solved again, they are new.
    again = OrthogonalIteration().solve_again(now, torch.zeros(2).double(), data)
    assert torch.equal(again["values"], now.clamp(min=0))
    inverse = NewtonSchulz().solve_again(now, torch.ones(2).double(), {})
    assert torch.equal(inverse["inverse"], 1 / (now.clamp(min=0) + 1))


@pytest.mark.parametrize("dim", [1, 2])
def test_an_inverse_with_a_zero_on_its_diagonal_has_underflowed(dim: int) -> None:
    numbers = torch.tensor([[1.0, 0.5, 2.0], [1.0, 0.0, 2.0], [1e-30, 1.0, 1.0], [0.0, 1.0, 1.0]])
    inverse = numbers if dim == 1 else torch.diag_embed(numbers) + 0.0
    usable: Any = Inverse().usable({"inverse": inverse})
    assert usable.tolist() == [True, False, True, False]


class Failing(Inverse):
    """Fails where a group has a large number, in float32 alone or in any dtype."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        largest = 1e6 if matrix.dtype == torch.float64 else 1e3
        if bool((matrix > largest).any()):
            raise torch.linalg.LinAlgError(f"more than {largest:g}")
        return super().solve(matrix, damping)


@pytest.mark.parametrize("as_matrices", [False, True])
def test_a_failure_is_that_of_its_group(as_matrices: bool) -> None:
    numbers = torch.tensor([[1.0, 2.0], [1e4, 1.0], [1.0, 1e8], [3.0, 4.0]])
    matrices = torch.diag_embed(numbers) if as_matrices else numbers
    damping = torch.full((4,), 0.5)
    data, good = solve_stack(Failing(), matrices, damping)
    assert good.tolist() == [True, False, False, True]
    data, reasons = retry(Failing(), matrices, damping, data, [1, 2])
    assert reasons == {2: "more than 1e+06"}
    inverse = data["inverse"].diagonal(dim1=1, dim2=2) if as_matrices else data["inverse"]
    torch.testing.assert_close(inverse[[0, 1, 3]], 1 / (numbers[[0, 1, 3]] + 0.5))
    assert data["inverse"].dtype == torch.float32


class Half(Eigen):
    """Has no values of the second group, but vectors."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        data = super().solve(matrix, damping)
        data["values"][-1] = torch.nan
        return data


def test_data_that_are_not_finite_in_part_are_not_finite() -> None:
    matrices, damping = torch.diag_embed(diagonal(3)), torch.ones(2).double()
    data, good = solve_stack(Half(), matrices, damping)
    assert good.tolist() == [True, False]
    _, reasons = retry(Half(), matrices, damping, data, [1])
    assert reasons == {1: "the result is not finite: the damped factor is not positive-definite"}


def test_problems_that_differ_are_solved_apart() -> None:
    """By size, dtype, solver, and the data that they continue from."""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = []

    class Counted(Inverse):
        def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
            shapes.append((tuple(matrix.shape), matrix.dtype))
            return super().solve(matrix, damping)

    def problem(matrix: Tensor, solver: Solver, **last: Tensor) -> Problem:
        return Problem(solver, matrix, torch.ones(2, dtype=matrix.dtype), last)

    one, other = Counted(), Counted(split="full")
    single = diagonal(3).float()
    problems = [
        problem(diagonal(3), one),
        problem(single, one),
        problem(diagonal(3, seed=1), one),
        problem(torch.diag_embed(single), one),
        problem(single, other),
        problem(single, one, inverse=single),
        problem(single, one, inverse=single),
        problem(diagonal(4).float(), one),
        Problem(one, single, torch.ones(2, dtype=torch.float64)),
    ]
    found = solve_stacks(problems)
    vector, half = ((2, 3), torch.float32), torch.float32
    assert shapes == [
        ((4, 3), torch.float64),
        vector,
        ((2, 3, 3), half),
        vector,
        ((4, 3), half),
        ((2, 4), half),
        vector,
    ]
    for (data, good), solved in zip(found, problems, strict=True):
        assert good.tolist() == [True, True]
        alone, _ = solve_stack(solved.solver, solved.matrices, solved.damping)
        compare(data["inverse"], alone["inverse"], "apart")
