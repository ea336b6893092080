"""Batches that are given up, modules that are exchanged, numbers that are not real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.testing import compare


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model(x).square().mean().backward()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def factors(preconditioner: soframe.Preconditioner) -> list[Tensor]:
    blocks = preconditioner.state_dict()["blocks"].values()
    return [tensor for block in blocks for tensor in block["factors"].values()]


def test_a_batch_that_is_given_up_leaves_nothing() -> None:
    results = []
    for given_up in (False, True):
        model = network()
        preconditioner = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
        if given_up:
            backward(model, seed=1)
            model.zero_grad()
            preconditioner.reset_batch()
        backward(model, seed=2)
        preconditioner.step()
        results.append([*factors(preconditioner), *(p.grad for p in model.parameters())])
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)


def test_an_exchanged_module_is_registered_anew() -> None:
    model = network()
    preconditioner = soframe.Preconditioner(model, kl_clip=None, statistics_every=10)
    backward(model, seed=1)
    preconditioner.step()
    model[2] = nn.Linear(4, 5).double()
    for seed in (2, 3):
        model.zero_grad()
        backward(model, seed)
        raw = model[2].weight.grad.clone()
        preconditioner.step()
    assert preconditioner.placement.work[1].shape == (1, 5, 5)
    assert not torch.equal(raw, model[2].weight.grad)
    found = factors(preconditioner)
    preconditioner.close()
    twin = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    model.zero_grad()
    backward(model, seed=3)
    twin.step()
    compare(found[3], factors(twin)[3], "G of the new module")


def test_complex_parameters_are_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    report = soframe.Preconditioner(model, kl_clip=None, statistics_every=1).report()
    reasons = {row.parameter: row.reason for row in report}
    assert reasons["0.weight"] == ""
    assert "complex" in reasons["1.weight"]
    with pytest.raises(ValueError, match="complex"):
        soframe.Preconditioner(model[1], kl_clip=None, statistics_every=1)
