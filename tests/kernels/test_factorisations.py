"""Factorisations in the ways of a GPU, beside torch's."""

import pytest
import torch
from torch import Tensor

from soframe.kernels import devices, factorisations
from tests.curvature import randn


@pytest.fixture
def matrices(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Of a size between the bounds, as if on a GPU."""
    monkeypatch.setattr(devices, "on_gpu", lambda _: True)
    monkeypatch.setattr(devices, "fast_double", lambda _: True)
    for name, bound in {"ALONE": 4, "FEW": 4, "JACOBI": 5}.items():
        monkeypatch.setattr(factorisations, name, bound)
    rows = randn(3, 7, 5)
    return rows.mT @ rows


def test_cholesky(matrices: Tensor) -> None:
    """One after the other, and with the number of each that fails."""
    matrices[1] = -torch.eye(5)
    lower, info = factorisations.cholesky(matrices)
    expected, numbers = torch.linalg.cholesky_ex(matrices)
    assert torch.equal(lower[[0, 2]], expected[[0, 2]])
    assert info.tolist() == numbers.tolist() == [0, 1, 0]


def test_eigh(matrices: Tensor) -> None:
    """In float64, rounded at the end alone."""
    single = matrices.float()
    found = factorisations.eigh(single)
    for one, expected in zip(found, torch.linalg.eigh(single.double()), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, expected.float())
