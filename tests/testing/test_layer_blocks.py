"""Layer blocks against per-sample gradients written out as layer matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.testing import (
    compare,
    dense_fisher,
    layer_fisher,
    layer_matrix_basis,
    layer_parameters,
    sample_gradients,
)
from tests.testing.test_dense import half_square, linear, randn, with_one

CONVOLUTIONS = [
    (nn.Conv1d, {"in_channels": 2, "out_channels": 3, "kernel_size": 2}),
    (nn.Conv2d, {"in_channels": 2, "out_channels": 3, "kernel_size": (2, 3), "bias": False}),
    (nn.Conv2d, {"in_channels": 4, "out_channels": 6, "kernel_size": (2, 1), "groups": 2}),
    (nn.Conv2d, {"in_channels": 3, "out_channels": 3, "kernel_size": 2, "groups": 3}),
    (nn.Conv3d, {"in_channels": 1, "out_channels": 2, "kernel_size": (1, 2, 2)}),
]


@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS)
def test_basis_is_weight_with_channels_last_beside_bias(
    kind: type[nn.Conv2d], options: dict[str, Any]
) -> None:
    module = kind(**options)
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    matrix = module.weight.detach().movedim(1, -1).flatten(1)
    if module.bias is not None:
        matrix = torch.cat([matrix, module.bias.detach()[:, None]], 1)
    basis = layer_matrix_basis(module)
    assert torch.equal(flat[basis].flatten(0, 1), matrix)
    assert basis.shape[:2] == (module.groups, module.out_channels // module.groups)
    assert torch.equal(basis.flatten().sort().values, torch.arange(len(flat)))
    back = torch.empty_like(flat)
    for group, rows in zip(basis, matrix.chunk(module.groups), strict=True):
        back[group] = rows
    assert torch.equal(back, flat)


def test_basis_of_frozen_parts() -> None:
    module = nn.Linear(2, 3)
    assert layer_matrix_basis(module).tolist() == [[[0, 1, 6], [2, 3, 7], [4, 5, 8]]]
    assert layer_matrix_basis(module, bias=False).tolist() == [[[0, 1], [2, 3], [4, 5]]]
    module.weight.requires_grad_(False)
    assert layer_matrix_basis(module).tolist() == [[[0], [1], [2]]]
    assert layer_matrix_basis(module, weight=True).tolist()[0][0] == [0, 1, 6]
    module.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="both"):
        layer_matrix_basis(module)
    with pytest.raises(TypeError, match="ConvTranspose1d"):
        layer_matrix_basis(nn.ConvTranspose1d(1, 1, 1))


@pytest.mark.parametrize("out", [1, 3])
def test_linear_layer_with_bias_is_a_kronecker_product(out: int) -> None:
    x, y = randn(5, 2), randn(5, out, seed=1)
    a = with_one(x).T @ with_one(x) / 5
    (block,) = layer_fisher(linear(2, out), "", x, half_square, y, kind="type-2")
    compare(block, torch.kron(torch.eye(out, dtype=torch.float64), a), "linear")


def test_grouped_convolution_block_per_group() -> None:
    """Rows by unfold: gradient of group g = sum_t (output gradient) (patch, 1)^T."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (2, 1), stride=(1, 2), padding=(1, 0), groups=2).double()
    x = randn(3, 4, 3, 3)
    y = randn(*conv(x).shape, seed=1)
    expected = [torch.zeros(15, 15, dtype=torch.float64) for _ in range(2)]
    for n in range(3):
        residual = (conv(x[n : n + 1]) - y[n : n + 1]).detach().flatten(2)[0]
        for g in range(2):
            channels = x[n : n + 1, 2 * g : 2 * g + 2]
            patches = F.unfold(channels, (2, 1), stride=(1, 2), padding=(1, 0))[0].T
            patches = patches.unflatten(1, (2, 2)).mT.flatten(1)  # channels last
            row = (residual[3 * g : 3 * g + 3] @ with_one(patches)).flatten()
            expected[g] += torch.outer(row, row) / 3
    blocks = layer_fisher(conv, "", x, half_square, y)
    assert len(blocks) == 2
    for g in range(2):
        compare(blocks[g], expected[g], f"group {g}")


class Shuffled(nn.Module):
    """Registers the bias before the weight, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3).double()
        weight, bias = self.layer.weight, self.layer.bias
        del self.layer.weight, self.layer.bias
        self.layer.bias, self.layer.weight = bias, weight
        self.scale = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", ["", "layer.weight", "layer.bias"])
def test_order_does_not_depend_on_registration(frozen: str) -> None:
    model, x, y = Shuffled(), randn(4, 2), randn(4, 3, seed=1)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    columns = {"": with_one(x), "layer.weight": with_one(x)[:, 2:], "layer.bias": x}[frozen]
    a = 4 * columns.T @ columns / 4  # scale squared
    eye = torch.eye(3, dtype=torch.float64)
    (block,) = layer_fisher(model, "layer", x, half_square, y, kind="type-2")
    compare(block, torch.kron(eye, a), "layer")

    names = [n for n in ("layer.weight", "layer.bias") if n != frozen]
    assert layer_parameters(model, "layer") == tuple(names)
    assert layer_parameters(model, "") == ("scale",)
    own = dense_fisher(model, x, half_square, y, parameters=["scale"], kind="type-2")
    compare(own, (model.layer(x) ** 2).sum().reshape(1, 1) / 4, "scale")


def test_gradient_reads_and_writes_through_the_basis() -> None:
    model, x, y = linear(2, 3), randn(4, 2), randn(4, 3, seed=1)
    gradient = sample_gradients(model, x, half_square, y).mean(0)
    matrix = gradient[layer_matrix_basis(model)[0]]
    residual = (model(x) - y).detach()
    compare(matrix, residual.T @ with_one(x) / 4, "gradient matrix")
