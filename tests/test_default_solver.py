"""The solver by default follows the size of the model and its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import soframe
from soframe.blocks.registration import EIGEN_ON_CPU
from soframe.solvers import Eigen, Inverse, Relative
from tests import kit

LONG = EIGEN_ON_CPU + 1


def network(side: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Conv1d(side, 2, 1, bias=False))


def solvers(model: nn.Module, method: Any = "kfac", **settings: Any) -> tuple[set[type], str]:
    """The classes of the solvers of all blocks, and the heading of the report."""
    own = kit.precondition(model, method, layers="all", **settings)
    own.close()
    heading, _ = str(own.report()).split("\nparameter")
    return {type(block.solver) for block in own.blocks}, heading


@pytest.mark.parametrize(
    ("side", "settings", "solver", "why"),
    [
        (
            EIGEN_ON_CPU,
            {},
            Eigen,
            f"'eigen' by default: on the CPU no side is above {EIGEN_ON_CPU}",
        ),
        (LONG, {}, Inverse, f"'inverse' by default: a side of {LONG} on the CPU"),
        (LONG, {"method": "newton-muon"}, Inverse, "'inverse' by default"),
        (LONG, {"method": "ekfac", "solve_every": 9}, Eigen, "does not take 'inverse'"),
        (LONG, {"damping": "relative"}, Relative, "'inverse' by default"),
        (LONG, {"solver": "eigen"}, Eigen, ""),
        (LONG, {"solver": {"0": "eigen", "1": "eigen"}}, Eigen, ""),
        (LONG, {"method": soframe.methods.KFAC(max_size=64)}, Eigen, "'eigen' by default"),
    ],
    ids=str,
)
def test_it_is_one_for_the_whole_model(
    side: int, settings: dict[str, Any], solver: type, why: str
) -> None:
    found, heading = solvers(network(side), **settings)
    assert found == {solver}
    assert why in heading
    assert why or "by default" not in heading


def test_on_an_accelerator_it_is_eigen() -> None:
    with torch.device("meta"):
        assert solvers(network(LONG))[0] == {Eigen}


def test_it_stays_when_layers_are_frozen_and_states_load() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, LONG), nn.Linear(LONG, 2))
    own = kit.precondition(model)

    def loss(net: nn.Module, step: int) -> torch.Tensor:
        return net(torch.full((2, 3), 1.0 + step)).square().mean()

    kit.train(model, loss, range(1), own)
    saved = own.state_dict()
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)  # what is left has sides of two
    kit.train(model, loss, range(1), own)
    assert {type(block.solver) for block in own.blocks} == {Inverse}
    assert "'inverse' by default" in str(own.report())
    own.close()
    model.requires_grad_(True)
    again = kit.precondition(model)
    again.load_state_dict(saved)
    assert {type(block.solver) for block in again.blocks} == {Inverse}
    assert all(block.solved for block in again.blocks)
