"""Bases and their order under TensorFloat-32, emulated: products round float32 to ten bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from soframe.solvers import Basis, OrthogonalIteration
from soframe.solvers.base import Solver
from tests.curvature import randn

PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)


class TensorFloat(TorchFunctionMode):
    """Rounds the operands of products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            args = tuple(rounded(one) for one in args)
        return func(*args, **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@pytest.fixture(autouse=True)
def _high() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("solver", [Basis(), OrthogonalIteration(tolerance=10.0)], ids=repr)
def test_the_order_of_a_basis(solver: Solver) -> None:
    """A spectrum of six decades over 48 columns, of which the last basis has a slightly other."""
    basis = torch.linalg.qr(randn(2, 48, 48))[0]
    factor = (basis * torch.logspace(0, -6, 48, dtype=torch.float64)) @ basis.mT
    nearby = torch.linalg.qr(basis + 1e-3 * randn(2, 48, 48, seed=1))[0].float()
    last = {"vectors": nearby, "values": torch.ones(2, 48), "order": torch.ones(2, 48)}
    matrix, damping = factor.float(), torch.zeros(2)
    exact = solver.solve_again(matrix, damping, last)
    with TensorFloat():
        assert (randn(8, 8).float() @ torch.eye(8) != randn(8, 8).float()).any()  # it rounds
        found = solver.solve_again(matrix, damping, last)
    if "order" in found:
        assert torch.equal(found["order"], exact["order"])
    # Where eigenvalues are above the rounding of float32.
    values = (found["vectors"].double().mT @ factor @ found["vectors"].double()).diagonal(0, 1, 2)
    expected = exact["vectors"].double()
    expected = (expected.mT @ factor @ expected).diagonal(0, 1, 2)
    torch.testing.assert_close(values[:, :36], expected[:, :36], rtol=0.02, atol=0)
