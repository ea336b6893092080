"""Settings that nothing in the model reads are refused; what is accepted changes the weights."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe import Preconditioner
from soframe.combinations import READ_BY
from soframe.methods import Chain
from soframe.settings import DAMPING, grouped
from soframe.solvers import Solver
from soframe.specs import FactorSpec
from tests import kit

CHOSEN: dict[str, dict[str, Any]] = {
    "solver": {"solver": "newton-schulz"},
    "damping": {"damping": 1.0},
    "decay": {"decay": 0.5},
    "kl_clip": {"kl_clip": 1e-7},
    "norm_clip": {"norm_clip": 1e-3},
    "scaling": {"scaling": "kaisa"},
    "rows": {"rows": 0.5},
    "fisher": {"fisher": "type-2", "loss": "cross-entropy"},
}
"""Each setting that may be refused, with a value that is not its default."""

SAME = {
    ("solver", "foof"): "one factor is inverted exactly by any solver",
    ("solver", "newton-muon"): "one factor is inverted exactly by any solver",
}
"""What may change nothing though it is read, and why."""


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.double()


def weights_of(method: str | soframe.methods.Method, **settings: Any) -> Tensor:
    """Train for four steps, of which two have statistics and solves, and return the weights."""
    model = net()
    optimizer = soframe.Optimizer(
        model, method=method, lr=0.05, statistics_every=2, solve_every=2, **grouped(settings)
    )
    generator = torch.Generator().manual_seed(1)

    def loss(model: nn.Module, _: int) -> Tensor:
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)
        outputs = model(x)
        if settings.get("fisher") == "type-2":
            optimizer.preconditioner.observe(outputs)
        return F.cross_entropy(outputs, y)

    weights = kit.train(model, loss, range(4), optimizer)
    optimizer.preconditioner.close()
    return weights


plain_weights = functools.cache(weights_of)


def test_every_setting_has_a_value() -> None:
    assert set(CHOSEN) == set(READ_BY)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("method", sorted(soframe.available("method")))
def test_what_is_accepted_changes_something(method: str, name: str) -> None:
    try:
        changed = weights_of(method, **CHOSEN[name])
    except ValueError as error:
        if f"{name}=" not in str(error):  # it is refused for this reason, or for another one
            raise
    else:
        assert (name, method) in SAME or not torch.equal(changed, plain_weights(method))


@pytest.mark.parametrize(
    "method", ["kfac", "ekfac", "tnt", "foof", "eva", "diagonal", "kfac-muon", "newton-muon"]
)
def test_what_is_read_is_accepted(method: str) -> None:
    """As a whole, and as a stage among others."""
    for choice in (method, Chain((method, "momentum"))):
        soframe.Optimizer(net(), method=choice, lr=0.1, damping=0.1).preconditioner.close()


class Deriving(soframe.methods.KFAC):
    """Has a solver for each factor, made of the user's."""

    def solver(self, factor: FactorSpec, default: Solver) -> Solver:
        return copy.copy(default)


def test_solvers_that_a_method_makes_of_the_users_are_the_users() -> None:
    """They are read, and split the damping together, as one would."""
    for settings in (CHOSEN["solver"], {}):
        assert torch.equal(weights_of(Deriving(), **settings), weights_of("kfac", **settings))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"damping": 0.1}, "damping=0.1 would change nothing: no method of this model reads it"),
        ({"damping": 0.1, "kl_clip": 1.0}, "damping=0.1, kl_clip=1.0 would change nothing"),
        ({"statistics": soframe.Statistics(rows=0.5)}, "rows=0.5 would change nothing"),
        ({"clips": soframe.Clips(norm_clip=1.0)}, "norm_clip=1.0 would change nothing"),
        ({"fisher": "forward-only"}, "fisher='forward-only' would change nothing"),
    ],
)
def test_what_is_said(settings: dict[str, Any], told: str) -> None:
    model = net()
    with pytest.raises(ValueError, match="would change nothing") as error:
        soframe.Optimizer(model, method="soap", lr=0.1, **grouped(settings))
    assert str(error.value).startswith(told)
    assert str(error.value).endswith("choose a method that does, such as 'kfac'")
    # Nothing was left on the model; nor is there a warning of a clip that nothing reads.
    Preconditioner(model, "soap").close()


def test_one_block_is_enough() -> None:
    """A setting that one method reads may be given beside methods that do not read it."""
    soframe.Optimizer(net(), method={"^0$": "kfac"}, auxiliary="soap", lr=0.1, damping=0.1)
    with pytest.raises(ValueError, match=r"damping=0\.1"):
        soframe.Optimizer(net(), method={"^0$": "muon"}, auxiliary="soap", lr=0.1, damping=0.1)


@pytest.mark.filterwarnings("ignore:soframe. no module matches")
def test_a_frozen_layer_in_place_of_another_makes_no_setting_wrong() -> None:
    """What was read at the start may have no reader for some steps, and has one again."""
    model = net()
    layer, frozen = model[0], copy.deepcopy(model[0]).requires_grad_(False)
    optimizer = soframe.Optimizer(model, {"^0$": "kfac"}, auxiliary="soap", lr=0.1, damping=0.1)
    for trained in (True, False, True):
        model[0] = layer if trained else frozen
        optimizer.zero_grad()
        model(torch.ones(4, 6, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        methods = {type(block.method).__name__ for block in optimizer.preconditioner.blocks}
        assert ("KFAC" in methods) == trained


def test_none_and_defaults_are_not_chosen() -> None:
    soframe.Optimizer(net(), method="muon", lr=0.1, kl_clip=None, damping=DAMPING, decay=0.95)


def test_one_word_changes_the_method() -> None:
    """Settings of the auxiliary method are of what is left out, which may be nothing."""
    settings: dict[str, Any] = {"auxiliary_lr": 0.1, "auxiliary_weight_decay": 0.1}
    for method in ("soap-muon", "soap"):
        optimizer = soframe.Optimizer(net(), method, lr=0.1, **grouped(settings))
        left_out = any(block.auxiliary for block in optimizer.preconditioner.blocks)
        assert left_out == (method == "soap-muon")
