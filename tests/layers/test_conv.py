"""Rows of a convolution against loops over patches and against autograd, for every geometry."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.kernels.gram import mirror
from soframe.layers import Conv2dHelper
from soframe.testing import compare
from tests.curvature import fill, randn
from tests.examples import examples

MODES = ["zeros", "reflect", "replicate", "circular"]


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, Tensor]:
    """A convolution of any geometry and inputs that it takes."""
    groups, depthwise = draw(st.sampled_from([(1, False), (2, False), (2, True), (3, True)]))
    channels = groups * (1 if depthwise else draw(st.integers(1, 2)))
    out = groups * draw(st.integers(1, 2))
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, dilation = draw(pair), draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.sampled_from(["same", "valid", 0, 1, (0, 1), (2, 1)]))
    stride = (1, 1) if padding == "same" else draw(pair)
    height, width = draw(st.integers(3, 5)), draw(st.integers(3, 5))
    mode = draw(st.sampled_from(MODES))
    if padding == "valid":
        assume(dilation[0] * (kernel[0] - 1) < height and dilation[1] * (kernel[1] - 1) < width)
    elif padding != "same":
        rows, columns = (padding, padding) if isinstance(padding, int) else padding
        assume(dilation[0] * (kernel[0] - 1) < height + 2 * rows)
        assume(dilation[1] * (kernel[1] - 1) < width + 2 * columns)
    conv = nn.Conv2d(
        channels,
        out,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    inputs = randn(2, channels, height, width, seed=draw(st.integers(0, 9)))
    layout = draw(st.sampled_from(["plain", "channels_last", "unbatched"]))
    if layout == "channels_last":
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        conv = conv.to(memory_format=torch.channels_last)
    elif layout == "unbatched":
        inputs = inputs[0]
    fill(conv)
    try:
        conv(inputs)
    except RuntimeError:  # circular and reflected padding have their own bounds
        assume(False)
    return conv, inputs


def padded(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The inputs as the kernel meets them, ``[batch, channels, height, width]``."""
    sides = []  # of the last dimension first
    for axis in (1, 0):
        if conv.padding == "same":
            total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            sides += [total // 2, total - total // 2]
        else:
            own = 0 if conv.padding == "valid" else conv.padding[axis]
            sides += [own, own]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(x, sides, mode=mode)


def rows_by_loops(conv: nn.Conv2d, inputs: Tensor) -> Tensor:
    """``[groups, batch, positions, features]``, one entry at a time."""
    x = padded(conv, inputs if inputs.dim() == 4 else inputs[None])
    shape = conv(inputs).shape[-2:]
    (height, width), (kh, kw) = shape, conv.kernel_size
    (sh, sw), (dh, dw) = conv.stride, conv.dilation
    channels = conv.in_channels // conv.groups
    rows = torch.zeros(conv.groups, len(x), height * width, channels * kh * kw, dtype=torch.float64)
    for g in range(conv.groups):
        for t in range(height * width):
            top, left = t // width * sh, t % width * sw
            patch = x[:, g * channels : (g + 1) * channels, top:, left:]
            patch = patch[:, :, : (kh - 1) * dh + 1 : dh, : (kw - 1) * dw + 1 : dw]
            rows[g, :, t] = patch.permute(0, 2, 3, 1).flatten(1)
    return rows


def rows_by_autograd(conv: nn.Conv2d, inputs: Tensor) -> Tensor:
    """``[groups, batch, positions, features]``: what each output has for a Jacobian."""
    first = conv.out_channels // conv.groups

    def outputs(weight: Tensor) -> Tensor:
        y = torch.func.functional_call(conv, {"weight": weight}, (inputs,))
        return (y if y.dim() == 4 else y[None])[:, ::first].flatten(2)

    jacobian = torch.autograd.functional.jacobian(outputs, conv.weight.detach())
    # The first output channel of a group depends on its own row of the weight alone.
    return torch.stack(
        [jacobian[:, g, :, g * first].movedim(2, -1).flatten(2) for g in range(conv.groups)]
    )


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch says that it copies
@given(case=convolutions())
@settings(max_examples=examples(50))
def test_rows(case: tuple[nn.Conv2d, Tensor]) -> None:
    check_rows(*case)


GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"stride": (2, 1), "padding": (1, 2), "bias": False},
    {"padding": "valid", "dilation": (2, 1)},
    *[{"padding": "same", "dilation": (1, 3), "padding_mode": mode} for mode in MODES],
    *[{"padding": (0, 1), "stride": 2, "padding_mode": mode} for mode in MODES],
    {"groups": 2, "padding": 1},
    {"groups": 4, "dilation": 2, "padding": (2, 1)},
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
def test_rows_of_common_geometries(options: dict[str, Any]) -> None:
    conv = fill(nn.Conv2d(4, 8, (2, 2), **options))  # an even kernel: "same" is lopsided
    check_rows(conv, randn(3, 4, 5, 4))


def check_rows(conv: nn.Conv2d, inputs: Tensor) -> None:
    """Hold every kind of row of a helper to its definition."""
    helper = Conv2dHelper(conv)
    rows = helper.input_rows(inputs)
    compare(rows, rows_by_loops(conv, inputs), "input rows, by loops")
    compare(rows, rows_by_autograd(conv, inputs), "input rows, by autograd")

    output = conv(inputs)
    start = randn(*output.shape, seed=1)
    parameters = list(conv.parameters())
    gradients = torch.autograd.grad(output, parameters, start)
    output_rows = helper.output_rows(start)
    block_rows = helper.block_rows((inputs,), output_rows)
    product = torch.einsum("gnto,gnti->goi", output_rows, block_rows)
    matrix = helper.to_matrix(*gradients, *[None] * (2 - len(gradients)))
    compare(product, matrix, "the gradient, from rows")
    assert tuple(matrix.shape) == helper.shape
    for packed, own in zip(helper.from_matrix(matrix), gradients, strict=False):
        assert torch.equal(packed, own)

    compare(
        mirror(helper.input_moment((inputs,), output_rows)),
        sum(torch.einsum("gi,gj->gij", r, r) for r in block_rows.flatten(1, 2).unbind(1)),
        "the moment of the inputs",
    )
    compare(
        mirror(helper.output_moment(output_rows)),
        sum(torch.einsum("gi,gj->gij", r, r) for r in output_rows.flatten(1, 2).unbind(1)),
        "the moment of the output gradients",
    )


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parts_have_no_column(frozen: str) -> None:
    conv = fill(nn.Conv2d(4, 6, 2, groups=2))
    helper = Conv2dHelper(conv, **{frozen: False})
    inputs, start = randn(3, 4, 3, 3), randn(3, 6, 2, 2, seed=1)
    kept = "bias" if frozen == "weight" else "weight"
    (gradient,) = torch.autograd.grad(conv(inputs), [conv.get_parameter(kept)], start)
    rows = helper.output_rows(start)
    product = torch.einsum("gnto,gnti->goi", rows, helper.block_rows((inputs,), rows))
    if kept == "weight":
        gradient = gradient.permute(0, 2, 3, 1)
    compare(product, gradient.reshape(2, 3, -1), f"the gradient of the {kept}")
    assert tuple(product.shape) == helper.shape
    weight, bias = helper.from_matrix(product)
    assert (weight is None, bias is None) == (frozen == "weight", frozen == "bias")
