"""Where K-FAC is exact, ``kron(G, A)`` is the dense Fisher with no free constant.

Crossed with what the loss is a mean of, biases, frozen parameters, the order of parameters and
uneven micro-batches. Every case also takes the step and holds the preconditioned gradient to the
dense solve.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.curvature import (
    Kind,
    LossAverage,
    check_exact,
    closing,
    fill,
    half_square,
    log_cosh,
    preconditioner,
    randn,
)
from tests.examples import examples

AVERAGES: list[LossAverage] = ["local", "global", "sum"]


class Chain(nn.Module):
    """Linear layers in a row, with an activation in between, registered in any order.

    Args:
        widths: Features from the inputs to the outputs.
        parts: What of each layer is trained: "weight", "bias" or both; no bias at all for "none".
        order: The order in which the layers are registered.
        activation: Between the layers.
        seed: For the parameters.
    """

    def __init__(
        self,
        widths: list[int],
        parts: list[str],
        order: list[int],
        activation: nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        made = {}
        for i, part in enumerate(parts):
            layer = nn.Linear(widths[i], widths[i + 1], bias=part != "none")
            layer.weight.requires_grad_(part != "bias")
            if layer.bias is not None:
                layer.bias.requires_grad_(part != "weight")
            made[f"layer{i}"] = layer
        for i in order:
            self.add_module(f"layer{i}", made[f"layer{i}"])
        self.activation = activation or nn.Identity()
        self.depth = len(parts)
        fill(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            x = self.get_submodule(f"layer{i}")(x)
            if i + 1 < self.depth:
                x = self.activation(x)
        return x


@st.composite
def chains(draw: st.DrawFn, activation: nn.Module | None = None) -> Chain:
    depth = draw(st.integers(1, 3))
    widths = draw(st.lists(st.integers(1, 3), min_size=depth + 1, max_size=depth + 1))
    part = st.sampled_from(["both", "weight", "bias", "none"])
    parts = draw(st.lists(part, min_size=depth, max_size=depth))
    order = draw(st.permutations(range(depth)))
    return Chain(widths, parts, order, activation, draw(st.integers(0, 9)))


def shuffled_optimizer(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """An optimizer that knows the parameters in another order, in two groups."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(seed)).tolist()
    groups = [[parameters[i] for i in order[::2]], [parameters[i] for i in order[1::2]]]
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


def batch(model: Chain, samples: int, *positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    last = model.get_submodule(f"layer{model.depth - 1}")
    inputs = randn(samples, *positions, model.layer0.in_features, seed=50 + seed)
    return inputs, randn(samples, *positions, last.out_features, seed=80 + seed)


@given(
    model=chains(nn.Tanh()),
    average=st.sampled_from(AVERAGES),
    kind=st.sampled_from(["type-2", "empirical"]),
)
@settings(max_examples=examples(12))
def test_one_sample_of_any_net(model: Chain, average: LossAverage, kind: Kind) -> None:
    optimizer = shuffled_optimizer(model, 0)
    with closing(preconditioner(model, loss_average=average, optimizer=optimizer)) as own:
        data = [batch(model, 1)]
        check_exact(model, own, data, log_cosh, kind=kind, loss_average=average)


@given(
    model=chains(),
    average=st.sampled_from(AVERAGES),
    sizes=st.lists(st.sampled_from([1, 2, 7]), min_size=1, max_size=2),
)
@settings(max_examples=examples(12))
def test_deep_linear_net(model: Chain, average: LossAverage, sizes: list[int]) -> None:
    data = [batch(model, size, seed=i) for i, size in enumerate(sizes)]
    with closing(preconditioner(model, loss_average=average)) as own:
        check_exact(model, own, data, half_square, loss_average=average)


@pytest.mark.parametrize("average", AVERAGES)
def test_uneven_micro_batches(average: LossAverage) -> None:
    model = Chain([3, 2, 2], ["both", "both"], [1, 0])
    data = [batch(model, 1), batch(model, 7, seed=1)]
    with closing(preconditioner(model, loss_average=average)) as own:
        check_exact(model, own, data, half_square, loss_average=average)


@given(
    model=chains(),
    average=st.sampled_from(AVERAGES),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    positions=st.sampled_from([(2,), (1,), (2, 2)]),
)
@settings(max_examples=examples(12))
def test_positions_that_all_enter_the_loss(
    model: Chain, average: LossAverage, sizes: list[int], positions: tuple[int, ...]
) -> None:
    data = [batch(model, size, *positions, seed=i) for i, size in enumerate(sizes)]
    with closing(preconditioner(model, loss_average=average)) as own:
        check_exact(model, own, data, half_square, loss_average=average)


CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": (2, 3), "padding": (1, 0)},
    {"kernel_size": 2, "stride": 2, "bias": False},
    {"kernel_size": 2, "dilation": 2, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 2, "groups": 2},
]


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        (o, part)
        for o in CONVOLUTIONS
        for part in ("", "weight", "bias")
        if not part or "bias" not in o
    ],
    ids=str,
)
@pytest.mark.covering(together=2)
def test_one_convolution(options: dict[str, Any], frozen: str, average: LossAverage) -> None:
    model = fill(nn.Sequential(nn.Conv2d(2, 2, **options)))
    if frozen:
        model[0].get_parameter(frozen).requires_grad_(False)
    with closing(preconditioner(model, loss_average=average)) as own:
        inputs = [randn(size, 2, 3, 4, seed=size) for size in (1, 2)]
        with torch.no_grad():
            data = [(x, torch.zeros_like(model(x))) for x in inputs]
        check_exact(model, own, data, half_square, loss_average=average)


def test_several_convolutions_of_one_pixel() -> None:
    model = fill(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1, bias=False)))
    with closing(preconditioner(model)) as own:
        data = [(randn(2, 2, 2, 2), randn(2, 2, 2, 2, seed=1))]
        check_exact(model, own, data, half_square)
