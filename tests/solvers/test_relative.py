"""Damping relative to each block's mean eigenvalue, against the dense solve with that damping."""

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.losses import SquaredError
from soframe.solvers import Inverse, Relative
from soframe.solvers.base import mean_trace
from soframe.testing import compare, dense_preconditioned
from soframe.trust_region import ConstantDamping, LevenbergMarquardt, RelativeDamping
from tests import kit
from tests.curvature import (
    blocks,
    closing,
    factors,
    fill,
    gradient_matrix,
    half_square,
    preconditioner,
    randn,
)
from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.solvers.dense import SOLVERS, damped, run, spectrum
from tests.test_fisher import observe
from tests.trust_region.kit import deep


@given(
    groups=st.integers(1, 3),
    out=st.integers(1, 4),
    into=st.integers(1, 4),
    relative=st.sampled_from([3.0, 0.1, 1e-4]),
    scales=st.tuples(st.sampled_from([1e-6, 1.0, 1e3]), st.sampled_from([1e-3, 1.0, 1e6])),
)
@settings(max_examples=examples(10))
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_with_the_damping_of_each_group(
    name: str, groups: int, out: int, into: int, relative: float, scales: tuple[float, float]
) -> None:
    g = scales[0] * spectrum(groups, out, 1e-2)
    a = scales[1] * spectrum(groups, into, 1e-2, seed=1)
    g *= torch.arange(1, groups + 1)[:, None, None]  # no two groups alike
    gradient = randn(groups, out, into, seed=2)
    result = run(Relative(SOLVERS[name]), gradient, g, a, relative)
    for group in range(groups):
        mean_eigenvalue = float(torch.linalg.eigvalsh(torch.kron(g[group], a[group])).mean())
        matrix = damped(name, g[group], a[group], relative * mean_eigenvalue)
        expected = dense_preconditioned(matrix, gradient[group], 0.0)
        compare(result[group], expected, f"{name}, group {group}", rtol=1e-9)


@pytest.mark.parametrize("name", SOLVERS)
def test_without_a_left_factor(name: str) -> None:
    solver, a = Relative(SOLVERS[name]), 1e-3 * spectrum(2, 4, 1e-2)
    a[1] *= 50
    gradient = randn(2, 3, 4)
    data = solver.solve(a, solver.shares([mean_trace(a)], 0.1)[0])
    result = solver.apply_right(gradient, right=data, damping=0.1)
    for group in range(2):
        damping = 0.1 * float(a[group].trace()) / 4
        expected = dense_preconditioned(
            torch.kron(torch.eye(3).double(), a[group]), gradient[group], damping
        )
        compare(result[group], expected, f"{name}, group {group}")


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("zero", ["A", "G", "both"])
def test_a_block_without_curvature_gets_no_step(name: str, zero: str) -> None:
    g, a = spectrum(2, 3, 1e-2), spectrum(2, 2, 0.0, seed=1)
    if zero != "A":
        g[0] = 0
    if zero != "G":
        a[0] = 0
    result = run(Relative(SOLVERS[name]), randn(2, 3, 2), g, a, 0.1)
    assert torch.equal(result[0], torch.zeros(3, 2).double())
    matrix = damped(name, g[1], a[1], 0.1 * float(g[1].trace() * a[1].trace()) / 6)
    compare(result[1], dense_preconditioned(matrix, randn(2, 3, 2)[1], 0.0), "the other group")


# -- through the preconditioner --------------------------------------------------------------


@pytest.mark.parametrize("value", [0.2, lambda step: 0.2 + step])
def test_each_block_has_its_own_damping(value: Any) -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4), nn.Linear(4, 2)))
    policy = RelativeDamping(value)
    own = preconditioner(model, damping=policy, fisher="type-2", loss=SquaredError())
    with closing(own):
        for step in range(2):
            model.zero_grad()
            observe(model, own, [(randn(5, 3, seed=step), randn(5, 2, seed=9))], half_square)
            raw = {name: gradient_matrix(block).clone() for name, block in blocks(own).items()}
            own.step()
            for name, block in blocks(own).items():
                a, g = (factor[0] for factor in factors(own, name))
                fisher = torch.kron(g, a)
                damping = policy.at(step) * float(fisher.trace()) / len(fisher)
                expected = dense_preconditioned(fisher, raw[name][0], damping)
                compare(gradient_matrix(block)[0], expected, f"step {step}, {name}")
        assert "kfac / eigen, relative damping" in str(own.report())


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_the_step_is_that_of_any_multiple_of_the_loss(solver: str, scale: float) -> None:
    results = []
    for factor in (1.0, scale):
        model = fill(deep())
        loss = SquaredError(factor)
        settings = {"damping": "relative", "solver": solver, "fisher": "type-2", "loss": loss}
        with closing(preconditioner(model, **settings)) as own:
            batch = (randn(5, 3), randn(5, 3, seed=1))
            observe(model, own, [batch], lambda f, y, c=factor: c * half_square(f, y))
            own.step()
            results.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        compare(other, one, "step", rtol=1e-8)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return half_square(model(randn(4, 3, seed=step)), randn(4, 3, seed=50))


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_resuming_between_solves(solver: str) -> None:
    settings = {"damping": RelativeDamping(0.3), "solver": solver, "solve_every": 4}
    found = []
    for stop in (None, 2):
        model = fill(deep())
        own = preconditioner(model, **settings)
        if stop:
            kit.train(model, loss_of, range(stop), own)
            file = io.BytesIO()
            torch.save(own.state_dict(), file)
            file.seek(0)
            own.close()
            own = preconditioner(model, **settings)
            own.load_state_dict(torch.load(file, weights_only=True))
        kit.train(model, loss_of, range(stop or 0, 4), own)
        found.append(kit.gradients(model))
        own.close()
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_another_policy_solves_anew() -> None:
    found = []
    for first in (1e-3, RelativeDamping(0.3)):
        model = fill(deep())
        settings = {"solve_every": 4, "statistics_every": 4}
        with closing(preconditioner(model, damping=first, **settings)) as own:
            kit.train(model, loss_of, range(1), own)
            saved = own.state_dict()
        with closing(preconditioner(model, damping=RelativeDamping(0.3), **settings)) as own:
            own.load_state_dict(saved)
            kit.train(model, loss_of, range(1, 2), own)
            found.append(kit.gradients(model))
    for one, other in zip(*found, strict=True):
        compare(one, other, "gradient")


def on_rank(rank: int, ranks: int, strategy: str, solver: Any) -> Tensor:
    model = fill(nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3)))
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"damping": "relative", "solver": solver, "strategy": strategy, "solve_every": 2}
    rows = slice(rank * 6 // ranks, (rank + 1) * 6 // ranks)

    def loss(_: nn.Module, step: int) -> Tensor:
        return half_square(wrapped(randn(6, 2, 3, 3, seed=step)[rows]), randn(6, 3, seed=9)[rows])

    with closing(preconditioner(model, **settings)) as own:
        return kit.train(model, loss, range(3), own, optimizer)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "hybrid-opt"])
@pytest.mark.parametrize(("solver", "ranks"), [("eigen", 2), (Inverse("sqrt"), 3)], ids=str)
@pytest.mark.covering(together=1)
def test_ranks_are_one_process(strategy: str, solver: Any, ranks: int) -> None:
    alone = on_rank(0, 1, "comm-opt", solver)
    for own in run_ranks(on_rank, ranks, strategy, solver):
        compare(own, alone, "weights", rtol=1e-8)


# -- policies by either optimizer ------------------------------------------------------------


@pytest.mark.parametrize(
    "damping", [0.3, lambda step: 0.3, ConstantDamping(0.3), ConstantDamping(lambda step: 0.3)]
)
def test_numbers_callables_and_policies_are_the_same(damping: Any) -> None:
    results = []
    for each in (0.3, damping):
        model = fill(deep())
        with closing(preconditioner(model, damping=each)) as own:
            kit.train(model, loss_of, range(2), own)
            results.append(kit.gradients(model))
        model, (x, y) = fill(deep()), (randn(4, 3), randn(4, 3, seed=50))
        optimizer = soframe.TrustRegion(
            model, "squared-error", damping=each, statistics=soframe.Statistics(fisher="type-2")
        )
        optimizer.step(lambda: half_square(model(x), y))  # noqa: B023 (called at once)
        assert optimizer.last["damping"] == 0.3
        results[-1] += [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("damping", "error", "message"),
    [
        ("levenberg-marquardt", ValueError, "follows the reduction ratio, which soframe.TrustReg"),
        (LevenbergMarquardt(), ValueError, "follows the reduction ratio"),
        ("half", ValueError, r"damping must be .* \('constant', .*'relative'\), not 'half'"),
        (nn.Linear, TypeError, "a damping is a name"),
    ],
)
def test_what_a_preconditioner_cannot_take(damping: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        preconditioner(fill(deep()), damping=damping)


@pytest.mark.parametrize("damping", ["relative", RelativeDamping(0.5)])
def test_the_quadratic_model_needs_one_number(damping: Any) -> None:
    with pytest.raises(ValueError, match="a trust region needs one damping for the whole model"):
        soframe.TrustRegion(deep(), "mse", damping=damping)


@pytest.mark.parametrize("value", [-0.1, float("nan"), True])
def test_values_out_of_range(value: Any) -> None:
    with pytest.raises(ValueError, match="damping must be"):
        RelativeDamping(value)
