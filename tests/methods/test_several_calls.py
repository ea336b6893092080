"""Modules called several times in one backward pass: moments of each call's sample gradients.

The definition of EKFAC, the diagonal and TNT, computed with a copy of the weight for each call.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from soframe.testing import compare
from tests import kit
from tests.curvature import closing, preconditioner
from tests.examples import examples


class Repeated(nn.Module):
    """One linear layer, called several times on rows of its own outputs."""

    def __init__(self, size: int, calls: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(size, size), nn.Linear(size, 2)
        self.copies = [self.layer] * calls

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.copies:
            x = layer(x).tanh()
        return self.head(x)


class Unrolled(nn.Module):
    """The same function, with a copy of the layer for each call."""

    def __init__(self, of: Repeated) -> None:
        super().__init__()
        size = of.layer.in_features
        self.layers = nn.ModuleList(nn.Linear(size, size).double() for _ in of.copies)
        self.head = of.head
        for layer in self.layers:
            layer.load_state_dict(of.layer.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def gradients(model: Repeated, x: Tensor) -> list[list[Tensor]]:
    """By call and sample the gradient ``[out, in + 1]`` of the loss, summed over positions."""
    unrolled = Unrolled(model)
    names = dict(unrolled.named_parameters())

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        outputs = functional_call(unrolled, parameters, (sample[None],))
        return 0.5 * outputs.square().sum()

    found: list[list[Tensor]] = [[] for _ in model.copies]
    for sample in x:
        each = torch.func.grad(loss)(names, sample)
        for number, of_call in enumerate(found):
            weight, bias = (each[f"layers.{number}.{name}"] for name in ("weight", "bias"))
            of_call.append(torch.cat([weight, bias[:, None]], 1))
    return found


@pytest.mark.parametrize("method", ["ekfac", "diagonal", "tnt"])
@given(
    size=st.integers(1, 5),
    calls=st.integers(2, 3),
    positions=st.integers(1, 3),
    samples=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(20))
def test_moments_are_of_each_call(
    method: str, size: int, calls: int, positions: int, samples: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Repeated(size, calls).double()
    x = torch.randn(samples, positions, size, dtype=torch.float64)
    with closing(preconditioner(model, method=method, solve_every=100)) as own:
        # EKFAC's second moments begin after the first solve.
        kit.train(model, lambda net, _: 0.5 * net(x).square().sum() / samples, range(2), own)
        block = next(block for block in own.blocks if block.name == "layer")
        each = torch.stack([w for call in gradients(model, x) for w in call])
        if method == "tnt":
            compare(
                block.running.matrix(block.factors[0])[0], (each @ each.mT).sum(0) / samples, "L"
            )
            compare(
                block.running.matrix(block.factors[1])[0], (each.mT @ each).sum(0) / samples, "R"
            )
            return
        if method == "ekfac":
            left, right = (block.second_order[name]["vectors"][0] for name in "GA")
            each = left.T @ each @ right
        name = "S" if method == "ekfac" else "diagonal"
        compare(block.running[name][0], each.square().sum(0) / samples, name)
