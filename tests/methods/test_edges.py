"""Edges of methods of gradients: sides of the longest size, several groups, parts in a chain."""

from __future__ import annotations

import torch
from torch import nn

from soframe.layers.layout import BlockShape
from soframe.methods import SOAP, Blocked, Chain, Momentum, Shampoo
from soframe.methods.base import Candidate, Given, Method
from soframe.solvers import Basis
from tests import kit
from tests.curvature import closing, randn
from tests.methods import stages


def test_each_group_is_normalised_by_itself() -> None:
    gradient = randn(2, 4, 3) * torch.tensor([1.0, 1e6]).double().view(2, 1, 1)
    method = SOAP(normalise=True, skip_first=False, correct_bias=False, eps=1e3)
    given = Given(
        gradient, gradient,
        {name: Basis().solve(moment, torch.zeros(2)) for name, moment in
         method.observe(gradient, {}).items()},
        {name: torch.zeros(spec.shape, dtype=torch.float64)
         for name, spec in method.state(BlockShape(2, 4, 3)).items()},
        3, Basis(), 0.0,
    )  # fmt: skip
    found = method.direct(given).matrix
    torch.testing.assert_close(found.square().mean((1, 2)), torch.ones(2).double())


def test_a_side_of_exactly_the_longest_size_has_a_factor() -> None:
    shape = BlockShape(1, 5, 4)
    assert [factor.name for factor in SOAP(max_size=5).factors(shape)] == ["L", "R"]
    assert [factor.name for factor in SOAP(max_size=4).factors(shape)] == ["R"]
    candidate = Candidate("w", nn.Linear(4, 5), ("weight",), shape)
    assert Shampoo(max_size=5).unsuited(candidate) is None
    assert Shampoo(max_size=4).unsuited(candidate) is not None


def test_parts_in_a_chain_are_given_the_gradient_and_the_stage_before() -> None:
    """One part that is the whole matrix: the chain without blocks."""
    found: list[torch.Tensor] = []
    for inner in (SOAP(), Blocked(SOAP(), 9)):
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
        methods: tuple[Method, ...] = (Momentum(0.9), inner)
        with closing(stages.preconditioner(model, Chain(methods), solve_every=2)) as own:
            for step in range(5):
                model[0].weight.grad = randn(4, 4, seed=step)
                own.step()
            found += [gradient.clone() for gradient in kit.gradients(model)]
    assert torch.equal(found[0], found[1])
