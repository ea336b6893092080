"""Directions of any method in one quadratic model: coefficients, rejection, blocks, refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.methods import EKFAC, SOAP, Chain, Direction, Given, Momentum
from soframe.trust_region import AdaptiveDamping, LevenbergMarquardt
from tests.curvature import fill, half_square
from tests.trust_region import kit
from tests.trust_region.dense import COVERED, PARTS, affine_net, regression
from tests.trust_region.kit import (
    Measured,
    classes_of,
    closures,
    deep,
    fisher,
    gradient,
    vector,
)

DAMPING, DECAY = 0.3, 0.05


def trust_region(
    model: nn.Module, loss: Any, damping: Any = 0.1, *, method: Any, **settings: Any
) -> soframe.TrustRegion:
    """That of the kit; with its Fisher, and statistics of one step, only where a method has any."""
    alone: dict[str, Any] = {"decay": 0.0} if "kfac" in str(method) else {"fisher": "monte-carlo"}
    return kit.trust_region(model, loss, damping, method=method, **{**alone, **settings})


class Directions:
    """The directions that `soframe.Optimizer` takes on a twin, given gradients."""

    def __init__(self, method: Any, **settings: Any) -> None:
        self.net = affine_net()
        every = {"statistics_every": 1, "solve_every": 1, "lr": 1.0}
        self.own = soframe.Optimizer(self.net, method, **every, **settings)
        names = {id(p): name for name, p in self.net.named_parameters()}
        first = [g for g in self.own.param_groups if not g["method"].startswith("auxiliary")]
        self.names = {names[id(p)] for group in first for p in group["params"]}

    def of(self, theta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """``[24]`` each: what the method moves, and what the auxiliary one does."""
        nn.utils.vector_to_parameters(theta.clone(), self.net.parameters())
        at = 0
        for p in self.net.parameters():
            p.grad, at = g[at : at + p.numel()].view_as(p).clone(), at + p.numel()
        self.own.step()
        moved = vector(self.net) - theta
        covers = [
            torch.full((p.numel(),), name in self.names) for name, p in self.net.named_parameters()
        ]
        mine = torch.cat(covers)
        return moved * mine, moved * ~mine


def parts_of(direction: Tensor) -> list[Tensor]:
    found = []
    for own in PARTS[3]:
        part = torch.zeros_like(direction)
        part[own] = direction[own]
        found.append(part)
    return found


def minimum(d: Tensor, c: Tensor, b: Tensor) -> Tensor:
    """The least-squares solution of the normal equations, by numpy, scaled to unit lengths."""
    scale = np.sqrt(np.maximum(np.diag(c.numpy()), 0))
    scale = np.where(scale > 0, scale, 1.0)
    scaled = c.numpy() / scale / scale[:, None]
    found, *_ = np.linalg.lstsq(scaled, -b.numpy() / scale, rcond=1e-10)
    return torch.from_numpy(found / scale) @ d


CHOICES: dict[str, tuple[list[str], bool]] = {
    "soap": (["soap"], False),
    "muon": (["muon"], False),
    "adamw": (["adamw"], False),
    "shampoo": (["shampoo"], False),
    "kfac, muon": (["muon"], True),
    "kfac, soap, adamw": (["soap", "adamw"], True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_step_is_the_minimum_of_the_dense_model(name: str) -> None:
    methods, with_kfac = CHOICES[name]
    net = affine_net()
    chosen: Any = ["kfac", *methods] if with_kfac else methods[0]
    own = trust_region(net, "squared-error", DAMPING, method=chosen, weight_decay=DECAY)
    sources = [Directions(method) for method in methods]
    auxiliary = Directions("adamw")  # of what K-FAC leaves out
    theta, last, eye = vector(net), None, torch.eye(24, dtype=torch.float64)
    for step in range(5):
        batches = regression(step)
        f = fisher(net, batches, half_square)
        g = gradient(net, batches, half_square) + DECAY * theta
        damped = f + (DAMPING + DECAY) * eye
        rows: list[Tensor] = []
        if with_kfac:
            whole = torch.zeros_like(g)
            for block in COVERED:
                whole[block] = -torch.linalg.solve(damped[block, block], g[block])
            rows += parts_of(whole)
            adam, _ = auxiliary.of(theta, g)
            rows.append(parts_of(adam)[2])
        for source in sources:
            mine, rest = source.of(theta, g)
            # What a method has no direction for yet is the gradient's.
            covers = mine if mine.any() else -g
            rows += parts_of(covers)
            if not with_kfac:
                rows.append(rest)
        if last is not None:
            rows += parts_of(last)
        d = torch.stack([row for row in rows if row.any()])
        last = minimum(d, d @ damped @ d.T, d @ g)
        theta = theta + last
        own.step(closures(net, batches, half_square))
        torch.testing.assert_close(vector(net), theta, rtol=1e-6, atol=1e-8)
        assert own.readout is not None
        assert len(own.readout.coefficients) >= len(d)


def test_a_list_of_one_is_that_one() -> None:
    found = []
    for settings in ({}, {"method": "kfac"}, {"method": ["kfac"]}):
        torch.manual_seed(0)
        model = deep()
        own = soframe.TrustRegion(model, "cross-entropy", full_batch=True, **settings)
        for step in range(8):
            own.step(closures(model, [classes_of(step)], F.cross_entropy))
        found.append((vector(model), own.readout))
        own.close()
    for weights, readout in found[1:]:
        assert torch.equal(weights, found[0][0])
        assert readout == found[0][1]


# -- what is remembered, of a step that is undone --------------------------------------------------


def remembered(own: soframe.TrustRegion) -> list[Any]:
    """All that methods keep of gradients, in copies."""
    found: list[Any] = []
    for one in own.candidates:
        for block in one.blocks:
            names = [f.name for f in block.factors if not f.captured]
            if not (block.states or names):
                continue
            data = {k: dict(v) for k, v in block.second_order.items()}
            running = {n: (block.record.masses.get(n), block.running.get(n)) for n in names}
            kept = (dict(block.state), block.record.updates, data, block.second_order.solved)
            found.append((block.name, *kept, running))
    return copy.deepcopy(found)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


REMEMBERING: dict[str, Any] = {
    "soap": "soap",
    "muon": "muon",
    "shampoo": "shampoo",
    "kfac, soap": ["kfac", "soap"],
    "kfac, kfac-muon": ["kfac", "kfac-muon"],
    "by pattern": {"^0": "kl-soap", "": "kfac"},
}


def net() -> nn.Module:
    layers = [nn.Linear(3, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 3)]
    return fill(nn.Sequential(*layers))


@pytest.mark.parametrize("full_batch", [False, True])
@pytest.mark.parametrize("name", REMEMBERING)
def test_a_rejected_step_leaves_what_methods_remember(name: str, full_batch: bool) -> None:
    model = net()
    policy = LevenbergMarquardt(1.0, interval=1)
    own = trust_region(
        model, "cross-entropy", policy, method=REMEMBERING[name], full_batch=full_batch
    )
    closure = closures(model, [classes_of(0)], F.cross_entropy)
    for _ in range(3):
        own.step(closure)
    own.settle(closure)
    before, weights = remembered(own), vector(model)
    assert before
    own.param_groups[0]["lr"] = 300.0
    own.step(closure)
    if full_batch:
        assert not same(remembered(own), before)  # it waits for its verdict
        assert not own.settle(closure)
    assert own.counters["rejected_steps"] == 1
    assert torch.equal(vector(model), weights)
    assert same(remembered(own), before)


@pytest.mark.parametrize("name", REMEMBERING)
def test_the_next_step_is_that_of_a_run_without_it(name: str) -> None:
    """With statistics of calls of one step alone, and a damping that does not change."""
    found = []
    for lrs in ([1.0, 1.0, 300.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]):
        model = net()
        own = trust_region(
            model,
            "cross-entropy",
            Measured(1.0),
            full_batch=True,
            method=REMEMBERING[name],
        )
        closure = closures(model, [classes_of(0)], F.cross_entropy)
        for lr in lrs:
            own.param_groups[0]["lr"] = lr
            own.step(closure)
        own.settle(closure)
        found.append((vector(model), own.counters["rejected_steps"], remembered(own)))
    (rejecting, one, kept), (plain, none, also) = found
    assert (one, none) == (1, 0)
    assert torch.equal(rejecting, plain)
    assert same(kept, also)


def test_a_step_that_is_not_taken_leaves_what_methods_remember() -> None:
    model = net()
    own = trust_region(model, "cross-entropy", method=["kfac", "soap"])
    (closure,) = closures(model, [classes_of(0)], F.cross_entropy)
    for _ in range(3):
        own.step(closure)
    before = remembered(own)
    own.step(lambda: closure() * 50 / 50 + math.nan)  # with a gradient that is finite
    assert own.counters["skipped_steps"] == 1
    assert same(remembered(own), before)
    own.step(closure)
    assert not same(remembered(own), before)


def test_dampings_that_are_tried_leave_other_methods_alone() -> None:
    model = net()
    own = soframe.Preconditioner(
        model,
        {"^0": "kfac-muon", "": "kfac"},
        "inverse",
        auxiliary="adamw",
        kl_clip=None,
        damping=0.1,
        statistics_every=1,
    )
    x, y = classes_of(0)
    F.cross_entropy(model(x), y).backward()
    raw = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    own.step()
    for parameter, before_step in raw.items():
        parameter.grad = before_step.clone()
    before = [dict(block.second_order) for block in own.blocks]
    own.precondition_again(5.0)
    found = set()
    for block, data in zip(own.blocks, before, strict=True):
        again = [not torch.equal(p.grad, raw[p]) for p in block.parameters.values()]
        assert all(again) == any(again) == (not block.remembers)
        solved = not same(data, dict(block.second_order))
        assert solved == (not block.remembers)
        found.add(type(block.method).__name__)
    assert found == {"KFACMuon", "KFAC", "AdamW"}


class Broken(Momentum):
    """Makes no number of its third gradient."""

    def direct(self, given: Given) -> Direction:
        made = super().direct(given)
        return Direction(made.matrix * (math.nan if given.updates == 2 else 1), made.state)


def test_a_direction_that_is_not_finite_is_left_out() -> None:
    model = net()
    own = trust_region(model, "cross-entropy", method=["kfac", Broken(0.9)])
    for step in range(4):
        own.step(closures(model, [classes_of(0)], F.cross_entropy))
        assert own.readout is not None
        broken = step == 2
        assert ("Broken made no finite direction" in own.readout.notes) == broken
        assert ("Broken" in own.readout.directions) == (not broken)
    assert own.counters["skipped_steps"] == 0


# -- blocks ----------------------------------------------------------------------------------------


class Text(nn.Module):
    """With an embedding, a norm, a bare parameter and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift = nn.Embedding(7, 6), nn.Parameter(torch.zeros(6))
        self.norm, self.body, self.head = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.further = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.norm(self.table(x) + self.shift)).mean(1).tanh()
        out: Tensor = self.head(self.further(hidden).tanh())
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "muon"},
        {"method": ["kfac", "muon"]},
        {"method": "soap"},
        {"method": "kfac", "auxiliary": "adamw"},
    ],
    ids=str,
)
def test_every_parameter_has_a_method(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Text().double()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(), full_batch=True, **settings)
    found = set().union(*(one.covered() for one in own.candidates))
    assert found == set(model.parameters())
    x = torch.randint(7, (16, 5), generator=torch.Generator().manual_seed(0))
    y = x.sum(1) % 3
    first = own.step(lambda: F.cross_entropy(model(x), y))
    for _ in range(30):
        last = own.step(lambda: F.cross_entropy(model(x), y))
    assert last < 0.3 * first
    model.body.weight.requires_grad_(False)
    before = model.body.weight.clone()
    own.step(lambda: F.cross_entropy(model(x), y))
    assert torch.equal(model.body.weight, before)
    model.body.weight.requires_grad_(True)
    assert own.step(lambda: F.cross_entropy(model(x), y)) < last
    assert own.settle(lambda: F.cross_entropy(model(x), y))
    assert not torch.equal(model.body.weight, before)


# -- what is refused -------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"method": []}, "names no method: pass one"),
    "tensor": ({"method": torch.ones(2)}, "a method is a name"),
    "twice": ({"method": ["kfac", soframe.methods.KFAC()]}, "twice.* leave it out"),
    "unknown": ({"method": ["kfac", "sope"]}, "sope"),
    "dampings to try": (
        {"method": "soap", "preconditioner_damping": AdaptiveDamping()},
        "every method here remembers earlier ones: pass a multiple",
    ),
    "a basis": (
        {"method": Chain((EKFAC(), Momentum())), "solver": "eigen"},
        "puts back with a step that is undone.*as methods of their own",
    ),
    "a Fisher of nothing": ({"method": "soap", "fisher": "type-2"}, "no block's method reads"),
    "solver": ({"method": ["kfac", "ekfac"]}, "pass solver='eigen'"),
    "nothing to have": ({"method": ["kfac", "muon"], "skip": ["0"]}, "nothing to precondition"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_with_a_remedy(name: str) -> None:
    settings, reason = REFUSED[name]
    model = deep()
    with pytest.raises((ValueError, TypeError), match=reason):
        soframe.TrustRegion(model, "cross-entropy", **settings)
    soframe.TrustRegion(model, "cross-entropy").close()  # nothing is left behind


def states(method: Any, steps: int = 3) -> tuple[soframe.TrustRegion, dict[str, Any]]:
    model = net()
    own = trust_region(model, "cross-entropy", 1.0, method=method, full_batch=True)
    own.damping.interval = 1
    for _ in range(steps):
        own.step(closures(model, [classes_of(0)], F.cross_entropy))
    return own, own.state_dict()


def test_states_of_other_methods_are_refused() -> None:
    own, _ = states(["kfac", "soap"])
    _, alone = states("kfac")
    with pytest.raises(ValueError, match=r"of 1 method.* has 2"):
        own.load_state_dict(alone)
    _, other = states(["kfac", "muon"])
    with pytest.raises(ValueError, match="state"):
        own.load_state_dict(other)
    waits = own.state_dict()
    assert waits["trust_region"]["reduction"]["waiting"] is not None
    own.load_state_dict(waits)
    before = waits.pop("before")
    with pytest.raises(ValueError, match="truncated: methods that remember gradients need"):
        own.load_state_dict(waits)
    for broken in (before[:1], {}, 3):
        with pytest.raises(ValueError, match="damaged: before is"):
            own.load_state_dict({**waits, "before": broken})
    with pytest.raises(ValueError, match=r"save state_dict\(\) whole"):
        own.state_dict(curvature=False)


def test_saving_leaves_what_methods_remember() -> None:
    own, _ = states(["kfac", SOAP()])
    before = remembered(own)
    state = own.state_dict()
    assert same(remembered(own), before)
    now = state["further_methods"][0]["blocks"]["0.weight"]
    then = state["before"][1]["blocks"]["0.weight"]
    assert not torch.equal(now["state"]["square"], then["state"]["square"])


def test_coefficients_say_whose_they_are() -> None:
    own, _ = states(["kfac", "muon"])
    assert own.readout is not None
    names: Sequence[str] = own.readout.directions
    assert names == (
        *["preconditioned"] * 3,
        "auxiliary AdamW",
        *["Muon"] * 2,
        *["last update"] * 3,
    )
    assert len(names) == len(own.readout.coefficients)
