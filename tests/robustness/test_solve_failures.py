"""A factorisation that fails is retried in float64, and then the last good data stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe import Preconditioner, Solver
from soframe.solvers import Eigen, Inverse
from soframe.specs import FactorSpec, TensorSpec
from soframe.testing import dense_preconditioned
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over, same, snapshot
from tests.solvers.dense import SolveFailedError, solve_safely

ROUTINES = {"eigen": "eigh", "inverse": "cholesky_ex"}


def failing(
    real: Callable[..., Any], how: str, dtypes: tuple[torch.dtype, ...]
) -> Callable[..., Any]:
    """A routine that fails in some dtypes."""

    def routine(matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
        if matrix.dtype in dtypes:
            if how == "raises":
                raise torch.linalg.LinAlgError("it did not converge")
            result = real(matrix, *args, **kwargs)
            if isinstance(result, Tensor):
                return result * float("nan")
            return [part * float("nan") for part in result]
        return real(matrix, *args, **kwargs)

    return routine


def small(solver: str, **options: Any) -> tuple[nn.Module, Preconditioner]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    options = {"solve_every": 1, "kl_clip": None, **options}
    return model, Preconditioner(model, solver=solver, **{"statistics_every": 1, **options})


def pass_backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().sum(1).mean().backward()


@pytest.mark.parametrize("solver", ROUTINES)
@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_a_failure_in_float32_is_retried_in_float64(solver, how, monkeypatch):
    good_model, good = small(solver)
    pass_backward(good_model, 0)
    good.step()
    model, preconditioner = small(solver)
    pass_backward(model, 0)
    name = ROUTINES[solver]
    real = getattr(torch.linalg, name)
    monkeypatch.setattr(torch.linalg, name, failing(real, how, (torch.float32,)))
    preconditioner.step()
    assert preconditioner.counters == {
        "skipped_updates": 0,
        "skipped_statistics": 0,
        "retried_solves": 4,
        "failed_solves": 0,
    }
    assert all(t.dtype == torch.float32 for t in snapshot(preconditioner).values())
    for one, other in zip(model.parameters(), good_model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("solver", ROUTINES)
@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_a_failure_in_float64_too_keeps_the_last_good_data(solver, how, monkeypatch, caplog):
    model, preconditioner = small(solver)
    pass_backward(model, 0)
    preconditioner.step()
    before = {k: t for k, t in snapshot(preconditioner).items() if k.count(".") == 2}
    pass_backward(model, 1)
    raw = [p.grad.clone() for p in model.parameters()]
    name = ROUTINES[solver]
    both = (torch.float32, torch.float64)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "soframe"):
        patch.setattr(torch.linalg, name, failing(getattr(torch.linalg, name), how, both))
        preconditioner.step()
    after = {k: t for k, t in snapshot(preconditioner).items() if k.count(".") == 2}
    assert same(before, after)
    assert preconditioner.counters["failed_solves"] == 4
    assert preconditioner.counters["retried_solves"] == 0
    assert preconditioner.state_dict()["counters"]["failed_solves"] == 4
    assert "0: factor A cannot be solved" in caplog.text
    # The old data precondition this step's gradient.
    assert not any(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True))
    pass_backward(model, 2)
    preconditioner.step()
    assert preconditioner.counters["failed_solves"] == 4
    assert not same(after, snapshot(preconditioner))


class Picky(Eigen):
    """Fails on factors of one size."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.shape[-1] == 5:
            raise torch.linalg.LinAlgError("not this one")
        return super().solve(matrix, damping)


def test_a_block_that_was_never_solved_keeps_its_raw_gradient():
    model, preconditioner = small(Picky())  # the first layer's A is 5 x 5
    pass_backward(model, 0)
    raw = [p.grad.clone() for p in model.parameters()]
    preconditioner.step()
    untouched = [torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True)]
    assert untouched == [True, True, False, False]
    assert preconditioner.counters["failed_solves"] == 1


def test_a_failure_is_logged_once_and_counted(caplog):
    model, preconditioner = small(Picky())
    with caplog.at_level(logging.WARNING, "soframe"):
        for step in range(4):
            pass_backward(model, step)
            preconditioner.step()
    assert caplog.text.count("cannot be solved") == 1
    assert "0: factor A cannot be solved (not this one); the block keeps" in caplog.text
    assert preconditioner.counters["failed_solves"] == 4
    notes = {row.block: row.note for row in preconditioner.report()}
    assert notes == {"0": "failed solves: A 4x", "2": ""}


class Later(Inverse):
    """Fails on factors of one size once it is told to."""

    bad = False

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if self.bad and matrix.shape[-1] == 3:
            raise torch.linalg.LinAlgError("not this one")
        return super().solve(matrix, damping)


@pytest.mark.parametrize("background", [0, 1])
def test_a_block_is_solved_whole_or_keeps_what_it_had(background, monkeypatch):
    """A's share of the damping belongs to that of G: they are of the same solve."""
    model, preconditioner = small(Later(), background=background)
    found = []
    for step in range(4):
        monkeypatch.setattr(Later, "bad", step > 0)  # G of the first layer is 3 x 3
        pass_backward(model, step)
        preconditioner.step()
        found.append({k: t for k, t in snapshot(preconditioner).items() if k.count(".") == 2})
    first = [{k: t for k, t in data.items() if k.startswith("0.")} for data in found]
    assert same(first[0], first[-1])
    assert not same(found[0], found[-1])
    assert preconditioner.counters["failed_solves"] > 0


class Small(Inverse):
    """Fails on large factors."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.diagonal(dim1=-2, dim2=-1).max() > 100:
            raise torch.linalg.LinAlgError("too large")
        return super().solve(matrix, damping)


def test_the_other_block_of_a_stack_gets_its_data():
    found = []
    for solver in (Small(), Inverse()):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        own = Preconditioner(model, solver=solver, kl_clip=None, statistics_every=1)
        model(torch.linspace(-90, 90, 24).view(8, 3).double()).square().sum(1).mean().backward()
        own.step()
        first, last = own.blocks
        assert first.stack is last.stack
        assert (first.solved, last.solved) == (type(solver) is Inverse, True)
        data = snapshot(own)
        found.append({k: t for k, t in data.items() if k.startswith("2.") and k.count(".") == 2})
    one, other = found
    assert one.keys() == other.keys() != set()
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor)


class Moody(Solver):
    """Fails where it is told to; else as Eigen."""

    bad = False

    def __repr__(self) -> str:
        return "Moody()"

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return Eigen().tensors(factor)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if self.bad:
            raise torch.linalg.LinAlgError("not here")
        return Eigen().solve(matrix, damping)

    def apply(self, gradient: Tensor, **keywords: Any) -> Tensor:
        return Eigen().apply(gradient, **keywords)


SINCE = (0, 1)


def fail_on_one_rank(rank: int, ranks: int, strategies: list[str]) -> list[Any]:
    results = []
    for strategy in strategies:
        for since in SINCE:
            solver = Moody()
            case = Case({"strategy": strategy, "solver": solver, "solve_every": 1}, steps=4)
            run = Run(case, rank, ranks, average=mean_over())
            for step in range(case.steps):
                solver.bad = rank == 1 and step >= since
                run.step(step)
            saved = run.preconditioner.state_dict()
            solved = [b.name for b in run.preconditioner.blocks if b.solved]
            results.append((run.weights(), saved["counters"], solved))
    return results


@pytest.mark.distributed
def test_a_failure_on_one_rank_is_known_to_all():
    strategies = ["comm-opt", "mem-opt", "hybrid-opt", "sharded"]
    results = run_ranks(fail_on_one_rank, 2, strategies)
    for number, (first, second) in enumerate(zip(*results, strict=True)):
        assert torch.equal(first[0], second[0])
        assert first[1] == second[1]
        assert first[1]["failed_solves"] > 0
        assert first[2] == second[2]
        from_the_start = SINCE[number % 2] == 0
        assert len(first[2]) < 4 if from_the_start else len(first[2]) == 4


# -- float32 and ill-conditioned ----------------------------------------------------------------


def ill_conditioned(n: int, decades: int) -> Tensor:
    basis = torch.linalg.qr(torch.randn(2, n, n, dtype=torch.float64))[0]
    values = torch.logspace(0, -decades, n, dtype=torch.float64)
    return (basis * values) @ basis.mT


@pytest.mark.parametrize("solver", [Eigen(), Inverse(), Inverse("full")], ids=repr)
@pytest.mark.parametrize("decades", [4, 8, 12])
def test_ill_conditioned_factors_in_float32(solver, decades):
    a, g = ill_conditioned(6, decades), ill_conditioned(4, decades)
    v, damping = torch.randn(2, 4, 6, dtype=torch.float64), 1e-3
    found = {}
    for dtype in (torch.float32, torch.float64):
        traces = [m.to(dtype).diagonal(dim1=1, dim2=2).mean(-1) for m in (a, g)]
        shares = solver.shares(traces, damping)
        right, _ = solve_safely(solver, a.to(dtype), shares[0])
        left, _ = solve_safely(solver, g.to(dtype), shares[1])
        found[dtype] = solver.apply(v.to(dtype), left=left, right=right, damping=damping)
    exact = found[torch.float64]
    if isinstance(solver, Eigen):
        dense = [dense_preconditioned(torch.kron(g[i], a[i]), v[i], damping) for i in range(2)]
        torch.testing.assert_close(exact, torch.stack(dense), rtol=1e-7, atol=1e-7)
    error = (found[torch.float32] - exact).norm() / exact.norm()
    assert error < 2e-3


def test_an_indefinite_factor_beyond_rounding_fails_loudly():
    matrix = torch.diag(torch.tensor([1.0, -1.0])).unsqueeze(0)
    with pytest.raises(SolveFailedError):
        solve_safely(Inverse(), matrix, torch.tensor([1e-3]))
