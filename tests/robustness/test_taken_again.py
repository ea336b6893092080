"""A step that raised midway, in a solve that ran out of memory, is not silently taken again."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import soframe


def build(method: str, **settings: Any) -> tuple[nn.Module, soframe.Preconditioner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, soframe.Preconditioner(model, method=method, kl_clip=None, **settings)


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).double()
    model.zero_grad()
    model(x).square().sum(1).mean().backward()


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def test_statistics_are_not_taken_twice() -> None:
    model, own = build("kfac", statistics_every=1, solve_every=1, solver="eigen", decay=0.9)
    backward(model, 0)
    own.step()
    backward(model, 1)
    with (
        mock.patch("torch.linalg.eigh", side_effect=NO_MEMORY),
        pytest.raises(torch.OutOfMemoryError),
    ):
        own.step()
    factors = {name: own.blocks[0].running[name].clone() for name in ("A", "G")}
    with pytest.raises(UserWarning, match="gradients without statistics"):  # an error in tests
        own.step()
    for name, before in factors.items():
        assert torch.equal(own.blocks[0].running[name], before)
    # The next batch goes on.
    backward(model, 2)
    own.step()
    twin, other = build("kfac", statistics_every=1, solve_every=1, solver="eigen", decay=0.9)
    for seed in (0, 1, 2):
        backward(twin, seed)
        other.step()
    for name in ("A", "G"):
        assert torch.allclose(own.blocks[0].running[name], other.blocks[0].running[name])
