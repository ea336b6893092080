"""A state that a trust region cannot go on from is refused, and nothing has changed then."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

import soframe
from soframe.trust_region import AdaptiveDamping, LevenbergMarquardt
from tests.distributed.harness import run_ranks
from tests.state.test_resume import equal
from tests.trust_region.kit import classes_of, deep, trust_region, vector

State = dict[str, Any]
OWN = "trust_region"


def make(steps: int = 3, **settings: Any) -> tuple[nn.Module, soframe.TrustRegion]:
    model, damping = deep(), LevenbergMarquardt(1.0, interval=2)
    settings = {"preconditioner_damping": AdaptiveDamping(interval=2), **settings}
    own = trust_region(model, "cross-entropy", damping, full_batch=True, **settings)
    train(model, own, steps)
    return model, own


def train(model: nn.Module, own: soframe.TrustRegion, steps: int) -> None:
    x, y = classes_of(0)
    for _ in range(steps):
        own.step(lambda: F.cross_entropy(model(x), y))


def everything(model: nn.Module, own: soframe.TrustRegion) -> State:
    return {"state": copy.deepcopy(own.state_dict()), "weights": vector(model)}


BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no counters": ((OWN, "counters"), None, "truncated: trust_region lacks .'counters'"),
    "no own": ((OWN,), None, "not the state of a TrustRegion of version 3: it has None"),
    "newer": ((OWN, "version"), 9, "not the state of a TrustRegion of version 3: it has 9"),
    "damping": ((OWN, "damping", "now"), math.nan, "its damping is nan"),
    "few params": (("param_groups", 0, "params"), [0], r"groups of \[1\] parameters"),
    "curvature": (("curvature", "step"), "x", "another checksum"),
    "curvature type": (("curvature",), 5, "not the state of a soframe.Preconditioner"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(name):
    path, value, reason = BROKEN[name]
    state = place = copy.deepcopy(make(2)[1].state_dict())
    for key in path[:-1]:
        place = place[key]
    if value is None:
        place.pop(path[-1])
    else:
        place[path[-1]] = value
    model, own = make()
    before = everything(model, own)
    with pytest.raises(ValueError, match=reason):
        own.load_state_dict(state)
    assert equal(everything(model, own), before)
    train(model, own, 1)


def refuse_on_rank(rank: int, ranks: int, curvature: bool) -> tuple[str, str, bool]:
    model, own = make()
    good = copy.deepcopy(own.state_dict(curvature=curvature))
    train(model, own, 1)
    before = everything(model, own)
    said = []
    for spoil in ("truncate", "differ"):
        state = copy.deepcopy(good)
        if rank == 1 and spoil == "truncate":
            del state[OWN]["counters"]
        elif rank == 1:
            state[OWN]["steps"] += 1
        try:
            own.load_state_dict(state)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    kept = equal(everything(model, own), before)
    own.load_state_dict(good)
    return said[0], said[1], kept


@pytest.mark.distributed
@pytest.mark.parametrize("curvature", [True, False])
def test_what_one_rank_cannot_load_is_loaded_by_none(curvature):
    results = run_ranks(refuse_on_rank, 2, curvature, group_timeout=30)
    (first, differs, kept), (own, also_differs, also_kept) = results
    assert "rank(s) [1] could not load the state" in first
    assert "lacks ['counters']" in own
    assert "would continue from different states" in differs
    assert "would continue from different states" in also_differs
    assert (kept, also_kept) == (True, True)
