"""How exact curvature is: nothing is missing where it is exact, and the order that is proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.settings import grouped
from soframe.testing import (
    block_errors,
    compare,
    dense_fisher,
    implied_curvature,
    layer_matrix_basis,
    natural_gradient_cosines,
)
from tests.curvature import fill, half_square, log_cosh, randn
from tests.kit import exact
from tests.methods.stages import damping_for

DAMPING = 0.05


def linear_network() -> nn.Module:
    """Of linear layers alone: with a squared error every block is a Kronecker product."""
    return fill(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 2)))


def network(seed: int = 0) -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), seed)


def taken(
    model: nn.Module, x: Tensor, y: Tensor, criterion: Any, method: Any = "kfac", **options: Any
) -> soframe.Preconditioner:
    """A preconditioner after two steps on one batch, between which no weight has moved."""
    settings = {"kl_clip": None, "statistics_every": 1, "solve_every": 9}
    settings |= damping_for(method, damping=DAMPING) | exact(method)
    own = soframe.Preconditioner(model, method, **grouped({**settings, **options}))
    for _ in range(2):
        model.zero_grad()
        output = model(x)
        if own.loss is not None:
            own.observe(output)
        criterion(output, y).backward()
        own.step()
    return own


def test_a_kronecker_product_is_told_to_be_exact() -> None:
    model, x, y = linear_network(), randn(20, 4), randn(20, 2, seed=1)
    options = {"fisher": "type-2", "loss": "squared-error"}
    own = taken(model, x, y, half_square, **options)
    errors = block_errors(own, model, x, half_square, y, kind="type-2")
    assert list(errors) == ["0", "1", "2"]
    for error in errors.values():
        assert error.relative < 1e-9
        assert error.frobenius < 1e-9
        assert error.trace_ratio == pytest.approx(1)
    cosines = natural_gradient_cosines(own, model, x, half_square, y, kind="type-2")
    assert list(cosines.blocks.values()) == [pytest.approx(1, abs=1e-9)] * 3
    assert cosines.block_diagonal == pytest.approx(1, abs=1e-9)
    assert 0 < cosines.full < 0.999  # what lies between blocks is not in the method


def test_one_linear_layer_has_the_natural_gradient() -> None:
    model, x, y = fill(nn.Sequential(nn.Linear(4, 3))), randn(20, 4), randn(20, 3, seed=1)
    own = taken(model, x, y, half_square, fisher="type-2", loss="squared-error")
    cosines = natural_gradient_cosines(own, model, x, half_square, y, kind="type-2")
    assert cosines.full == pytest.approx(1, abs=1e-12)
    # With another damping it is another one.
    other = natural_gradient_cosines(own, model, x, half_square, y, kind="type-2", damping=10.0)
    assert other.full < 0.999


def test_the_matrix_is_that_of_the_method() -> None:
    model, x, y = network(), randn(6, 3), randn(6, 2, seed=1)
    own = taken(model, x, y, log_cosh)
    block = own.blocks[0]
    order = layer_matrix_basis(model[0])[0].flatten()  # type: ignore[index]
    wanted = torch.kron(block.running["G"][0], block.running["A"][0])
    found = implied_curvature(own, "0")[order][:, order]
    compare(found, wanted, "K-FAC's matrix", rtol=1e-8)
    fisher = dense_fisher(model, x, log_cosh, y, parameters=["0.weight", "0.bias"])
    error = block_errors(own, model, x, log_cosh, y)["0"]
    fisher = fisher[order][:, order]
    difference = wanted - fisher
    assert error.frobenius == pytest.approx(float(difference.norm()), rel=1e-6)
    assert error.relative == pytest.approx(float(difference.norm() / fisher.norm()), rel=1e-6)


@given(st.integers(0, 10**6))
@pytest.mark.slow
def test_ekfac_is_nearer_than_kfac(seed: int) -> None:
    x, y = randn(5, 3, seed=seed), randn(5, 2, seed=seed + 1)
    errors = {}
    for method in ("kfac", "ekfac"):
        model = network(seed)
        own = taken(model, x, y, log_cosh, method)
        errors[method] = block_errors(own, model, x, log_cosh, y)
        own.close()
    for name, error in errors["ekfac"].items():
        assert error.trace_ratio == pytest.approx(1)
        assert error.frobenius <= errors["kfac"][name].frobenius * (1 + 1e-9)
    # Not by nothing.
    assert errors["ekfac"]["0"].relative < errors["kfac"]["0"].relative - 1e-3


def test_cosines_are_of_what_gradients_hold() -> None:
    model, x, y = network(), randn(6, 3), randn(6, 2, seed=1)
    own = taken(model, x, y, log_cosh)
    names = [name for name, _ in model.named_parameters()]
    fisher = dense_fisher(model, x, log_cosh, y)
    model.zero_grad()
    log_cosh(model(x), y).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    damped = fisher + DAMPING * torch.eye(len(fisher), dtype=torch.float64)
    natural = torch.linalg.solve(damped, gradient)

    def put(vector: Tensor) -> None:
        parts = vector.split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()

    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    put(3 * natural)
    found = natural_gradient_cosines(own, model, x, log_cosh, y)
    assert found.full == pytest.approx(1)
    assert found.block_diagonal < 0.9999
    put(-natural)
    assert natural_gradient_cosines(own, model, x, log_cosh, y).full == pytest.approx(-1)
    put(gradient)
    found = natural_gradient_cosines(own, model, x, log_cosh, y)
    cosine = float(gradient @ natural / gradient.norm() / natural.norm())
    assert found.full == pytest.approx(cosine)
    half = slice(0, 16)
    alone = torch.linalg.solve(damped[half, half], gradient[half])
    cosine = float(gradient[half] @ alone / gradient[half].norm() / alone.norm())
    assert found.blocks["0"] == pytest.approx(cosine)
    put(0 * gradient)
    assert natural_gradient_cosines(own, model, x, log_cosh, y).full == 0


@pytest.mark.slow
def test_what_has_no_matrix_is_refused() -> None:
    model, x, y = network(), randn(6, 3), randn(6, 2, seed=1)
    own = taken(model, x, y, log_cosh, "muon", auxiliary="adamw")
    with pytest.raises(ValueError, match=r"0\.weight: what Muon.* is not linear"):
        implied_curvature(own, "0.weight")
    natural_gradient_cosines(own, model, x, log_cosh, y)
    with pytest.raises(ValueError, match="there is no block '7'; there are"):
        implied_curvature(own, "7")
    own.close()
    fresh = soframe.Preconditioner(model, kl_clip=None)
    with pytest.raises(ValueError, match="0 has no second-order data yet"):
        implied_curvature(fresh, "0")
    with pytest.raises(ValueError, match="there is no update yet"):
        natural_gradient_cosines(fresh, model, x, log_cosh, y)
    with pytest.raises(ValueError, match="of another model"):
        natural_gradient_cosines(fresh, network(), x, log_cosh, y)
    fresh.close()
    relative = taken(model, x, y, log_cosh, damping="relative")
    with pytest.raises(ValueError, match="its damping is relative"):
        block_errors(relative, model, x, log_cosh, y)
    relative.close()
    backend = soframe.comm.Recording(world_size=2)
    paper = soframe.Preconditioner(
        model, distribution=soframe.Distribution(backend=backend), kl_clip=None
    )
    with pytest.raises(ValueError, match="measure on one process"):
        natural_gradient_cosines(paper, model, x, log_cosh, y)
