"""Products with the curvature of training leave out layers that are frozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.testing import compare
from tests.distributed.harness import run_ranks

DAMPING = 0.1


def trained(strategy: str = "comm-opt") -> tuple[nn.Module, soframe.Preconditioner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, soframe.Preconditioner(
        model, strategy=strategy, statistics_every=1, solve_every=1, kl_clip=None
    )


def step(model: nn.Module, preconditioner: soframe.Preconditioner, seed: int) -> None:
    model.zero_grad()
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model(x).square().sum(1).mean().backward()
    preconditioner.step()


def after_a_freeze(strategy: str) -> tuple[Tensor, Tensor]:
    """The product of the inverse with ones in the last layer, and by dense algebra."""
    model, preconditioner = trained(strategy)
    step(model, preconditioner, 0)
    model[0].requires_grad_(False)
    step(model, preconditioner, 1)
    curvature = preconditioner.curvature
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}
    product = curvature.inverse(DAMPING) @ vector
    assert product.keys() == vector.keys() == {"2.weight", "2.bias"}
    assert curvature.left_out == {"0.weight": "frozen", "0.bias": "frozen"}
    with pytest.raises(ValueError, match=r"no block for 0\.weight \(frozen\), 0\.bias"):
        curvature @ {name: torch.ones_like(p) for name, p in model.named_parameters()}
    block = curvature.blocks[1]
    a, g = (block.running.matrix(factor)[0] for factor in block.factors)
    dense = torch.kron(g, a)
    compare(torch.tensor(curvature.trace(), dtype=a.dtype), dense.trace(), "trace", rtol=1e-10)
    assert len(curvature.eigenvalues()) == len(dense)
    damped = dense + DAMPING * torch.eye(len(dense), dtype=dense.dtype)
    columns = [product["2.weight"], product["2.bias"].unsqueeze(1)]
    return torch.cat(columns, 1), torch.linalg.solve(damped, torch.ones(len(dense)).to(a))


def test_a_vector_has_what_is_trained() -> None:
    found, expected = after_a_freeze("comm-opt")
    compare(found.flatten(), expected, "inverse", rtol=1e-10)


def test_a_layer_that_is_frozen_after_the_last_step_is_covered_still() -> None:
    """As before a Laplace approximation: `requires_grad_(False)` of a whole model."""
    model, preconditioner = trained()
    step(model, preconditioner, 0)
    model.requires_grad_(False)
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    assert (preconditioner.curvature @ vector).keys() == vector.keys()
    preconditioner.step()  # and in a step that trains none
    assert (preconditioner.curvature @ vector).keys() == vector.keys()


def test_a_thawed_layer_is_covered_again() -> None:
    model, preconditioner = trained()
    for seed, is_trained in enumerate((True, False, True)):
        model[0].requires_grad_(is_trained)
        step(model, preconditioner, seed)
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    assert (preconditioner.curvature @ vector).keys() == vector.keys()
    batch = torch.ones(5, 3, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        return outputs, outputs.square().sum(1).mean()

    gradients = preconditioner.curvature.gradients(batch, loss)
    assert gradients.dot(vector).shape == (5,)
    model[0].requires_grad_(False)
    step(model, preconditioner, 3)
    rest = {name: vector[name] for name in ("2.weight", "2.bias")}
    of_rest = preconditioner.curvature.gradients(batch, loss)
    assert of_rest.dot(rest).shape == (5,)


def on_ranks(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    return after_a_freeze("mem-opt")


@pytest.mark.distributed
def test_ranks_send_products_of_what_is_trained() -> None:
    for found, expected in run_ranks(on_ranks, 2):
        compare(found.flatten(), expected, "inverse", rtol=1e-10)
