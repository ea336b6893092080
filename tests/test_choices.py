"""How components are chosen: by name, per layer, and what a choice that cannot be is told."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
from torch import nn

import soframe
from soframe.layers import LinearHelper
from soframe.methods import KFAC
from soframe.registry import describe
from soframe.settings import grouped
from soframe.solvers import Eigen, Inverse


class One:
    pass


@pytest.mark.parametrize("kind", ["method", "solver", "strategy", "backend"])
def test_the_preconditioner_says_what_there_is(kind):
    with pytest.raises(ValueError, match=f"no {kind} 'nope'; registered: '") as raised:
        soframe.Preconditioner(nn.Linear(2, 2), **grouped({"kl_clip": None, kind: "nope"}))
    assert all(repr(name) in str(raised.value) for name in soframe.available(kind))


# -- per layer ---------------------------------------------------------------------------------


class OtherLinear(LinearHelper):
    pass


@dataclass(frozen=True)
class Slow(KFAC):
    twice: bool = False


def net() -> nn.Module:
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return nn.ModuleDict({"body": body, "head": nn.Linear(2, 2)})


def chosen(**options: object) -> dict[str, tuple[object, object, type]]:
    preconditioner = soframe.Preconditioner(
        net(), kl_clip=None, **{"statistics_every": 1, **options}
    )
    return {b.name: (b.method, b.solver, type(b.layout)) for b in preconditioner.blocks}


@pytest.mark.parametrize(
    ("options", "index", "expected"),
    [
        (
            {"solver": {"head": "inverse", ".*": "eigen"}},
            1,
            {"body.0": Eigen(), "body.1": Eigen(), "head": Inverse()},
        ),
        # The first match wins, also over a closer one.
        (
            {"solver": {"body": Inverse, r"body\.1": "eigen", "head": Inverse("full")}},
            1,
            {"body.0": Inverse(), "body.1": Inverse(), "head": Inverse("full")},
        ),
        (
            {"method": {r"^body\.1$": Slow(twice=True), "": KFAC}},
            0,
            {"body.0": KFAC(), "body.1": Slow(twice=True), "head": KFAC()},
        ),
        (
            {"layers": {r"\.1$": OtherLinear}},
            2,
            {"body.0": LinearHelper, "body.1": OtherLinear, "head": LinearHelper},
        ),
    ],
    ids=["solver", "first match", "method", "layers"],
)
# The pattern of a closer match is never used, which is worth a warning of its own (below).
@pytest.mark.filterwarnings("ignore:soframe. no module matches")
def test_components_are_chosen_per_layer(options, index, expected):
    assert {name: choice[index] for name, choice in chosen(**options).items()} == expected


@pytest.mark.parametrize("kind", ["method", "solver"])
def test_a_module_without_a_match_is_an_error_that_names_it(kind):
    name = {"method": "kfac", "solver": "eigen"}[kind]
    with pytest.raises(ValueError, match=f"^{kind}: no pattern of the mapping matches .* 'head'"):
        chosen(**{kind: {"body": name}})


@pytest.mark.parametrize(
    "options",
    [
        {"skip": ["nowhere"]},
        {"layers": {"nowhere": OtherLinear}},
        {"solver": {"nowhere": "inverse", ".*": "eigen"}},
        {"method": {"nowhere": "kfac", ".*": "kfac"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_pattern_that_matches_nothing_warns(options):
    with pytest.warns(UserWarning, match=r"no module matches the pattern\(s\) 'nowhere';"):
        chosen(**options)


def test_patterns_that_match_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = chosen(skip=["head"], solver={"body": "eigen", ".*": "inverse"})
    assert list(names) == ["body.0", "body.1"]


@pytest.mark.parametrize("choice", [3, "linear", LinearHelper(nn.Linear(1, 1))])
def test_a_layers_choice_is_a_helper_class(choice):
    with pytest.raises(
        TypeError, match=r"layers\['head'\] must be a LayerHelper class or 'all', not "
    ):
        chosen(layers={"head": choice})


def test_a_description_is_the_same_in_every_process():
    assert describe(Inverse("sqrt")) == "Inverse(split='sqrt')"
    assert describe(One()) == describe(One())
    assert " at 0x" not in describe([One(), One.__init__, lambda: None])
