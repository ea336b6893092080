"""Components by name, class or instance; what a wrong choice is told."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from torch import nn

import soframe
from soframe import registry
from soframe.registry import Registry, describe, first_match
from soframe.solvers import Eigen, Inverse


@pytest.fixture
def solvers() -> Registry:
    """A registry of two."""
    own = Registry("solver")
    own.register("eigen")(Eigen)
    own.register("inverse")(Inverse)
    own._discovered = True
    return own


class Points(list[EntryPoint]):
    """Entry points, among which one can select."""

    def select(self, *, group: str) -> list[EntryPoint]:
        return [point for point in self if point.group == group]


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that installed packages would have."""
    points = Points()
    monkeypatch.setattr(registry, "_installed", lambda path: points)
    return points


class Plugin:
    """What an installed package brings."""


class Late:
    """What is installed while the program runs."""


def point(name: str, group: str, value: str = "Plugin") -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{value}", group)


def test_a_choice_is_a_name_a_class_or_an_instance(solvers: Registry) -> None:
    assert solvers.build("inverse", soframe.Solver) == Inverse()
    assert solvers.build(Inverse, soframe.Solver) == Inverse()
    own = Inverse(split="sqrt")
    assert solvers.build(own, soframe.Solver) is own


@pytest.mark.parametrize("choice", [None, 3, nn.Linear, nn.Linear(1, 1), Plugin])
def test_any_other_choice_lists_the_names(solvers: Registry, choice: Any) -> None:
    with pytest.raises(TypeError, match=r"solver is a name \('eigen', 'inverse'\)"):
        solvers.build(choice, soframe.Solver)


def test_a_name_that_does_not_exist_lists_those_that_do(solvers: Registry) -> None:
    with pytest.raises(ValueError, match="no solver 'eigne'; registered: 'eigen', 'inverse'"):
        solvers.get("eigne")
    with pytest.raises(ValueError, match="registered: none"):
        Registry("solver").get("x")


def test_a_key_is_taken_once(solvers: Registry) -> None:
    with pytest.raises(ValueError, match=r"'eigen' is already soframe\.solvers\.eigen\.Eigen"):
        solvers.register("eigen")(Inverse)
    assert solvers.get("eigen") is Eigen
    assert solvers.register("eigen")(Eigen) is Eigen
    assert solvers.register("eigen", override=True)(Inverse) is Inverse
    assert solvers.get("eigen") is Inverse


def test_a_class_that_was_reloaded_replaces_itself(solvers: Registry) -> None:
    again = type("Eigen", (Inverse,), {"__module__": Eigen.__module__})
    solvers.register("eigen")(again)
    assert solvers.get("eigen") is again


def test_keys_have_one_type(solvers: Registry) -> None:
    with pytest.raises(TypeError, match="under a str"):
        solvers.register(nn.Linear)
    with pytest.raises(TypeError, match="under a type"):
        Registry("layer", type).register("Linear")


def test_the_nearest_class_serves() -> None:
    layers = Registry("layer", type)
    layers._discovered = True
    base, nearer = type("Base", (), {}), type("Nearer", (), {})
    layers.register(nn.Module)(base)
    layers.register(nn.Linear)(nearer)
    derived = type("Derived", (nn.Linear,), {})
    assert layers.lookup(derived) is nearer
    assert layers.lookup(nn.Conv2d) is base
    assert layers.lookup(int) is None


def test_entry_points_are_found_once(entry_points: list[EntryPoint]) -> None:
    entry_points.append(point("plug", "soframe.solver"))
    entry_points.append(point("other", "soframe.method"))
    own = Registry("solver")
    assert own.get("plug").__name__ == "Plugin"
    entry_points.append(point("late", "soframe.solver", "Late"))
    assert set(own.available()) == {"plug"}


def test_an_entry_point_whose_key_is_taken(entry_points: list[EntryPoint]) -> None:
    entry_points.append(point("eigen", "soframe.solver"))
    own = Registry("solver")
    own.register("eigen")(Eigen)
    with pytest.raises(ValueError, match="already"):
        own.available()


def test_a_layer_of_an_entry_point_registers_itself(entry_points: list[EntryPoint]) -> None:
    entry_points.append(point("plug", "soframe.layer"))
    with pytest.raises(ValueError, match=r"@soframe\.register\('layer', ModuleType\)"):
        Registry("layer", type).available()


def test_the_public_functions() -> None:
    with pytest.raises(ValueError, match=r"no kind 'solvers'.*solver"):
        soframe.available("solvers")
    with pytest.raises(ValueError, match="no kind"):
        soframe.register("solvers", "x")
    assert soframe.available("solver")["eigen"] is Eigen
    soframe.available("solver").pop("inverse")  # a copy
    assert soframe.available("solver")["inverse"] is Inverse


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["x", "^lin"], "^lin"),
        (["Linear", "lin"], "Linear"),
        (["lin$"], None),
        ([], None),
        ([""], ""),
    ],
)
def test_the_first_pattern_wins(patterns: list[str], expected: str | None) -> None:
    assert first_match(patterns, "lin.0", "Linear") == expected


def test_what_is_optional_is_found_by_who_asks_for_it() -> None:
    own = Registry("layer", type)
    own._discovered = True
    own.register(nn.Module)(Plugin)
    own.register_optional(nn.Linear, "torch.nn.modules.conv.Conv2d")(Late)
    derived = type("Derived", (nn.Linear,), {})
    for module in (nn.Linear, nn.Conv2d, derived):
        assert own.lookup(module) is Plugin
        assert own.lookup(module, optional=True) is Late
    own.register(derived)(Plugin)  # the nearest counts, and what is registered before the rest
    assert own.lookup(derived, optional=True) is Plugin
    own.register(nn.Linear)(Plugin)
    assert own.lookup(nn.Linear, optional=True) is Plugin
    assert own.available() == {nn.Module: Plugin, derived: Plugin, nn.Linear: Plugin}


def test_parts_without_a_text_of_their_own_are_told_apart_by_their_options() -> None:
    class Plain:
        def __init__(self, rate: object) -> None:
            self.rate = rate
            self._made = object()

    one, other = Plain(1.0), Plain(2.0)
    assert describe(one) == describe(Plain(1.0)) != describe(other)
    assert describe([("a", one)]) == describe([("a", Plain(1.0))]) != describe([("a", other)])
    assert describe({"a": (one,)}) != describe({"a": (other,)})
    assert " at 0x" not in describe({"a": (one, object())})
    assert describe(Plain(object())) == describe(Plain(object()))  # nothing that has an address
    assert describe(("a", [1, 2.5])) == repr(("a", [1, 2.5]))
