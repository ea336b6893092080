"""Solvers as a researcher writes them: they return what they say, and leave factors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.specs import TensorSpec
from tests import kit

Solve = Callable[[Tensor], dict[str, Any]]


class Plain(soframe.Solver):
    """The factors themselves, of which each direction solves anew."""

    def __init__(self, solves: Solve) -> None:
        self.solves = solves

    def tensors(self, factor):
        return {"matrix": TensorSpec(factor.shape)}

    def solve(self, matrix, damping):
        return self.solves(matrix)

    def apply(self, gradient, *, left, right, damping):
        def damped(matrix: Tensor) -> Tensor:
            return matrix + damping * torch.eye(matrix.shape[-1], dtype=matrix.dtype)

        half = torch.linalg.solve(damped(left["matrix"]), gradient)
        return torch.linalg.solve(damped(right["matrix"]), half.mT).mT


def last_grad(solves: Solve) -> Tensor:
    torch.manual_seed(0)
    net = nn.Linear(3, 2, dtype=torch.float64)
    own = kit.precondition(net, solver=Plain(solves), solve_every=2, damping=0.1)

    def loss(net: nn.Module, _: int) -> Tensor:
        return net(torch.randn(5, 3, dtype=torch.float64)).square().mean()

    kit.train(net, loss, range(4), own)
    return net.weight.grad


def test_a_factor_that_is_returned_as_it_is_does_not_change_between_solves() -> None:
    as_it_is, copied = (
        last_grad(s) for s in (lambda m: {"matrix": m}, lambda m: {"matrix": m * 1})
    )
    assert torch.equal(as_it_is, copied)


@pytest.mark.parametrize(
    ("solves", "error", "words"),
    [
        (lambda m: {"inverse": m}, ValueError, r"solve\(\) returned .*'inverse'"),
        (lambda m: {"matrix": m[0]}, ValueError, r"and tensors\(\) declares .*\(1, 4, 4\)"),
    ],
)
def test_what_a_solver_may_say_and_not_keep(
    solves: Solve, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        last_grad(solves)
