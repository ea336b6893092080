"""Convolutions of other dimensions and transposed ones: rows against autograd, in any geometry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.layers import Conv2dHelper, LayerHelper
from soframe.layers.conv import ConvTranspose2dHelper
from soframe.registry import KINDS
from soframe.testing import check_layer_helper, compare, dense_fisher
from tests import kit
from tests.curvature import (
    blocks,
    check_exact,
    closing,
    factors,
    fill,
    log_cosh,
    preconditioner,
    randn,
)
from tests.examples import examples

Conv = nn.modules.conv._ConvNd
PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def rows_by_autograd(conv: Any, inputs: Tensor, size: Any = None) -> Tensor:
    """``[groups, batch, positions, features]``: what each output has for a Jacobian."""
    dimensions = len(conv.kernel_size)
    first = conv.out_channels // conv.groups
    settings = {} if size is None else {"output_size": size}

    def outputs(weight: Tensor) -> Tensor:
        y = torch.func.functional_call(conv, {"weight": weight}, (inputs,), settings)
        return (y if y.dim() == dimensions + 2 else y[None])[:, ::first].flatten(2)

    jacobian = torch.autograd.functional.jacobian(outputs, conv.weight.detach())
    rows = []
    for g in range(conv.groups):
        if conv.transposed:  # [in, out / groups, kernel]
            into = conv.in_channels // conv.groups
            own = jacobian[:, g, :, g * into : (g + 1) * into, 0]
        else:  # the first output of a group depends on its own row of the weight alone
            own = jacobian[:, g, :, g * first]
        rows.append(own.movedim(2, -1).flatten(2))
    return torch.stack(rows)


def helper_of(conv: Any) -> LayerHelper:
    """The helper that there is for a convolution."""
    chosen = KINDS["layer"].lookup(type(conv), optional=True)
    assert chosen is not None
    assert chosen.unsupported(conv) is None
    return chosen(conv)


def check(conv: Any, inputs: Tensor) -> None:
    """Hold the rows to autograd's, and all that follows from them."""
    rows = helper_of(conv).input_rows(inputs)
    compare(rows, rows_by_autograd(conv, inputs), "input rows")
    if inputs.dim() == len(conv.kernel_size) + 2:
        check_layer_helper(conv, inputs)


@st.composite
def convolutions(draw: st.DrawFn, transposed: bool) -> tuple[Any, Tensor]:
    """A convolution of any geometry and inputs that it takes."""
    dimensions = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    into, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(low, high)] * dimensions))

    options: dict[str, Any] = {"kernel_size": numbers(1, 3), "dilation": numbers(1, 2)}
    options |= {"stride": numbers(1, 2), "padding": numbers(0, 2), "groups": groups}
    options["bias"] = draw(st.booleans())
    if transposed:
        options["output_padding"] = numbers(0, 1)
    else:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "circular"]))
        if draw(st.booleans()):
            options |= {"padding": "same", "stride": 1}
    kinds = TRANSPOSED if transposed else PLAIN
    conv = fill(kinds[dimensions](into, out, **options))
    inputs = randn(2, into, *numbers(1, 4 if dimensions < 3 else 3))
    try:
        assume(conv(inputs).numel() > 0)
    except (RuntimeError, ValueError):  # torch says what does not fit
        assume(False)
    # Where the kernel meets nothing but padding there is no gradient to precondition.
    assume(bool(rows_by_autograd(conv, inputs).flatten(1).any(1).all()))
    return conv, inputs


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(case=convolutions(transposed=False))
@settings(max_examples=examples(25))
def test_rows(case: tuple[Any, Tensor]) -> None:
    check(*case)


@given(case=convolutions(transposed=True))
@settings(max_examples=examples(25))
def test_rows_of_transposed_ones(case: tuple[Any, Tensor]) -> None:
    check(*case)


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="replicate"), (2, 2, 5)),
    "1d, depthwise": (lambda: nn.Conv1d(4, 4, 4, groups=4, padding=3), (2, 4, 6)),
    "1d, even kernel, same": (lambda: nn.Conv1d(2, 2, 2, padding="same"), (2, 2, 5)),
    "1d, unbatched": (lambda: nn.Conv1d(2, 3, 2), (2, 5)),
    "3d": (lambda: nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 1, 2), groups=2), (2, 2, 3, 4, 5)),
    "3d, circular": (
        lambda: nn.Conv3d(1, 2, 2, padding=(1, 0, 1), padding_mode="circular", dilation=(1, 2, 1)),
        (2, 1, 3, 4, 3),
    ),
    "3d, unbatched": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 2, 3)),
    "transposed 1d": (
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1),
        (2, 2, 4),
    ),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 1), groups=2, dilation=(1, 2)),
        (2, 4, 3, 2),
    ),
    "transposed 2d, unbatched": (lambda: nn.ConvTranspose2d(2, 2, 2, stride=2), (2, 3, 2)),
    "transposed 2d, padded beyond the kernel": (
        lambda: nn.ConvTranspose2d(2, 2, (1, 2), stride=2, padding=(1, 2), output_padding=(1, 0)),
        (2, 2, 4, 5),
    ),
    "transposed 3d": (
        lambda: nn.ConvTranspose3d(2, 2, (2, 1, 3), stride=(1, 2, 2), padding=(0, 0, 1)),
        (2, 2, 2, 2, 3),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES)
def test_rows_of_common_geometries(case: str) -> None:
    make, shape = CASES[case]
    check(fill(make()), randn(*shape))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dimensions", [1, 3])
def test_blocks_of_one_position_are_the_dense_fisher(dimensions: int, groups: int) -> None:
    """One sample at one position: there K-FAC is exact, whatever comes after."""
    shape = (2, 3, 2)[:dimensions]
    conv = PLAIN[dimensions](2, 4, shape, groups=groups)
    model = fill(nn.Sequential(conv, nn.Flatten(), nn.Tanh(), nn.Linear(4, 2)))
    with closing(preconditioner(model, layers="all")) as own:
        assert len(blocks(own)) == 2
        check_exact(model, own, [(randn(1, 2, *shape), randn(1, 2))], log_cosh)


def test_a_transposed_block_of_one_position_is_the_dense_fisher() -> None:
    conv = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=(3, 2))  # 3 x 2 inputs, one output
    model = fill(nn.Sequential(conv, nn.Flatten(), nn.Tanh(), nn.Linear(3, 2)))
    x, y = randn(1, 2, 3, 2), randn(1, 2)
    assert model[0](x).shape[2:] == (1, 1)
    with closing(preconditioner(model, layers="all")) as own:
        log_cosh(model(x), y).backward()
        own.step()
        ((a,), (g,)) = factors(own, "0")
    names = ["0.weight", "0.bias"]
    dense = dense_fisher(model, x, log_cosh, y, parameters=names, kind="empirical")
    places = torch.arange(54).view(2, 3, 3, 3).permute(1, 2, 3, 0).flatten(1)
    order = torch.cat([places, torch.arange(54, 57).view(3, 1)], 1).flatten()
    compare(torch.kron(g, a), dense[order][:, order], "block")


@pytest.mark.parametrize("method", ["kfac", "kfac-reduce"])
def test_a_transposed_block_is_that_of_the_same_convolution(method: str) -> None:
    """Zeros between the inputs by hand, and the kernel turned round."""
    transposed = fill(nn.Sequential(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1)))
    same = fill(nn.Sequential(nn.Conv1d(2, 3, 3, padding=1)))
    with torch.no_grad():
        same[0].weight.copy_(transposed[0].weight.transpose(0, 1).flip(2))
        same[0].bias.copy_(transposed[0].bias)
    x = randn(4, 2, 5)
    spread = x.new_zeros(4, 2, 9)
    spread[:, :, ::2] = x
    gradients = []
    for model, given_inputs in ((transposed, x), (same, spread)):
        with closing(preconditioner(model, layers="all", method=method)) as own:
            model(given_inputs).cosh().sum().backward()
            own.step()
        gradients.append(model[0].weight.grad)
    compare(gradients[0], gradients[1].flip(2).transpose(0, 1), "preconditioned gradient")


@pytest.mark.parametrize("size", [[7, 5], [8, 6]])
def test_a_call_may_name_the_size_of_its_output(size: list[int]) -> None:
    conv = fill(nn.ConvTranspose2d(2, 3, 3, stride=2))
    x = randn(2, 2, 3, 2)
    helper = helper_of(conv)
    inputs = helper.inputs((x,), {"output_size": size})
    compare(helper.input_rows(*inputs), rows_by_autograd(conv, x, size), "input rows")
    check_layer_helper(conv, x, settings={"output_size": size})


def test_other_geometries_are_refused() -> None:
    plain = Conv2dHelper.unsupported(nn.ConvTranspose2d(2, 2, 2))
    assert plain == "transposed convolutions of 2 dimension(s) have another geometry"
    turned = ConvTranspose2dHelper.unsupported(nn.Conv1d(2, 2, 2))
    assert turned == "convolutions of 1 dimension(s) have another geometry"


@pytest.mark.parametrize("kind", [*PLAIN.values(), *TRANSPOSED.values()])
def test_every_convolution_has_a_block_by_default(kind: Any) -> None:
    with closing(preconditioner(nn.Sequential(kind(2, 3, 2), nn.ReLU()))) as own:
        assert set(blocks(own)) == {"0"}


def test_convolutions_of_one_input_with_other_paddings() -> None:
    """Their factors of inputs are not shared: zeros and the other edge are other rows."""

    class Two(nn.Module):
        def __init__(self, *modes: Any) -> None:
            super().__init__()
            self.convs = nn.ModuleList(
                nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode) for mode in modes
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([conv(x).square().sum() for conv in self.convs]).sum()

    def factors(*modes: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Two(*modes).double()
        own = kit.precondition(model)
        model(randn(4, 2, 5, 5)).backward()
        own.step()
        found = [block.running["A"].clone() for block in own.blocks]
        own.close()
        return found

    both = factors("zeros", "circular")
    assert torch.equal(both[0], factors("zeros")[0])
    torch.testing.assert_close(both[1], factors("circular")[0])
    assert not torch.allclose(both[0], both[1])
