"""Solvers that start from the last solve, and data that follow between solves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from soframe.solvers import (
    Eigen,
    Inverse,
    NewtonSchulz,
    OrthogonalIteration,
    Relative,
    Solver,
    newton_schulz,
)
from soframe.solvers.newton_schulz import invert
from soframe.testing import compare
from soframe.trust_region import RelativeDamping
from tests import kit
from tests.curvature import blocks, closing, fill, preconditioner, randn
from tests.examples import examples
from tests.solvers.dense import solve_safely, spectrum

SPECTRA = st.sampled_from([1.0, 1e-2, 1e-4, 1e-8, 0.0])
WARM = [
    OrthogonalIteration(),
    NewtonSchulz(),
    Relative(OrthogonalIteration()),
    Relative(NewtonSchulz()),
]


def off_diagonal(vectors: Tensor, matrix: Tensor) -> Tensor:
    """The norm of what a basis leaves off the diagonal, ``[groups]``."""
    rotated = vectors.mT @ matrix @ vectors
    return torch.linalg.matrix_norm(rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)))


def moved(matrix: Tensor, size: float, seed: int = 5) -> Tensor:
    """The factor after further statistics, which have another basis."""
    return (1 - size) * matrix + size * spectrum(*matrix.shape[:2], 1e-3, seed=seed)


def full(damping: float, groups: int) -> Tensor:
    return torch.full((groups,), damping, dtype=torch.float64)


def applied(solver: Solver, data: dict[str, Tensor], damping: float) -> Tensor:
    """The inverse that the data stand for, ``[groups, n, n]``."""
    groups, n = data.get("values", data.get("inverse", torch.empty(0))).shape[:2]
    eye = torch.eye(n, dtype=torch.float64).repeat(groups, 1, 1)
    return solver.apply_right(eye, right=data, damping=damping)


@given(groups=st.integers(1, 3), n=st.integers(1, 12), smallest=SPECTRA)
@settings(max_examples=examples(20))
@pytest.mark.parametrize("solver", WARM, ids=repr)
def test_solving_the_same_factor_again_changes_nothing(
    solver: Solver, groups: int, n: int, smallest: float
) -> None:
    matrix, damping = spectrum(groups, n, smallest), full(0.01, groups)
    first = solver.solve(matrix, damping)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    second = solver.solve_again(matrix, damping, first)
    assert all(torch.equal(first[name], kept[name]) for name in kept)
    compare(applied(solver, second, 0.01), applied(solver, first, 0.01), "again", rtol=1e-9)


@given(
    groups=st.integers(1, 2),
    n=st.integers(2, 10),
    smallest=SPECTRA,
    size=st.sampled_from([1e-3, 0.05, 0.5]),
)
@settings(max_examples=examples(25))
def test_the_inverse_is_that_of_the_factor_as_it_is_now(
    groups: int, n: int, smallest: float, size: float
) -> None:
    solver, before = NewtonSchulz(), spectrum(groups, n, smallest)
    last, now = solver.solve(before, full(0.2, groups)), moved(before, size)
    damping = full(0.01, groups)  # another one than at the last solve
    found = solver.solve_again(now, damping, last)["inverse"]
    expected = torch.linalg.inv(now + 0.01 * torch.eye(n, dtype=torch.float64))
    compare(found, expected, "inverse", rtol=1e-10)
    assert torch.equal(found, found.mT)


@given(groups=st.integers(1, 3), n=st.integers(2, 10), seed=st.integers(0, 9))
@settings(max_examples=examples(20))
def test_iterations_find_the_eigenvectors(groups: int, n: int, seed: int) -> None:
    before = spectrum(groups, n, 1e-4, seed=seed)
    now, damping = moved(before, 0.02, seed=seed + 20), full(0.0, groups)
    last = OrthogonalIteration().solve(before, damping)
    stale = last["vectors"]
    left = [off_diagonal(stale, now)]
    for iterations in (1, 400):
        data = OrthogonalIteration(iterations, tolerance=10.0).solve_again(now, damping, last)
        vectors, values = data["vectors"], data["values"]
        compare(vectors.mT @ vectors, torch.eye(n).double().repeat(groups, 1, 1), "orthogonal")
        assert bool((values.diff(dim=-1) <= 0).all()), "not descending"
        compare(values, (vectors.mT @ now @ vectors).diagonal(dim1=-2, dim2=-1), "values")
        left.append(off_diagonal(vectors, now))
    assert bool((left[-1] <= 1e-2 * left[0] + 1e-9).all()), left


def test_too_large_a_change_is_an_eigendecomposition(monkeypatch: Any) -> None:
    before, now, damping = spectrum(1, 6, 1e-3), spectrum(1, 6, 1e-3, seed=9), full(0.0, 1)
    last = OrthogonalIteration().solve(before, damping)
    again = OrthogonalIteration().solve_again(now, damping, last)
    compare(again["values"].flip(-1), torch.linalg.eigvalsh(now), "values", rtol=1e-12)
    near = moved(before, 0.01)
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("no need of it"))
    OrthogonalIteration().solve_again(near, damping, last)


# -- Newton-Schulz ----------------------------------------------------------------------------


class Counting(TorchFunctionMode):
    """Counts products."""

    def __init__(self) -> None:
        self.products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += getattr(func, "__name__", "") in ("matmul", "__matmul__")
        return func(*args, **(kwargs or {}))


def test_a_warm_start_takes_fewer_products() -> None:
    before, damping = spectrum(1, 12, 1e-5), full(1e-4, 1)
    now, counts = moved(before, 1e-5), []
    last = NewtonSchulz().solve(before, damping)
    for start in ({}, last):
        with Counting() as counting:
            solve_safely(NewtonSchulz(), now, damping, start)
        counts.append(counting.products)
    assert 0 < 3 * counts[1] <= counts[0]


def test_autocast_rounds_no_product() -> None:
    matrix = spectrum(1, 5, 1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        data = NewtonSchulz().solve(matrix.float(), torch.full((1,), 0.1))
    expected = torch.linalg.inv(matrix + 0.1 * torch.eye(5).double())
    compare(data["inverse"].double(), expected, "inverse", rtol=1e-5)


@pytest.mark.parametrize("damping", [1.0, 1e-2, 1e-5, 1e-7])
def test_float32_is_as_exact_as_cholesky(damping: float, monkeypatch: Any) -> None:
    """Where it is not, Cholesky has done it: always from a condition number of 1e5 on."""
    matrix, share = spectrum(2, 10, 1e-8).float(), torch.full((2,), damping)
    exact = torch.linalg.inv(matrix.double() + damping * torch.eye(10))
    errors = []
    for solver in (Inverse(), NewtonSchulz()):
        found = solver.solve(matrix, share)["inverse"].double()
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] <= 4 * errors[0] + 1e-3 * min(1.0, 1e-3 / damping)
    calls = []
    real = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: (calls.append(1), real(m))[1])
    NewtonSchulz().solve(matrix, share)
    assert len(calls) == {1.0: 0, 1e-2: 0, 1e-5: 1, 1e-7: 1}[damping]


def test_a_start_that_does_not_converge_is_left() -> None:
    matrix = spectrum(1, 4, 1e-2)
    assert not invert(matrix, 100 * torch.eye(4).double()[None], 40)[1].any()
    assert not invert(matrix, 0.1 * torch.eye(4).double()[None], 3)[1].any()
    bad = {"inverse": 100 * torch.eye(4).double()[None]}
    found = NewtonSchulz().solve_again(matrix, full(0.1, 1), bad)["inverse"]
    compare(found, torch.linalg.inv(matrix + 0.1 * torch.eye(4).double()), "inverse", rtol=1e-10)


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_each_iteration_squares_what_is_left(iterations: int) -> None:
    """Of a number, from a half of its inverse; the last step comes in addition."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    found, _ = invert(one, 0.5 * one, iterations)
    assert found.item() == pytest.approx(1 - 0.5**2 ** (iterations + 1), rel=1e-15)


@pytest.mark.parametrize(("start", "iterations"), [(0.5, 6), (100.0, 3), (1.0, 3)])
def test_every_third_iteration_looks_at_what_is_left(
    start: float, iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five squarings a half is no more visible; what grows is left at once."""
    products: list[int] = []
    multiply = newton_schulz.multiply
    monkeypatch.setattr(
        newton_schulz, "multiply", lambda *both: products.append(1) or multiply(*both)
    )
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    _, converged = invert(one, start * one, 40)
    assert len(products) == 1 + 2 * iterations + 1
    assert converged.tolist() == [start <= 1]


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
@pytest.mark.parametrize("solver", [OrthogonalIteration, NewtonSchulz])
def test_some_iterations_there_must_be(solver: Any, value: float) -> None:
    with pytest.raises(ValueError, match=r"iterations must be (at least 1|an integer)"):
        solver(iterations=value)


# -- following ----------------------------------------------------------------------------------


@given(groups=st.integers(1, 3), n=st.integers(1, 8), smallest=SPECTRA, size=st.floats(0, 0.9))
@settings(max_examples=examples(25))
def test_eigenvalues_that_follow_are_the_best_of_the_basis(
    groups: int, n: int, smallest: float, size: float
) -> None:
    """No other diagonal leaves less of the factor; right after a solve nothing changes."""
    solver, before = Eigen(follows=True), spectrum(groups, n, smallest)
    data = solver.solve(before, full(0.0, groups))
    compare(solver.follow(before, data)["values"], data["values"], "at once", rtol=1e-10)
    now = moved(before, size)
    lower = now.tril() + 99 * torch.ones(n, n).double().triu(1)
    vectors, values = data["vectors"], solver.follow(lower, data)["values"]

    def left(values: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(now - vectors * values.unsqueeze(-2) @ vectors.mT)

    compare(left(values), off_diagonal(vectors, now), "what is left", rtol=1e-7)
    assert bool((left(values) <= left(data["values"]) + 1e-12).all())


def test_eigenvalues_that_follow_are_not_negative() -> None:
    """Rounding may make them so; the damping would be less than was asked for."""
    matrix = torch.diag(torch.tensor([-1e-9, 2.0], dtype=torch.float64))[None]
    vectors = torch.eye(2, dtype=torch.float64)[None]
    values = Eigen(follows=True).follow(matrix, {"vectors": vectors})["values"]
    assert values.tolist() == [[0.0, 2.0]]


def test_following_a_factor_that_shrinks() -> None:
    """As gradients do: the error of the preconditioned gradient falls."""
    before = spectrum(1, 8, 1e-4)
    now = 0.1 * moved(before, 0.01)
    for solver in (Eigen(follows=True), Relative(Eigen(follows=True))):
        data = solver.solve(before, full(0.0, 1))
        damping = 0.01 if isinstance(solver, Eigen) else 0.1
        exact = applied(solver, solver.solve(now, full(0.0, 1)), damping)
        errors = [
            float((applied(solver, own, damping) - exact).norm() / exact.norm())
            for own in (data, {**data, **solver.follow(now, data)})
        ]
        assert 5 * errors[1] < errors[0]


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(randn(6, 4, seed=step)).square().sum(1).mean()


@pytest.mark.parametrize("damping", [0.1, RelativeDamping(0.1)], ids=["absolute", "relative"])
def test_data_follow_after_statistics(damping: Any) -> None:
    model = fill(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    every = {"statistics_every": 2, "solve_every": 5, "decay": 0.5, "damping": damping}
    with closing(preconditioner(model, solver=Eigen(follows=True), **every)) as own:
        for step in range(5):
            before = {b.name: dict(b.second_order["A"]) for b in own.blocks if b.solved}
            kit.train(model, loss_of, [step], own)
            for name, block in blocks(own).items():
                data, factor = block.second_order["A"], block.running["A"]
                scale = data.get("mean_trace", torch.ones(1).double())
                rotated = data["vectors"].mT @ factor @ data["vectors"]
                diagonal = rotated.diagonal(dim1=-2, dim2=-1) / scale
                compare(data["values"], diagonal, f"step {step}, {name}", rtol=1e-9, atol=1e-12)
                if step:
                    assert torch.equal(data["vectors"], before[name]["vectors"])
                    same = torch.equal(data["values"], before[name]["values"])
                    assert same == (step % 2 == 1)
