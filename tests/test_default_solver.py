"""The default solver is the inverse, where every method takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import soframe
from soframe.solvers import Eigen, Inverse, Relative
from tests import kit


def network() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 5), nn.Conv1d(4, 2, 1, bias=False))


def solvers(model: nn.Module, method: Any = "kfac", **settings: Any) -> tuple[set[type], str]:
    """The classes of the solvers of all blocks, and the heading of the report."""
    own = soframe.Preconditioner(model, method, layers="all", kl_clip=None, **settings)
    own.close()
    heading, _ = str(own.report()).split("\nparameter")
    return {type(block.solver) for block in own.blocks}, heading


@pytest.mark.parametrize(
    ("settings", "solver", "why"),
    [
        ({}, Inverse, "solver 'inverse' by default"),
        ({"method": "newton-muon"}, Inverse, "solver 'inverse' by default"),
        ({"method": "ekfac"}, Eigen, "solver 'eigen' by default, since a method"),
        ({"method": {"0": "ekfac", ".*": "kfac"}}, Eigen, "'eigen' by default, since a method"),
        ({"damping": "relative"}, Relative, "solver 'inverse' by default"),
        ({"solver": "eigen"}, Eigen, ""),
        ({"solver": {"0": "eigen", ".*": "eigen"}}, Eigen, ""),
        ({"method": soframe.methods.KFAC(max_size=2)}, Inverse, "solver 'inverse' by default"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_one_for_the_whole_model(
    settings: dict[str, Any], solver: type, why: str, device: str
) -> None:
    with torch.device(device):
        found, heading = solvers(network(), **settings)
    assert found == {solver}
    assert why in heading
    assert why or "by default" not in heading


def test_it_stays_when_layers_are_frozen_and_states_load() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    own = soframe.Preconditioner(model, kl_clip=None)

    def loss(net: nn.Module, step: int) -> torch.Tensor:
        return net(torch.full((2, 3), 1.0 + step)).square().mean()

    kit.train(model, loss, range(1), own)
    saved = own.state_dict()
    model[0].requires_grad_(False)
    kit.train(model, loss, range(1), own)
    assert {type(block.solver) for block in own.blocks} == {Inverse}
    assert "'inverse' by default" in str(own.report())
    own.close()
    model.requires_grad_(True)
    again = soframe.Preconditioner(model, kl_clip=None)
    again.load_state_dict(saved)
    again.close()
    other = soframe.Preconditioner(model, kl_clip=None, solver="eigen")
    other.load_state_dict(saved)  # solves anew with the factors
    assert {type(block.solver) for block in other.blocks} == {Eigen}
