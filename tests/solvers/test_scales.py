"""Factors of any scale, in float32, against the same in float64: nothing overflows to zero."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.solvers import (
    Eigen,
    Inverse,
    Lazy,
    NewtonSchulz,
    OrthogonalIteration,
    Relative,
    Solver,
)
from soframe.solvers.base import mean_trace
from tests.examples import examples
from tests.solvers.dense import SolveFailedError, run, solve_safely, spectrum

# From the least denormal number of float32 to nearly its largest.
EXPONENTS = st.floats(-45, 38)
INVERSES = [Inverse(), NewtonSchulz()]
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def trace(exponent: float) -> Tensor:
    return torch.full((1,), 10.0**exponent, dtype=torch.float64).float()


@given(a=EXPONENTS, g=EXPONENTS, damping=st.floats(-12, 6))
@example(a=0.0, g=-39.0, damping=-3.0)
@example(a=-39.0, g=0.0, damping=-3.0)
@example(a=-45.0, g=-45.0, damping=-3.0)
@example(a=38.0, g=38.0, damping=-3.0)
@example(a=38.0, g=-45.0, damping=-3.0)
@settings(max_examples=examples(300))
def test_shares_are_numbers_whose_product_is_the_damping(
    a: float, g: float, damping: float
) -> None:
    value = 10.0**damping
    shares = [float(x) for x in Inverse().shares([trace(a), trace(g)], value)]
    assert all(SMALLEST <= x <= LARGEST and SMALLEST <= 1 / x <= LARGEST for x in shares), shares
    assert math.isclose(shares[0] * shares[1], value, rel_tol=1e-6)
    first, second = float(trace(a)), float(trace(g))
    pi, own = math.sqrt(first) / math.sqrt(second), shares[0] / math.sqrt(value)
    seen = math.sqrt(first) * math.sqrt(second) / math.sqrt(value)
    own_shares = (math.sqrt(value) * pi, math.sqrt(value) / pi)
    if seen > 1e-7 and all(1e-36 < x < 1e36 for x in own_shares):
        assert math.isclose(own, pi, rel_tol=1e-5)
    # The block is its damping alone: neither factor may be seen, where there are such shares.
    if seen < 1e-9 and max(first, second) < 1e27:
        assert first <= 1e-8 * shares[0]
        assert second <= 1e-8 * shares[1]


@given(a=st.floats(-320, 305), g=st.floats(-320, 305), damping=st.floats(-12, 6))
@settings(max_examples=examples(200))
def test_shares_in_float64(a: float, g: float, damping: float) -> None:
    traces = [torch.tensor([10.0**x], dtype=torch.float64) for x in (a, g)]
    shares = [float(x) for x in Inverse().shares(traces, 10.0**damping)]
    assert all(0 < x < math.inf and 0 < 1 / x < math.inf for x in shares), shares
    assert math.isclose(shares[0] * shares[1], 10.0**damping, rel_tol=1e-9)


@pytest.mark.parametrize("zero", ["A", "G"])
def test_a_factor_of_zeros_is_the_limit_of_a_small_one(zero: str) -> None:
    """What has underflowed and what has nearly done so give the same direction."""
    results = []
    for scale in (0.0, 1e-44):
        a, g = spectrum(1, 4, 1e-2).float(), spectrum(1, 3, 1e-2, seed=1).float()
        (a if zero == "A" else g).mul_(scale)
        # What is between the two products must be finite too.
        results.append(run(Inverse(), torch.full((1, 3, 4), 1e10), g, a, 1e-3))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(results[0], torch.full((1, 3, 4), 1e13))


@given(
    a=EXPONENTS,
    g=EXPONENTS,
    damping=st.sampled_from([10.0, 1e-3, 1e-6]),
    solver=st.sampled_from([*INVERSES, Inverse("sqrt"), Inverse("full"), Eigen()]),
)
@example(a=0.0, g=-39.0, damping=1e-3, solver=Inverse())
@example(a=-39.0, g=0.0, damping=1e-3, solver=Inverse())
@example(a=38.0, g=38.0, damping=1e-3, solver=Inverse())
@example(a=30.0, g=30.0, damping=1e-3, solver=Eigen())
@example(a=32.0, g=-36.0, damping=1e-6, solver=Inverse())
@settings(max_examples=examples(150))
def test_solvers_give_the_direction_of_float64_or_fail(
    a: float, g: float, damping: float, solver: Solver
) -> None:
    factors = [10.0**e * spectrum(1, n, 0.1, seed=n).clamp(-1, 1) for e, n in ((g, 3), (a, 4))]
    found = []
    # The gradient is of the factors' own scale, as that of a loss is.
    size = 10.0 ** max(-30.0, min(30.0, (a + g) / 2))
    gradient = size * torch.arange(1.0, 13, dtype=torch.float64).reshape(1, 3, 4)
    single = [factor.float() for factor in factors]
    for dtype in (torch.float32, torch.float64):
        own = [factor.to(dtype) for factor in single]
        try:
            found.append(run(solver, gradient.to(dtype), *own, damping))
        except SolveFailedError:
            assert dtype == torch.float32
            return
    one, exact = (result.double().flatten() for result in found)
    if not SMALLEST * 1e6 < float(exact.abs().max()) < LARGEST / 1e6:
        return  # not a number of float32 at all
    assert bool(one.isfinite().all())
    assert float(one.norm()) > 0, "the gradient is gone"
    shares = [math.sqrt(damping) * 10.0 ** (sign * (a - g) / 2) for sign in (1, -1)]
    if not all(1e-35 < share < 1e35 for share in shares):
        return  # float32 cannot hold these shares of the damping, and has others of their product
    cosine = float(one @ exact / (one.norm() * exact.norm()))
    assert cosine > 0.99, (cosine, one, exact)


def test_an_inverse_that_underflows_is_a_failure() -> None:
    class Tiny(Inverse):
        def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
            return {"inverse": torch.full_like(matrix, 1e-60)}

    for solver in (Tiny(), Lazy(Tiny()), Relative(Tiny())):
        assert not solver.usable({"inverse": torch.zeros(1, 2, 2)})
    with pytest.raises(SolveFailedError, match="float32 cannot hold the result"):
        solve_safely(Tiny(), torch.eye(2)[None], torch.ones(1))


def test_products_of_eigenvalues_that_overflow_are_a_failure() -> None:
    traces = [torch.full((2,), 1e18), torch.tensor([1.0, 1e18])]
    for solver in (Eigen(), OrthogonalIteration(), Lazy(Eigen())):
        shares = solver.shares(traces, 1e-3)
        assert [share.isnan().tolist() for share in shares] == [[False, True]] * 2
        with pytest.raises(SolveFailedError, match=r"beyond torch.float32: .*dtype=torch.float64"):
            solve_safely(solver, torch.eye(3).expand(2, 3, 3), shares[0])
        for finite in (
            solver.shares([trace.double() for trace in traces], 1e-3),
            solver.shares([trace / 1e9 for trace in traces], 1e-3),
            solver.shares(traces[:1], 1e-3),  # alone it is no product
        ):
            assert all(share.isfinite().all() for share in finite)
        uneven = solver.shares([traces[0], traces[1][1:]], 1e-3)
        assert all(share.isnan().all() for share in uneven)
    # It sees factors of mean eigenvalue one.
    assert all(share.isfinite().all() for share in Relative(Eigen()).shares(traces, 1e-3))


def test_the_mean_of_a_trace_that_overflows() -> None:
    assert float(mean_trace(3e38 * torch.eye(4)[None])) == pytest.approx(3e38)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("solver", [Lazy(Inverse()), OrthogonalIteration()], ids=repr)
def test_a_factor_that_has_changed_is_seen_at_any_scale(solver: Solver, scale: float) -> None:
    """Squares of these numbers are zero or infinite in float32."""
    before, now = (scale * spectrum(1, 6, 1e-3, seed=s).float() for s in (0, 9))
    damping = torch.full((1,), scale)
    data = solver.solve_again(now, damping, solver.solve(before, damping))
    anew = solver.solve(now, damping)
    assert all(torch.equal(data[name], anew[name]) for name in anew)


@pytest.mark.parametrize("solver", [Eigen(), Inverse(), Inverse("sqrt"), NewtonSchulz()], ids=repr)
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-3, 1e10])
def test_relative_damping_at_any_scale(solver: Solver, scale: float) -> None:
    """The product of the traces is out of float32's range, the shares of it are not."""
    g, a = spectrum(1, 3, 1e-2), spectrum(1, 4, 1e-2, seed=1)
    gradient = torch.arange(1.0, 13, dtype=torch.float64).reshape(1, 3, 4)
    size = scale**0.5
    found = run(Relative(solver), (size * gradient).float(), (scale * g).float(), a.float(), 0.1)
    reference = run(Relative(solver), size * gradient, scale * g, a, 0.1)
    torch.testing.assert_close(found.double() / size, reference / size, rtol=1e-3, atol=0)


# -- through the preconditioner ------------------------------------------------------------------


def batch(seed: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def directions(scales: list[float], dtype: torch.dtype, **options: Any) -> list[dict[str, Any]]:
    """Train on a loss of some scales, one a step: what each step did to the gradients."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
    options = {"statistics_every": 1, "solve_every": 1, "kl_clip": None, **options}
    own = soframe.Preconditioner(model, decay=0.0, **options)
    steps = []
    for number, scale in enumerate(scales):
        model.zero_grad()
        out = model(batch(number).to(dtype))
        (out.square().sum(1).mean() * scale).backward()
        raw = [p.grad.clone() for p in model.parameters()]
        failed = own.counters["failed_solves"] + own.counters["skipped_statistics"]
        own.step()
        said = own.counters["failed_solves"] + own.counters["skipped_statistics"] - failed
        grads = [p.grad.clone() for p in model.parameters()]
        steps.append({"raw": raw, "grads": grads, "said": said})
    own.close()
    return steps


SCALES = [1e-19, 1e-17, 1e-10, 1.0, 1e10, 1e16, 1e19]


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["eigen", "inverse", "newton-schulz", "orthogonal-iteration"])
@pytest.mark.parametrize("first", [None, 1.0, 1e-19, 1e16])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.covering(together=2)
def test_a_loss_of_any_scale(
    solver: str, first: float | None, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The direction is that of float64, or the raw one and somebody is told; never zero."""
    scales = [scale] if first is None else [first, scale]
    with caplog.at_level(logging.CRITICAL, "soframe"):
        single = directions(scales, torch.float32, solver=solver)[-1]
        double = directions(scales, torch.float64, solver=solver)[-1]
    for one, exact, raw in zip(single["grads"], double["grads"], single["raw"], strict=True):
        assert bool(one.isfinite().all())
        assert float(one.abs().max()) > 0, "the gradient is gone"
        if single["said"] and first is None:
            assert torch.equal(one, raw)
        elif not single["said"]:
            a, b = one.double().flatten(), exact.flatten()
            assert float(a @ b / (a.norm() * b.norm())) > 0.999


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("scale", [1e-16, 1e-8, 1e8])
def test_relative_damping_of_a_loss_of_any_scale(solver: str, scale: float) -> None:
    options = {"solver": solver, "damping": "relative"}
    single = directions([scale], torch.float32, **options)[0]["grads"]
    double = directions([scale], torch.float64, **options)[0]["grads"]
    for one, exact in zip(single, double, strict=True):
        torch.testing.assert_close(
            one.double() / exact.norm(), exact / exact.norm(), rtol=1e-2, atol=1e-2
        )
