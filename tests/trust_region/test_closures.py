"""What a closure may do: exact, or refused by a message that names the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from tests.curvature import fill, randn

Make = Callable[[nn.Module], Any]

BOTH: dict[str, Make] = {
    "whole": lambda model: soframe.TrustRegion(model, "mse"),
    "stochastic": soframe.StochasticTrustRegion,
}


class Halves(nn.Module):
    """Returns one of two results of one function, and keeps the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = fill(nn.Linear(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        out, self.kept = self.layer(x).chunk(2, 1)
        return out


@pytest.mark.parametrize("kind", BOTH)
def test_a_term_beside_the_output_of_one_function_with_it_is_refused(kind: str) -> None:
    """Autograd has one node for both halves, and the gradient of one of them is lost."""
    model, x = Halves(), randn(8, 3)
    own = BOTH[kind](model)
    with pytest.raises(RuntimeError, match="other than through the model's output"):
        own.step(lambda: F.mse_loss(model(x), x[:, :2]) + model.kept.square().mean())
    own.step(lambda: F.mse_loss(model(x), x[:, :2]))


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_of_a_functional_call_are_the_models(kind: str) -> None:
    model, x = fill(nn.Linear(3, 2)), randn(8, 3)
    own = BOTH[kind](model)
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def closure(parameters: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), x[:, :2])

    with pytest.raises(RuntimeError, match="depend on none of the parameters that are trained"):
        own.step(lambda: closure(copies))
    before = float(own.step(lambda: closure(dict(model.named_parameters()))))
    assert closure(dict(model.named_parameters())) < before
