"""The registry, and how components are chosen per layer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
from torch import nn

import soframe
from soframe.layers import LinearHelper
from soframe.methods import KFAC
from soframe.registry import KINDS, Registry, describe, first_match
from soframe.solvers import Eigen, Inverse, Solver


class One:
    pass


class Two:
    pass


def filled(**components: type) -> Registry:
    registry = Registry("thing")
    registry._discovered = True  # these are not the installed packages' business
    for name, component in components.items():
        registry.register(name)(component)
    return registry


# -- keys ------------------------------------------------------------------------------------


def test_a_registered_class_is_found_and_unchanged():
    registry = filled(one=One)
    assert registry.get("one") is One
    assert registry.available() == {"one": One}
    assert registry.register("two")(Two) is Two


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"^no thing 'three'; registered: 'one', 'two'$"):
        filled(two=Two, one=One).get("three")
    with pytest.raises(ValueError, match=r"^no thing 'one'; registered: none$"):
        filled().get("one")


@pytest.mark.parametrize("kind", ["method", "solver", "strategy", "backend"])
def test_the_preconditioner_says_what_there_is(kind):
    with pytest.raises(ValueError, match=f"no {kind} 'nope'; registered: '") as raised:
        soframe.Preconditioner(nn.Linear(2, 2), kl_clip=None, **{kind: "nope"})
    assert all(repr(name) in str(raised.value) for name in soframe.available(kind))


def test_a_clash_raises_and_leaves_the_first():
    registry = filled(one=One)
    with pytest.raises(ValueError, match=r"thing 'one' is already .*\.One; choose another key or"):
        registry.register("one")(Two)
    assert registry.get("one") is One


def test_override_replaces():
    registry = filled(one=One)
    registry.register("one", override=True)(Two)
    assert registry.get("one") is Two


def test_a_reloaded_class_replaces_itself():
    again = type("One", (), {"__module__": One.__module__, "__qualname__": One.__qualname__})
    registry = filled(one=One)
    registry.register("one")(again)
    assert registry.get("one") is again


@pytest.mark.parametrize(("kind", "key"), [("solver", nn.Linear), ("layer", "linear")])
def test_a_key_of_the_wrong_type_is_refused(kind, key):
    with pytest.raises(TypeError, match=f"a {kind} is registered under a "):
        soframe.register(kind, key)


@pytest.mark.parametrize("function", [soframe.available, lambda kind: soframe.register(kind, "x")])
def test_an_unknown_kind_lists_the_kinds(function):
    with pytest.raises(ValueError, match="no kind 'optimizer' of component; there are: layer, "):
        function("optimizer")


def test_layers_are_looked_up_along_the_mro():
    class Mine(nn.Linear):
        pass

    assert KINDS["layer"].lookup(Mine) is LinearHelper
    assert KINDS["layer"].lookup(nn.ReLU) is None
    registry = Registry("layer", type)
    registry._discovered = True
    registry.register(nn.Linear)(One)
    registry.register(Mine)(Two)
    assert registry.lookup(Mine) is Two
    assert registry.lookup(nn.Linear) is One


def test_what_is_available_cannot_be_changed_from_outside():
    soframe.available("solver").clear()
    assert "eigen" in soframe.available("solver")


# -- a name, a class, an instance --------------------------------------------------------------


@pytest.mark.parametrize("choice", ["inverse", Inverse, Inverse()])
def test_a_component_is_chosen_by_name_class_or_instance(choice):
    assert KINDS["solver"].build(choice, Solver) == Inverse()


def test_an_instance_is_used_as_it_is():
    mine = Inverse("sqrt")
    assert KINDS["solver"].build(mine, Solver) is mine


@pytest.mark.parametrize("choice", [3, None, KFAC, KFAC(), object])
def test_anything_else_is_refused(choice):
    with pytest.raises(TypeError, match=r"a solver is a name \(.*'eigen'.*\), a Solver class or"):
        KINDS["solver"].build(choice, Solver)


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
    preconditioner = soframe.Preconditioner(net(), kl_clip=None, **options)
    return {b.name: (b.method, b.solver, type(b.helper)) for b in preconditioner._blocks}


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
    with pytest.raises(TypeError, match=r"layers\['head'\] must be a LayerHelper class, not "):
        chosen(layers={"head": choice})


@pytest.mark.parametrize(
    ("patterns", "names", "expected"),
    [
        (["b", "a"], ["xay", "b"], "b"),
        (["^a$"], ["xay"], None),
        (["^Linear$"], ["head", "Linear"], "^Linear$"),
        ([], ["a"], None),
    ],
)
def test_first_match(patterns, names, expected):
    assert first_match(patterns, *names) == expected


def test_a_description_is_the_same_in_every_process():
    assert describe(Inverse("sqrt")) == "Inverse(split='sqrt')"
    assert describe(One()) == describe(One())
    assert " at 0x" not in describe([One(), One.__init__, lambda: None])
