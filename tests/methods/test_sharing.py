"""Rows: leading dimensions, positions, what counts as a sample, groups of a convolution."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.testing import compare, layer_fisher
from tests.curvature import (
    closing,
    factors,
    fill,
    half_square,
    preconditioner,
    put_gradients,
    randn,
)
from tests.examples import examples


def rows_of(model: nn.Linear, inputs: Tensor, gradient: Tensor, **settings: Any) -> list[Tensor]:
    """The factors of one pass of a Linear whose output gradient is given."""
    with closing(preconditioner(model, **settings)) as own:
        model(inputs).backward(gradient)
        own.step()
        return list(factors(own, "Linear"))


def definition(inputs: Tensor, g: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """A and G of a layer with a bias from the gradients of each sample's own loss, by loops."""
    a_sum = torch.zeros(inputs.shape[-1] + 1, inputs.shape[-1] + 1, dtype=torch.float64)
    g_sum = torch.zeros(g.shape[-1], g.shape[-1], dtype=torch.float64)
    rows = list(zip(inputs.reshape(-1, inputs.shape[-1]), g.reshape(-1, g.shape[-1]), strict=True))
    for a, own in rows:
        with_one = torch.cat([a, a.new_ones(1)])
        a_sum += torch.outer(with_one, with_one)
        g_sum += torch.outer(own, own)
    return a_sum / samples, g_sum / len(rows)


@given(
    leading=st.lists(st.integers(1, 3), max_size=3),
    average=st.sampled_from(["local", "global", "sum"]),
    by_position=st.sampled_from([False, True, "callable"]),
    contiguous=st.booleans(),
)
@settings(max_examples=examples(30))
def test_leading_dimensions(
    leading: list[int], average: str, by_position: bool | str, contiguous: bool
) -> None:
    model = fill(nn.Linear(2, 3))
    inputs, g = randn(*leading, 2), randn(*leading, 3, seed=1)
    if not contiguous and len(leading) > 1:
        inputs, g = (t.mT.contiguous().mT for t in (inputs, g))
    positions = inputs[..., 0].numel()
    batch = leading[0] if leading else 1
    samples: int = positions if by_position else batch
    rule: str | Callable[[], int] = "positions" if by_position else "batch"
    if by_position == "callable":
        rule = lambda: samples  # noqa: E731
    scale = 1 if average == "sum" else samples
    actual = rows_of(model, inputs, g / scale, samples=rule, loss_average=average)
    for name, own, wanted in zip("AG", actual, definition(inputs, g, samples), strict=True):
        compare(own[0], wanted, name)


def test_a_linear_layer_of_one_position_is_the_fisher_of_the_batch() -> None:
    """[N, 1, in] is [N, in]: no trace of the dimension in between; trace against the Fisher."""
    model = nn.Sequential(fill(nn.Linear(2, 3)))
    flat = (randn(4, 2), randn(4, 3, seed=1))
    traces = []
    for inputs, targets in (flat, (flat[0][:, None], flat[1][:, None])):
        with closing(preconditioner(model)) as own:
            for k in range(3):
                start = torch.zeros_like(targets)
                start[..., k] = 3**0.5 / (3 * 4)
                model(inputs).backward(start)
            own.step()
            a, g = factors(own, "0")
            (exact,) = layer_fisher(model, "0", inputs, half_square, targets, kind="type-2")
            compare(torch.kron(g[0], a[0]).trace(), exact.trace(), "trace")
            traces.append(exact.trace())
    compare(traces[0], traces[1], "the Fisher itself")


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "all"])
def test_samples_that_are_no_number_of_samples(bad: object) -> None:
    model = fill(nn.Linear(2, 3))
    own = preconditioner(model, samples=lambda: bad)
    with closing(own):
        model(randn(4, 2)).sum().backward()  # raising here would leave other ranks waiting
        with pytest.raises(ValueError, match=r"samples\(\)"):
            own.step()


def test_samples_may_be_a_numpy_number() -> None:
    import numpy as np

    model, inputs, g = fill(nn.Linear(2, 3)), randn(4, 2), randn(4, 3, seed=1)
    actual = rows_of(model, inputs, g / 2, samples=lambda: np.int64(2))
    for name, own, wanted in zip("AG", actual, definition(inputs, g, 2), strict=True):
        # G is a mean over rows: two samples of two positions each.
        compare(own[0], wanted, name)


class Split(nn.Module):
    """One convolution per group of channels: what a grouped convolution is."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        groups = conv.groups
        options = {
            name: getattr(conv, name)
            for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        }
        channels = (conv.in_channels // groups, conv.out_channels // groups)
        self.parts = nn.ModuleList(
            nn.Conv2d(*channels, bias=conv.bias is not None, **options).double()
            for _ in range(groups)
        )
        with torch.no_grad():
            for name in ("weight", "bias"):
                if getattr(conv, name) is not None:
                    whole = getattr(conv, name).chunk(groups)
                    for part, own in zip(self.parts, whole, strict=True):
                        getattr(part, name).copy_(own)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.chunk(len(self.parts), dim=1)
        return torch.cat([part(p) for part, p in zip(self.parts, pieces, strict=True)], 1)


GROUPED: list[dict[str, Any]] = [
    {"in_channels": 4, "out_channels": 6, "kernel_size": (2, 1), "groups": 2},
    {"in_channels": 3, "out_channels": 3, "kernel_size": 2, "groups": 3, "padding": 1},
    {"in_channels": 2, "out_channels": 4, "kernel_size": 2, "groups": 2, "bias": False},
    {
        "in_channels": 2,
        "out_channels": 4,
        "kernel_size": (3, 2),
        "groups": 2,
        "padding": "same",
        "padding_mode": "reflect",
        "dilation": (1, 2),
    },
]


@pytest.mark.parametrize("options", GROUPED, ids=str)
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_grouped_convolution_is_one_block_per_group(options: dict[str, Any], solver: str) -> None:
    conv = fill(nn.Conv2d(**options))
    split = Split(conv)
    whole = nn.Sequential(conv)
    inputs = randn(3, options["in_channels"], 4, 5)
    start = randn(*whole(inputs).shape, seed=1)
    put_gradients(whole)
    with closing(preconditioner(whole, solver=solver)) as own:
        whole(inputs).backward(start)
        raw = {name: p.grad.clone() for name, p in conv.named_parameters()}
        own.step()
        together = factors(own, "0")
    with closing(preconditioner(split, solver=solver)) as own:
        split(inputs).backward(start)
        for name, whole_grad in raw.items():
            for part, grad in zip(split.parts, whole_grad.chunk(conv.groups), strict=True):
                part.get_parameter(name).grad = grad.clone()
        own.step()
        apart = [factors(own, f"parts.{i}") for i in range(conv.groups)]
    for number, name in enumerate("AG"):
        compare(together[number], torch.cat([f[number] for f in apart]), name)
    for name, parameter in conv.named_parameters():
        parts = torch.cat([part.get_parameter(name).grad for part in split.parts])
        compare(parameter.grad, parts, f"preconditioned {name}")


def test_a_convolution_of_one_pixel_is_a_linear_layer_on_positions() -> None:
    conv, linear = fill(nn.Conv2d(3, 2, 1)), nn.Linear(3, 2).double()
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
        linear.bias.copy_(conv.bias)
    images, start = randn(4, 3, 2, 3), randn(4, 2, 2, 3, seed=1)
    results = []
    for model, inputs, gradient in (
        (conv, images, start),
        (linear, images.flatten(2).mT, start.flatten(2).mT),
    ):
        with closing(preconditioner(model)) as own:
            model(inputs).backward(gradient)
            own.step()
            results.append([*factors(own, type(model).__name__), model.weight.grad.flatten(1)])
    for name, one, other in zip(("A", "G", "gradient"), *results, strict=True):
        compare(one, other, name)
