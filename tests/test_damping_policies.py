"""Damping policies of a user's own, within a preconditioner: asked, copied, saved."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import SGD

import soframe
from soframe import checkpoint
from soframe.damping.policies import DampingPolicy, adopted
from soframe.testing import compare
from tests import kit
from tests.distributed.harness import run_ranks


class Halving(DampingPolicy):
    """Each step has half the damping of the last one that was asked for."""

    def __init__(self, first: float = 1.0) -> None:
        self.asked: list[int] = []
        self.first = first

    def at(self, step: int) -> float:
        if step not in self.asked:
            self.asked.append(step)
        return self.first * 0.5 ** len(self.asked)

    def restart(self) -> None:
        self.asked.clear()

    def state(self) -> dict[str, float]:
        return {"asked": float(len(self.asked))}

    def load(self, state: Mapping[str, float]) -> None:
        self.asked[:] = range(int(state["asked"]))


class Fixed(DampingPolicy):
    def __init__(self, value: Any) -> None:
        self.value = value

    def at(self, step: int) -> float:
        damping: float = self.value
        return damping


def build(damping: Any, **settings: Any) -> tuple[nn.Module, soframe.Preconditioner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, kit.precondition(model, damping=damping, **settings)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).double()
    return model(x).square().mean()


def test_a_policy_goes_on_from_a_state() -> None:
    model, own = build(Halving())
    kit.train(model, loss_of, range(3), own, SGD(model.parameters(), lr=0.1))
    weights, state = model.state_dict(), own.state_dict()
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    expected = kit.train(model, loss_of, [3, 4], own, SGD(model.parameters(), lr=0.1))
    other, resumed = build(Halving())
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    sgd = SGD(other.parameters(), lr=0.1)
    assert torch.equal(kit.train(other, loss_of, [3, 4], resumed, sgd), expected)
    assert resumed.damping == own.damping


def test_and_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    model, own = build(Halving())
    kit.train(model, loss_of, range(3), own, SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"preconditioner": checkpoint.part(own)}, checkpoint_id=tmp_path / "saved")
    _, resumed = build(Halving())
    checkpoint.load(resumed, tmp_path / "saved")
    assert resumed.damping == own.damping


def test_a_state_of_another_policy_is_refused_and_changes_nothing() -> None:
    class Other(Halving):
        def state(self) -> dict[str, float]:
            return {"number": float(len(self.asked))}

        def load(self, state: Mapping[str, float]) -> None:
            self.asked[:] = range(int(state["number"]))

    model, own = build(Other())
    kit.train(model, loss_of, range(2), own, SGD(model.parameters(), lr=0.1))
    state = own.state_dict()
    _, resumed = build(Halving())
    with pytest.raises(ValueError, match=r"another damping policy than <.*Halving"):
        resumed.load_state_dict(state)
    assert resumed.steps == 0


def test_a_policy_without_its_state_says_that_it_begins_anew() -> None:
    model, own = build(0.1)
    kit.train(model, loss_of, range(1), own)
    _, resumed = build(Halving())
    with pytest.warns(UserWarning, match="begins anew") as caught:
        resumed.load_state_dict(own.state_dict())
    assert [warning.filename for warning in caught] == [__file__]
    _, plain = build(0.1)
    model, own = build(Halving())
    kit.train(model, loss_of, range(1), own)
    plain.load_state_dict(own.state_dict())  # a number in the place of a policy is a wish
    assert plain.damping == 0.1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "x", None, True])
def test_what_no_damping_can_be_is_named_before_anything_is_changed(value: Any) -> None:
    model, own = build(Fixed(value))
    model(torch.ones(2, 3).double()).sum().backward()
    before = model[0].weight.grad.clone()
    with pytest.raises(ValueError, match=r"Fixed object.* gives the damping .* at step 0"):
        own.step()
    assert torch.equal(model[0].weight.grad, before)


@pytest.mark.parametrize("kind", [soframe.TrustRegion, soframe.StochasticTrustRegion])
def test_nor_within_a_trust_region(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    given = {"loss": "squared-error"} if kind is soframe.TrustRegion else {}
    optimizer = kind(model, damping=Fixed(-1.0), **given)
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"gives the damping -1.0 at step 0"):
        optimizer.step(lambda: 0.5 * model(x).square().sum(1).mean())


def test_preconditioners_share_no_policy() -> None:
    policy = Halving()
    (one, first), (two, second) = build(policy), build(policy)
    found = [
        kit.train(model, loss_of, range(2), own, SGD(model.parameters(), lr=0.1))
        for model, own in ((one, first), (two, second))
    ]
    assert torch.equal(*found)
    assert first.damping == second.damping
    assert policy.asked == []


def test_a_copy_shares_no_container() -> None:
    policy = Halving()
    policy.asked.append(3)
    fresh = adopted(policy)
    fresh.at(0)
    assert policy.asked == [3]


def train_share(
    rank: int, ranks: int, strategy: str, steps: range, state: Any
) -> tuple[list[Tensor], list[float], Any]:
    """Train on this rank's share of each batch, in two micro-batches; gradients are averaged."""
    model, own = build(Halving(), strategy=strategy)
    sgd = SGD(model.parameters(), lr=0.1)
    if state is not None:
        model.load_state_dict(state["model"])
        own.load_state_dict(state["own"])

    def losses(model: nn.Module, step: int) -> Iterator[Tensor]:
        whole = torch.randn(16, 3, generator=torch.Generator().manual_seed(step)).double()
        for part in whole.chunk(ranks)[rank].chunk(2):
            yield model(part).square().mean() / 2

    dampings = []
    for step in steps:
        kit.train(model, losses, [step], kit.Averaging(model), own, sgd)
        dampings.append(own.damping)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    kept = {"model": model.state_dict(), "own": own.state_dict()}
    own.close()
    return weights, dampings, copy.deepcopy(kept)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    ["mem-opt", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("comm-opt", "sharded"))],
)
def test_four_ranks_that_go_on_as_two_are_one_process(strategy: str) -> None:
    expected, dampings, _ = train_share(0, 1, strategy, range(6), None)
    first = run_ranks(train_share, 4, strategy, range(3), None)
    second = run_ranks(train_share, 2, strategy, range(3, 6), first[0][2])
    for weights, later, _ in second:
        assert first[0][1] + later == dampings
        for name, (one, other) in enumerate(zip(weights, expected, strict=True)):
            compare(one, other, f"parameter {name}", rtol=1e-11)
