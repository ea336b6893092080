"""The linear layer of the trust region's derivatives."""

from __future__ import annotations

import torch

from soframe.kernels import products
from soframe.testing import compare
from tests.curvature import randn


def test_a_linear_layer_adds_in_place() -> None:
    x, weight, bias = randn(2, 5, 6), randn(4, 6), randn(4)
    start = randn(2, 5, 4)
    added = start.clone()
    found = products.linear(x, weight, bias, added=added)
    compare(found, x @ weight.T + bias + start, "linear", rtol=1e-12)
    assert found.data_ptr() == added.data_ptr()


def test_a_layer_of_no_width_has_its_bias() -> None:
    x, weight, bias = torch.ones(2, 3, 0), torch.ones(4, 0), torch.arange(4.0)
    for added in (None, torch.zeros(2, 3, 4)):
        found = products.linear(x, weight, bias, added=added)
        assert torch.equal(found, bias.expand(2, 3, 4))
    none = products.linear(torch.ones(2, 3), torch.ones(0, 3), added=torch.ones(2, 0))
    assert none.shape == (2, 0)
