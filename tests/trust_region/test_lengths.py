"""Steps without a model go by the mean coefficients of the last models, and cost one pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import soframe
from soframe.trust_region.lengths import KEEP, Lengths
from tests.curvature import half_square
from tests.trust_region.dense import affine_net, regression
from tests.trust_region.kit import classes_of, closures, deep, fisher, gradient, vector
from tests.trust_region.test_candidates import (
    DAMPING,
    Directions,
    minimum,
    parts_of,
    trust_region,
)

WITH_MODEL = [0, 1, 2, 3, 4, 7, 10]


def without(own: soframe.TrustRegion) -> bool:
    assert own.readout is not None
    return "without a model" in own.readout.notes


def test_steps_are_the_dense_ones() -> None:
    net = affine_net()
    own = trust_region(net, "squared-error", DAMPING, method="adamw", model_every=3)
    source, theta, last = Directions("adamw"), vector(net), None
    eye, found = torch.eye(24, dtype=torch.float64), []
    for step in range(11):
        batches = regression(step)
        g = gradient(net, batches, half_square)
        mine, _ = source.of(theta, g)
        d = torch.stack(parts_of(mine))
        if step in WITH_MODEL:
            damped = fisher(net, batches, half_square) + DAMPING * eye
            found.append(torch.linalg.solve(d @ damped @ d.T, -(d @ g)))
            both = torch.cat([d, torch.stack(parts_of(last))]) if last is not None else d
            last = minimum(both, both @ damped @ both.T, both @ g)
        else:
            weights = torch.tensor([KEEP**age for age in reversed(range(len(found)))]).double()
            last = (weights / weights.sum()) @ torch.stack(found) @ d
        theta = theta + last
        own.step(closures(net, batches, half_square))
        assert without(own) == (step not in WITH_MODEL)
        torch.testing.assert_close(vector(net), theta, rtol=1e-6, atol=1e-8)


def test_a_step_without_a_model_runs_the_closure_once() -> None:
    model, runs = deep(), 0
    (closure,) = closures(model, [classes_of(0)], F.cross_entropy)

    def counted() -> Tensor:
        nonlocal runs
        runs += 1
        return closure()

    own = trust_region(
        model, "cross-entropy", method=["kfac", "muon"], statistics_every=4, model_every=4
    )
    for _ in range(8):
        before = runs
        own.step(counted)
        assert not without(own) or runs == before + 1
    assert own.readout is not None
    assert without(own)
    assert own.readout.directions == ("preconditioned", "preconditioned", "Muon")
    assert own.readout.predicted is None


def test_an_undone_step_is_followed_by_a_model() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", 1e-3, method="adamw", model_every=50)
    (closure,) = closures(model, [classes_of(0, 32)], F.cross_entropy)
    for _ in range(6):
        own.step(closure)
    assert without(own)
    own.step(lambda: closure() + 1e3)
    assert own.counters["skipped_steps"] == 1
    own.step(closure)
    assert not without(own)
    own.step(closure)
    assert without(own)
    model[0].weight.requires_grad_(False)
    own.step(closure)
    assert not without(own)  # of other parameters nothing is known


def test_other_directions_have_no_length() -> None:
    lengths = Lengths(5)
    lengths.learn(["a", "b"], torch.tensor([1.0, 3.0]))
    lengths.learn(["a", "b"], torch.tensor([2.0, 3.0]))
    assert not lengths.due(9)
    assert lengths.take(["a"]) is None
    torch.testing.assert_close(
        lengths.take(["a", "b"]), torch.tensor([(KEEP + 2) / (KEEP + 1), 3.0]).double()
    )
    other = Lengths(5)
    other.load(copy.deepcopy(lengths.state()))
    assert other.state() == lengths.state()
    lengths.renew()
    assert lengths.due(9)
    lengths.learn(["c"], torch.tensor([7.0]))
    assert lengths.take(["c"]) == torch.tensor([7.0]).double()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "full batches": ({"full_batch": True, "model_every": 2}, "every step is judged.*model_every=1"),
    "none": ({"model_every": 0}, "model_every must be"),
    "a half": ({"model_every": 1.5}, "model_every must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(name: str) -> None:
    settings, reason = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=reason):
        soframe.TrustRegion(deep(), "cross-entropy", **settings)


@pytest.mark.parametrize(
    "broken", [{"mean": [1.0]}, {"mass": float("nan")}, {"since": -1}, {"names": "ab"}], ids=str
)
def test_damaged_lengths_are_refused(broken: dict[str, Any]) -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", method="adamw", model_every=2)
    own.step(closures(model, [classes_of(0)], F.cross_entropy))
    state = own.state_dict()
    own.load_state_dict(state)
    state["trust_region"]["lengths"] |= broken
    with pytest.raises(ValueError, match="the lengths of steps without a model are"):
        own.load_state_dict(state)
