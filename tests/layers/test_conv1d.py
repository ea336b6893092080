"""Linear layers with transposed weights: found by name, equal to ``nn.Linear``."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.layers import TransposedLinearHelper
from soframe.testing import check_layer_helper, compare
from tests.curvature import blocks, closing, factors, fill, preconditioner, randn


class Conv1D(nn.Module):
    """``y = x W + b``, like that of GPT-2."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.nf, self.nx = out, into
        self.weight = nn.Parameter(torch.empty(into, out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


Named = type("Conv1D", (Conv1D,), {"__module__": "transformers.pytorch_utils"})


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4)])
def test_rows_are_those_of_autograd(shape: tuple[int, ...]) -> None:
    check_layer_helper(fill(Conv1D(3, 4)), torch.randn(shape), helper=TransposedLinearHelper)
    check_layer_helper(fill(Named(3, 4)), torch.randn(shape))


@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
def test_its_block_is_that_of_a_linear_layer(frozen: str) -> None:
    transposed, linear = fill(nn.Sequential(Named(3, 4))), fill(nn.Sequential(nn.Linear(4, 3)))
    with torch.no_grad():
        linear[0].weight.copy_(transposed[0].weight.T)
        linear[0].bias.copy_(transposed[0].bias)
    found = []
    for model in (transposed, linear):
        if frozen:
            model[0].get_parameter(frozen).requires_grad_(False)
        with closing(preconditioner(model, layers="all")) as own:
            model(randn(6, 4)).square().mean().backward()
            own.step()
            found.append(factors(own, "0"))
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")
    if frozen != "weight":
        compare(transposed[0].weight.grad.T, linear[0].weight.grad, "direction")
    if frozen != "bias":
        compare(transposed[0].bias.grad, linear[0].bias.grad, "direction")


def test_it_is_found_by_name() -> None:
    model: Any = nn.Sequential(Named(3, 4), nn.Linear(3, 2), Conv1D(2, 2))
    fill(model)
    with closing(preconditioner(model)) as own:
        assert set(blocks(own)) == {"0", "1"}


def test_the_real_one() -> None:
    transformers = pytest.importorskip("transformers.pytorch_utils")
    check_layer_helper(fill(transformers.Conv1D(3, 4)), torch.randn(5, 2, 4))


def test_a_bias_that_does_not_fit_is_refused() -> None:
    module = Conv1D(3, 4)
    module.bias = nn.Parameter(torch.zeros(4))
    reason = TransposedLinearHelper.unsupported(module)
    assert reason is not None
    assert "does not fit" in reason
