"""Inverses of matrices that are enlarged before they are factorised, and in the way of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soframe.kernels import devices
from soframe.solvers import inverse
from soframe.testing import compare
from tests.curvature import randn

ENLARGED = [(40, 48), (256, 272), (257, 272), (500, 528), (255, 272), (272, 272), (1, 16)]


@pytest.mark.parametrize(("size", "enlarged"), ENLARGED)
def test_inverses_are_those_of_the_matrices_themselves(
    size: int, enlarged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []
    plain = torch.linalg.cholesky_ex

    def seen(matrix: Tensor) -> tuple[Tensor, Tensor]:
        met.append(matrix.shape[-1])
        return plain(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", seen)
    monkeypatch.setattr(inverse, "FRAMED", 1)
    square = randn(2, size, size)
    matrix, damping = square @ square.mT / size, torch.tensor([0.1, 0.2], dtype=torch.float64)
    got = inverse.Inverse().solve(matrix.tril(), damping)["inverse"]
    assert met == [enlarged]
    expected = torch.linalg.inv(matrix + damping.view(2, 1, 1) * torch.eye(size))
    compare(got, expected, "inverse", rtol=1e-9)
    assert got.is_contiguous()
    assert torch.equal(got, got.mT)


def test_small_matrices_stay_as_they_are() -> None:
    assert inverse.frame(inverse.FRAMED - 1) == 0
    assert inverse.frame(inverse.FRAMED) == 16


def test_an_indefinite_matrix_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse, "FRAMED", 1)
    matrix = torch.diag(torch.tensor([1.0, -1.0, 1.0])).unsqueeze(0)
    assert inverse.Inverse().solve(matrix, torch.tensor([0.1]))["inverse"].isnan().all()


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("double", [True, False])
def test_the_way_of_a_gpu(double: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch or several, with the same matrices as in the way of a processor."""
    square, damping = randn(3, 7, 5), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    matrix = square.mT @ square
    matrix[1] = -torch.eye(5)
    expected = inverse.Inverse().solve(matrix, damping)["inverse"]
    monkeypatch.setattr(devices, "on_gpu", lambda _: True)
    monkeypatch.setattr(devices, "fast_double", lambda _: double)
    monkeypatch.setattr(devices, "MOST", 25 * batch)
    got = inverse.Inverse().solve(matrix, damping)["inverse"]
    assert got[1].isnan().all()
    assert expected[1].isnan().all()
    compare(got[::2], expected[::2], "inverse", rtol=1e-12)
    assert torch.equal(got[::2], got[::2].mT)
