"""State that moves to the blocks of a model that has changed, and state that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers import BlockShape
from soframe.methods import Call, Direction, Given, Method
from soframe.specs import FactorSpec
from soframe.testing import compare
from tests import kit
from tests.curvature import closing, fill, randn

EVERY: dict[str, Any] = {"statistics_every": 1, "solve_every": 2, "decay": 0.5}


def network() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)))


def loss(model: nn.Module, step: int) -> Tensor:
    return model(randn(6, 3, seed=step)).square().sum(1).mean()


def block_of(own: soframe.Preconditioner, name: str) -> Any:
    (block,) = [block for block in own.blocks if block.name == name]
    return block


def train(model: nn.Module, own: soframe.Preconditioner, steps: range) -> None:
    kit.train(model, loss, steps, own)


def running(own: soframe.Preconditioner, name: str) -> dict[str, Tensor]:
    return {factor: tensor.clone() for factor, tensor in block_of(own, name).running.items()}


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_another_module_of_the_same_shape_begins_anew(method: str) -> None:
    """Though it has the name, the method and the shape of the former one."""
    model = network()
    with closing(soframe.Preconditioner(model, method, kl_clip=None, **EVERY)) as own:
        train(model, own, range(3))
        kept = block_of(own, "0").record.updates
        model[2] = fill(nn.Sequential(nn.Linear(4, 4)))[0]
        train(model, own, range(3, 5))
        found = running(own, "2")
        # The first step with the new module notices it, and has no statistics of it.
        assert block_of(own, "2").record.updates == 1
        assert block_of(own, "0").record.updates == kept + 2
    with closing(soframe.Preconditioner(model, method, kl_clip=None, **EVERY)) as twin:
        train(model, twin, range(4, 5))
        expected = running(twin, "2")
    for name in ("A", "G"):
        compare(found[name], expected[name], name)


def test_a_block_whose_method_changes_begins_anew() -> None:
    """The former head is within the model, once another layer follows it."""
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)))
    settings: dict[str, Any] = {"lr": 0.1, "auxiliary": "adamw"}
    with closing(soframe.Preconditioner(model, "muon", **settings)) as own:
        train(model, own, range(3))
        before = block_of(own, "2.weight")
        assert set(before.state) == {"mean", "square"}
        model.append(fill(nn.Sequential(nn.Linear(4, 2)))[0])
        train(model, own, range(3, 5))
        after = block_of(own, "2.weight")
        assert set(after.state) == {"momentum"}
        assert after.record.updates < 5
        assert block_of(own, "0.weight").record.updates == 5


CHANGES: dict[str, tuple[Callable[[nn.Sequential], Any], slice]] = {
    "bias": (lambda model: model[2].bias.requires_grad_(False), slice(-1)),
    "weight": (lambda model: model[2].weight.requires_grad_(False), slice(-1, None)),
}


@pytest.mark.parametrize("frozen", CHANGES)
def test_the_factors_of_what_is_left_stay(frozen: str) -> None:
    """Of a layer that loses its bias or its weight: rows and columns of the rest."""
    change, columns = CHANGES[frozen]
    model = network()
    every = {"statistics_every": 4, "solve_every": 4, "decay": 0.5}
    with closing(soframe.Preconditioner(model, kl_clip=None, **every)) as own:
        train(model, own, range(1))
        before = running(own, "2")
        change(model)
        train(model, own, range(1, 2))  # without statistics
        after = running(own, "2")
    assert torch.equal(after["G"], before["G"])
    assert torch.equal(after["A"], before["A"][:, columns, columns])


@dataclass(frozen=True)
class OfTwoInputs(Method):
    """The moment of the first two inputs, with which it does nothing."""

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return (FactorSpec("A", "right", shape.groups, 2),)

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        return {"A": call.input_moment()[:, :2, :2]}

    def direct(self, given: Given) -> Direction:
        return Direction(given.gradient)


def test_a_factor_of_some_inputs_begins_anew() -> None:
    """Of its rows none is known to be the bias's."""
    model = network()
    with closing(soframe.Preconditioner(model, OfTwoInputs(), kl_clip=None, **EVERY)) as own:
        train(model, own, range(3))
        CHANGES["bias"][0](model)
        train(model, own, range(3, 5))
        found = running(own, "2")
    with closing(soframe.Preconditioner(model, OfTwoInputs(), kl_clip=None, **EVERY)) as twin:
        train(model, twin, range(4, 5))
        compare(found["A"], running(twin, "2")["A"], "A")


def test_counters_move_with_a_block() -> None:
    model = network()
    with closing(soframe.Preconditioner(model, kl_clip=None, **EVERY)) as own:
        train(model, own, range(4))
        before = block_of(own, "0").record
        kept = (before.updates, dict(before.masses), before.statistics_at, before.solved_at)
        model[3] = fill(nn.Sequential(nn.Linear(4, 2)))[0]
        model.zero_grad()
        loss(model, 4).backward()
        factors = running(own, "0")
        own.step()
        after = block_of(own, "0").record
        assert after.updates == kept[0] + 1
        assert after.masses.keys() == kept[1].keys()
        assert all(after.masses[name] != 0 for name in kept[1])
        assert running(own, "0").keys() == factors.keys()
