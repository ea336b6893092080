"""Times of a solve and of preconditioning, per solver and size, in float32.

The factor is made of 2n samples, its damping is a hundredth of its mean eigenvalue. A solve that is
*again* starts from the result for the factor before one further statistics step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from soframe.solvers import Eigen, Inverse, NewtonSchulz, OrthogonalIteration, Solver

SOLVERS: dict[str, Solver] = {
    "inverse": Inverse(split="full"),
    "eigen": Eigen(),
    "orthogonal-iteration": OrthogonalIteration(),
    "newton-schulz": NewtonSchulz(split="full"),
}
AGAIN = ("orthogonal-iteration", "newton-schulz")
SIZES = (65, 289, 577, 1025)
DAMPING = torch.full((1,), 1e-2)


@cache
def factor(n: int, steps: int) -> Tensor:
    """A running factor of mean eigenvalue one, with a falling spectrum, after so many steps."""
    scales = torch.logspace(0, -2, n)
    total = torch.zeros(1, n, n)
    for step in range(steps):
        rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(step)) * scales
        total = 0.95 * total + 0.05 * (rows.mT @ rows)
    return total * n / total.diagonal(dim1=-2, dim2=-1).sum()


@cache
def solved(name: str, n: int, steps: int) -> Mapping[str, Tensor]:
    return SOLVERS[name].solve(factor(n, steps), DAMPING)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", SOLVERS)
def bench_solve(benchmark: BenchmarkFixture, name: str, n: int) -> None:
    benchmark.pedantic(SOLVERS[name].solve, (factor(n, 20), DAMPING), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", AGAIN)
def bench_solve_again(benchmark: BenchmarkFixture, name: str, n: int) -> None:
    last = solved(name, n, 20)
    arguments = (factor(n, 21), DAMPING, last)
    benchmark.pedantic(SOLVERS[name].solve_again, arguments, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("n", SIZES)
def bench_follow(benchmark: BenchmarkFixture, n: int) -> None:
    arguments = (factor(n, 21), solved("eigen", n, 20))
    benchmark.pedantic(Eigen(follows=True).follow, arguments, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["inverse", "eigen"])
def bench_apply(benchmark: BenchmarkFixture, name: str, n: int) -> None:
    """Both factors of size n, as of a square layer; the others apply one of these ways."""
    data, gradient = solved(name, n, 20), torch.ones(1, n, n)
    options = {"left": data, "right": data, "damping": 1e-2}
    benchmark.pedantic(
        SOLVERS[name].apply, (gradient,), options, rounds=5, iterations=3, warmup_rounds=1
    )
