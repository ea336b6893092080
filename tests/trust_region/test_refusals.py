"""A state that a trust region cannot go on from is refused, and nothing has changed then."""

from __future__ import annotations

import copy
import io
import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import soframe
from soframe.state.checksums import KEY, seal, tensors_of, verify
from soframe.trust_region import AdaptiveDamping, LevenbergMarquardt
from soframe.trust_region.settings import sealed_part
from tests.distributed.harness import run_ranks
from tests.state.flips import flip_in_tensor, flipped
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


def sealed_anew(state: State) -> State:
    """As somebody would who changes a state on purpose: so other checks are reached."""
    state[OWN][KEY] = seal(sealed_part(state))[KEY]
    return state


def waits(state: State) -> State:
    assert state[OWN]["reduction"]["waiting"] is not None
    return state


NAN, INF = float("nan"), float("inf")
BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no counters": ((OWN, "counters"), None, "truncated: trust_region lacks .'counters'"),
    "no losses": ((OWN, "losses"), None, "truncated: trust_region lacks .'losses'"),
    "no checksums": ((OWN, KEY), None, "truncated: trust_region lacks .'checksums'"),
    "no own": ((OWN,), None, "not the state of a TrustRegion: it lacks"),
    "no state": (("state",), None, "not the state of a TrustRegion: it lacks"),
    "own type": ((OWN,), [], "trust_region is list, not a dict"),
    "newer": ((OWN, "version"), 9, "version 9; this soframe reads version 2"),
    "steps": ((OWN, "steps"), -1, "steps is -1"),
    "burn-in": ((OWN, "burn_in"), True, "burn_in is True"),
    "counter": ((OWN, "counters", "rejected_steps"), "x", "'rejected_steps' is 'x'"),
    "no counter": ((OWN, "counters", "skipped_steps"), None, "'skipped_steps' is None"),
    "damping": ((OWN, "damping", "now"), NAN, "now of the damping is nan"),
    "damping of 0": ((OWN, "damping", "now"), 0.0, "its damping is 0.0"),
    "damping type": ((OWN, "damping", "now"), "1", "now of the damping is '1'"),
    "dampings": ((OWN, "preconditioner_damping", "now"), [NAN], "their ways|dampings is nan"),
    "dampings type": ((OWN, "preconditioner_damping"), 3, "preconditioner_damping is 3"),
    "ways": ((OWN, "preconditioner_damping", "ways"), [], "their ways"),
    "wait": ((OWN, "preconditioner_damping", "wait"), 0, "wait of its dampings is 0"),
    "due": ((OWN, "preconditioner_damping", "due"), 0.5, "due of its dampings is 0.5"),
    "losses": ((OWN, "losses"), [INF], "the last losses are .inf."),
    "many losses": ((OWN, "losses"), [0.1] * 11, "the last losses are"),
    "rounding": ((OWN, "eps"), NAN, "the rounding of the loss is nan"),
    "waiting": ((OWN, "reduction", "waiting"), (NAN, -1.0), "the step that waits has"),
    "waiting type": ((OWN, "reduction", "waiting"), 7, "the step that waits has 7"),
    "waits not": ((OWN, "reduction", "waiting"), "drop", "by one part of it, and does not by"),
    "last": ((OWN, "reduction", "last"), {"ratio": "x"}, "the last verdict is"),
    "reduction type": ((OWN, "reduction"), [], "reduction is list"),
    "groups type": (("param_groups",), {}, "param_groups is dict"),
    "lr": (("param_groups", 0, "lr"), NAN, "lr of param group 0 is nan"),
    "no lr": (("param_groups", 0, "lr"), None, r"param group 0 lacks \['lr'\]"),
    "decay": (("param_groups", 0, "weight_decay"), "0", "weight_decay of param group 0 is '0'"),
    "params": (("param_groups", 0, "params"), [3, 2, 1, 0], r"numbered \[3, 2, 1, 0\]"),
    "few params": (("param_groups", 0, "params"), [0], r"groups of \[1\] parameters"),
    "moved shape": (("state", 0, "moved"), torch.ones(1), "moved of parameter 0 is not finite and"),
    "before": (("state", 1, "before"), torch.full((4,), NAN), "before of parameter 1 is not fin"),
    "decay type": (("state", 1, "decay"), "x", "decay of parameter 1 is not a weight decay"),
    "half": (("state", 2, "before"), None, "of parameter 2 it has"),
    "foreign": (("state", 2, "momentum_buffer"), torch.ones(3, 4), "of parameter 2 it has"),
    "no such parameter": (("state", 9), {}, "there is no parameter 9"),
    "curvature": (("curvature", "step"), "x", "numbers and names have another checksum"),
    "curvature type": (("curvature",), 5, "not the state of a soframe.Preconditioner"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(name):
    path, value, reason = BROKEN[name]
    state = place = waits(copy.deepcopy(make(2)[1].state_dict()))
    for key in path[:-1]:
        place = place[key]
    if value is None:
        place.pop(path[-1])
    else:
        place[path[-1]] = None if value == "drop" else value
    if len(path) > 1 and KEY not in path and "version" not in path:
        sealed_anew(state)
    model, own = make()
    before = everything(model, own)
    with pytest.raises(ValueError, match=reason):
        own.load_state_dict(state)
    assert equal(everything(model, own), before)
    train(model, own, 1)


def test_flipped_bits_of_its_tensors_are_errors():
    good, draw = waits(make(2)[1].state_dict()), random.Random(0)
    model, own = make()
    before = everything(model, own)
    paths = [path for path, _ in tensors_of(good)]
    assert any(path.startswith("state/") for path in paths)
    for _ in range(100):
        state = copy.deepcopy(good)
        flip_in_tensor(dict(tensors_of(state))[draw.choice(paths)], draw)
        with pytest.raises(ValueError, match="the state is damaged"):
            own.load_state_dict(state)
    assert equal(everything(model, own), before)


@pytest.mark.slow
def test_flipped_bits_of_a_file_are_errors_or_change_nothing():
    file, draw, errors = io.BytesIO(), random.Random(1), 0
    torch.save(make(2)[1].state_dict(), file)
    model, own = make()
    own.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    expected = everything(model, own)
    for _ in range(100):
        try:
            data = io.BytesIO(flipped(file.getvalue(), draw))
            own.load_state_dict(torch.load(data, weights_only=True))
        except Exception:  # torch's own errors are of any kind
            errors += 1
        assert equal(everything(model, own), expected)
    assert errors > 10


def test_numbers_that_were_changed_are_errors():
    state = make()[1].state_dict()
    state[OWN]["damping"]["now"] *= 1 + 2**-50
    _, own = make()
    with pytest.raises(ValueError, match="its numbers and names have another checksum"):
        own.load_state_dict(state)


def test_what_hooks_of_the_optimizer_add_is_not_its_own():
    _, own = make()
    own.register_state_dict_post_hook(lambda _, state: {**state, "notes": "mine"})
    state = own.state_dict()
    verify({**sealed_part(state), KEY: state[OWN][KEY]})
    own.load_state_dict(state)


def test_dampings_that_are_checked_stay():
    _, own = make()
    damping, state = own.damping.at(0), make(1)[1].state_dict()
    state["curvature"]["step"] = "x"  # checked after the damping
    assert math.isfinite(damping)
    with pytest.raises(ValueError, match="numbers and names have another checksum"):
        own.load_state_dict(state)
    assert own.damping.at(0) == damping


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
            sealed_anew(state)
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
    assert "would go on from different states" in differs
    assert "would go on from different states" in also_differs
    assert (kept, also_kept) == (True, True)
