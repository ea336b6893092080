"""Many factors at once: as one by one, without a wait, and a failure is that of its group alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from soframe.kernels import devices
from soframe.solvers import (
    Eigen,
    Inverse,
    Lazy,
    NewtonSchulz,
    OrthogonalIteration,
    Problem,
    Relative,
    Root,
    Solver,
    retry,
    solve_stack,
    solve_stacks,
)
from soframe.testing import compare
from tests.curvature import randn
from tests.solvers.dense import SOLVERS, damped, solve_safely, spectrum

CONDITIONS = (1.0, 1e-3, 1e-6, 1e-9, 1e-12, 0.0)
HALVES = (slice(0, 2), slice(2, None))
ALL = {**SOLVERS, "lazy": Lazy(Inverse()), "relative": Relative(Eigen()), "root": Root()}


def stack(n: int) -> Tensor:
    """One group for each condition, ``[6, n, n]``, of scales that differ."""
    groups = [10.0**i * spectrum(1, n, c, seed=i) for i, c in enumerate(CONDITIONS)]
    return torch.cat(groups)


def shares(n: int = len(CONDITIONS)) -> Tensor:
    return torch.logspace(-3, 1, n, dtype=torch.float64)


class Waits(TorchFunctionMode):
    """Refuses calls that wait for the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in ("__bool__", "__float__", "__int__", "item", "tolist", "nonzero"), name
        assert name not in ("cpu", "numpy", "cholesky"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ALL)
def test_a_stack_is_its_groups(name: str) -> None:
    solver, matrices, damping = ALL[name], stack(7), shares()
    data, good = solve_stack(solver, matrices, damping)
    assert good.tolist() == [True] * len(CONDITIONS)
    for group in range(len(CONDITIONS)):
        one = slice(group, group + 1)
        alone, retried = solve_safely(solver, matrices[one], damping[one])
        assert not retried
        for key, tensor in data.items():
            compare(tensor[one], alone[key], f"{key} of group {group}", rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_stack_agrees_with_the_dense_solve(name: str) -> None:
    """Over ill-conditioned spectra; each group with a damping of its own."""
    solver, g, a, damping = SOLVERS[name], stack(3), stack(4).flip(0), shares()
    traces = [m.diagonal(dim1=1, dim2=2).mean(-1) for m in (a, g)]
    right_shares, left_shares = solver.shares(traces, damping)
    (right, one), (left, other) = (
        solve_stack(solver, a, right_shares),
        solve_stack(solver, g, left_shares),
    )
    assert bool((one & other).all())
    gradient = randn(len(CONDITIONS), 3, 4, seed=2)
    for group, value in enumerate(damping.tolist()):
        part = slice(group, group + 1)
        found = solver.apply(
            gradient[part],
            left={key: tensor[part] for key, tensor in left.items()},
            right={key: tensor[part] for key, tensor in right.items()},
            damping=value,
        )
        matrix = damped(name, g[group], a[group], value)
        expected = torch.linalg.solve(matrix, gradient[group].flatten()).view(3, 4)
        tolerance = max(1e-10, 1e-13 * float(torch.linalg.cond(matrix)))
        compare(found[0], expected, f"group {group}", rtol=tolerance)


@pytest.mark.parametrize("name", ["eigen", "inverse, pi", "inverse, full", "relative", "root"])
def test_nothing_waits(name: str) -> None:
    solver, matrices = ALL[name], stack(5)
    with Waits():
        traces = [matrices.diagonal(dim1=1, dim2=2).mean(-1)] * 2
        solve_stack(solver, matrices, solver.shares(traces, 0.1)[0])


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverses_of_an_accelerator(
    dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor's, symmetric to the last bit; NaN where a group is not positive definite."""
    matrices, damping = stack(7).to(dtype), shares().to(dtype)
    (plain,) = Inverse().solve(matrices, damping).values()
    lower = torch.where(torch.ones(7, 7).tril() > 0, matrices, torch.nan)
    lower[3] = -torch.eye(7)
    monkeypatch.setattr(devices, "on_gpu", lambda _: True)
    monkeypatch.setattr(devices, "fast_double", lambda _: fast)
    monkeypatch.setattr(devices, "MOST", 3 * 49)  # batches of three
    (found,) = Inverse().solve(lower, damping.where(torch.arange(6) != 3, 0)).values()
    good = [0, 1, 2, 4, 5]
    compare(found[good], plain[good], "inverses", rtol=1e-3 if dtype == torch.float32 else 1e-9)
    assert torch.equal(found[good], found[good].mT)
    assert found.dtype == dtype
    assert found[3].isnan().all()


class Picky(Inverse):
    """Raises where a group is of another scale."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.dtype == torch.float32 and bool((matrix.diagonal(dim1=1, dim2=2) > 1e3).any()):
            raise torch.linalg.LinAlgError("too large")
        return super().solve(matrix, damping)


@pytest.mark.parametrize("solver", [Inverse(), Eigen(), NewtonSchulz(), Picky()], ids=repr)
def test_a_failure_is_that_of_its_group(solver: Solver) -> None:
    """One is indefinite, one has NaNs, one fails in float32 alone if the solver is picky."""
    matrices = torch.stack([torch.eye(4), -torch.eye(4), torch.eye(4), 1e4 * torch.eye(4)])
    matrices[2, 3, 1] = torch.nan
    damping = torch.full((4,), 1e-2)
    data, good = solve_stack(solver, matrices, damping)
    bad = [group for group, ok in enumerate(good.tolist()) if not ok]
    indefinite = [] if isinstance(solver, Eigen) else [1]  # negative eigenvalues are rounding
    assert bad == [*indefinite, 2, *([3] if isinstance(solver, Picky) else [])]
    whole, reasons = retry(solver, matrices, damping, data, bad)
    assert list(reasons) == [*indefinite, 2]
    assert all("finite" in why or "converge" in why for why in reasons.values())
    for group in (0, 3):
        one = slice(group, group + 1)
        alone, _ = solve_safely(solver, matrices[one], damping[one])
        for key, tensor in whole.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor[one], alone[key]), (group, key)


def test_a_share_that_is_no_number_is_a_failure() -> None:
    damping = torch.tensor([0.1, torch.nan])
    matrices = torch.eye(3).repeat(2, 1, 1)
    data, good = solve_stack(Eigen(), matrices, damping)
    assert good.tolist() == [True, False]
    _, reasons = retry(Eigen(), matrices, damping, data, [1])
    assert "beyond torch.float32" in reasons[1]


def test_usable_may_be_one_answer_or_one_for_each_group() -> None:
    class Tiny(Inverse):
        def usable(self, data: Any) -> bool:  # type: ignore[override]
            return float(data["inverse"].diagonal(dim1=1, dim2=2).amin()) > 1e-3

    matrices = torch.stack([torch.eye(3), 1e6 * torch.eye(3)])
    _, good = solve_stack(Tiny(), matrices, torch.ones(2))
    assert good.tolist() == [True, False]


@pytest.mark.parametrize("solver", [OrthogonalIteration(), Lazy(Inverse()), NewtonSchulz()])
def test_again_group_by_group(solver: Solver) -> None:
    """One has hardly changed, the other is another matrix."""
    before, damping = spectrum(2, 6, 1e-2), torch.full((2,), 0.1, dtype=torch.float64)
    now = before.clone()
    now[1] = spectrum(1, 6, 1e-2, seed=9)[0]
    last, _ = solve_stack(solver, before, damping)
    data, good = solve_stack(solver, now, damping, last)
    assert bool(good.all())
    for group in range(2):
        one = slice(group, group + 1)
        own = {key: tensor[one] for key, tensor in last.items()}
        alone, _ = solve_safely(solver, now[one], damping[one], own)
        for key, tensor in data.items():
            compare(tensor[one], alone[key], f"{key} of group {group}", rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_stacks_of_one_size_are_solved_together(name: str) -> None:
    problems = [
        Problem(ALL[name], part, damping)
        for size in (3, 7)
        for part, damping in zip(stack(size).split([2, 4]), shares().split([2, 4]), strict=True)
    ]
    alone = [solve_stack(one.solver, one.matrices, one.damping) for one in problems]
    for (data, good), (own, own_good) in zip(solve_stacks(problems), alone, strict=True):
        assert good.tolist() == own_good.tolist()
        for key, tensor in own.items():
            compare(data[key], tensor, key)
            assert data[key].untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_each_size_takes_one_call() -> None:
    sizes: list[tuple[int, ...]] = []

    class Counted(Inverse):
        def solve(self, matrices: Tensor, *arguments: Any) -> dict[str, Tensor]:
            sizes.append(tuple(matrices.shape))
            return super().solve(matrices, *arguments)

    solver = Counted()
    matrices = [torch.eye(size).expand(groups, -1, -1) for size, groups in ((3, 2), (5, 1), (3, 4))]
    solve_stacks([Problem(solver, matrix, torch.ones(len(matrix))) for matrix in matrices])
    assert sizes == [(6, 3, 3), (1, 5, 5)]


def test_stacks_continue_from_their_own_bases() -> None:
    solver, matrices, damping = OrthogonalIteration(), stack(7), shares()
    first, _ = solve_stack(solver, matrices, damping)
    halves = [{name: tensor[part] for name, tensor in first.items()} for part in HALVES]
    problems = [
        Problem(solver, matrices[part] * 1.01, damping[part], last)
        for part, last in zip(HALVES, halves, strict=True)
    ]
    for problem, (data, _) in zip(problems, solve_stacks(problems), strict=True):
        own, _ = solve_stack(solver, problem.matrices, problem.damping, problem.last)
        for name, tensor in own.items():
            compare(data[name], tensor, name)
