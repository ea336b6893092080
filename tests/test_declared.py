"""Defaults and declarations of registered parts: a change of one changes training, or what it is.

`CONTRIBUTING.md`, *Versions*: a change of a default is a change of the interface.
"""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import soframe
from soframe.layers import LayerHelper
from soframe.layers import __dict__ as layers
from soframe.methods.base import DECLARED, Method
from soframe.registry import KINDS
from tests.docs.test_api import LISTED

TABLE = Path(__file__).with_name("defaults.txt")


def public_objects() -> list[Any]:
    """Return the functions and classes of the API pages, and all registered parts of soframe."""
    found = [part for kind in KINDS for part in soframe.available(kind).values()]
    for name in LISTED:
        listed = pkgutil.resolve_name(name)
        if not inspect.ismodule(listed):
            found.append(listed)
            continue
        for key, value in vars(listed).items():
            is_own = getattr(value, "__module__", "") == name and not key.startswith("_")
            if key in getattr(listed, "__all__", ()) or is_own:
                found.append(value)
    parts = filter(callable, found)  # without type variables and constants
    return [part for part in parts if getattr(part, "__module__", "").startswith("soframe.")]


def functions_of(part: Any) -> dict[str, Any]:
    """Return a function, or a class and its methods, by the names where these are defined."""
    found = {f"{part.__module__}.{part.__qualname__}": part}
    if not inspect.isclass(part):
        return found
    for base in reversed(part.__mro__):
        name = f"{base.__module__}.{base.__qualname__}"
        if not name.startswith("soframe."):
            continue
        for key, value in vars(base).items():
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and not key.startswith("_"):
                found[f"{name}.{key}"] = function
    return found


def is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def defaults() -> list[str]:
    """Return a line for each public function or class with defaults: its name, and they."""
    lines = set()
    for part in public_objects():
        for name, function in functions_of(part).items():
            parameters = inspect.signature(function).parameters.values()
            plain = [p for p in parameters if p.default is not p.empty and is_plain(p.default)]
            if plain:
                lines.add(f"{name}({', '.join(f'{p.name}={p.default!r}' for p in plain)})")
    return sorted(lines)


def test_defaults_stay() -> None:
    """A change is written down by ``python -m tests.test_declared``, and in CHANGELOG.md."""
    assert defaults() == TABLE.read_text(encoding="utf-8").splitlines()


# -- what methods declare --------------------------------------------------------------------------

OWN_LENGTH: dict[str, Any] = {"clipped": False, "damped": False}
AT_ONCE: dict[str, Any] = {**OWN_LENGTH, "starts_at_once": True}
APART: dict[str, Any] = {**AT_ONCE, "joint": False}
OF_MUON: dict[str, Any] = {**APART, "auxiliary_ratio": 0.2}
DAMPED: dict[str, Any] = {"joint": False, "clipped": False, "starts_at_once": True}
DECLARATIONS: dict[str, dict[str, Any]] = {
    "adamw": {**AT_ONCE, "elementwise": True},
    "blocked": {**OWN_LENGTH, "joint": False},
    "diagonal": {"scalings": ("fisher",)},
    "ekfac": {"scalings": ("fisher",)},
    "eva": {"empirical_only": True, "scalings": ("fisher",)},
    "foof": {},
    "graft": AT_ONCE,
    "kfac": {},
    "kfac-muon": {**DAMPED, "auxiliary_ratio": 0.2},
    "kfac-reduce": {"reduces": True},
    "kl-shampoo": {**OWN_LENGTH, "joint": False, "observes_with_data": True},
    "kl-soap": {**APART, "refreshes_after": True, "observes_with_data": True},
    "match-rms": {**AT_ONCE, "auxiliary_ratio": 0.2},
    "momentum": {**AT_ONCE, "elementwise": True},
    "muon": OF_MUON,
    "newton-muon": {**DAMPED, "auxiliary_ratio": 0.2},
    "normalise-rows": APART,
    "normuon": OF_MUON,
    "orthogonalise": APART,
    "sgd": {**AT_ONCE, "elementwise": True},
    "shampoo": {**OWN_LENGTH, "joint": False},
    "soap": {**APART, "refreshes_after": True},
    "soap-muon": {**OF_MUON, "refreshes_after": True},
    "soap-normuon": {**OF_MUON, "refreshes_after": True},
    "tnt": {"scalings": ("fisher",)},
}


@pytest.mark.parametrize("name", DECLARATIONS)
def test_methods_declare_what_they_are(name: str) -> None:
    method, plain = soframe.available("method")[name](), Method
    declared = {key: getattr(method, key) for key in DECLARED}
    found = {key: value for key, value in declared.items() if value != getattr(plain, key)}
    assert found == DECLARATIONS[name]


@pytest.mark.parametrize("name", ["kfac", "ekfac", "foof", "tnt", "kfac-reduce"])
def test_the_longest_side_is_not_in_a_methods_name(name: str) -> None:
    """States and ranks are compared by it."""
    kind = soframe.available("method")[name]
    assert repr(kind(max_size=64)) == f"{kind.__name__}()"


def test_chains_are_named_by_their_stages() -> None:
    chain = soframe.methods.Chain(("momentum",))
    assert repr(chain) == "Chain(stages=(Momentum(beta=0.9, nesterov=False, averaged=True),))"
    assert chain == soframe.methods.Chain(("momentum",))
    assert "positions" not in repr(soframe.methods.SOAP())


def test_a_method_is_plain_unless_it_declares_otherwise() -> None:
    assert {key: getattr(Method, key) for key in DECLARED} == {
        "reduces": False,
        "joint": True,
        "clipped": True,
        "damped": True,
        "starts_at_once": False,
        "refreshes_after": False,
        "observes_with_data": False,
        "empirical_only": False,
        "elementwise": False,
        "scalings": ("fisher", "kaisa"),
        "auxiliary_ratio": 1.0,
    }


def test_solvers_declare_what_they_take() -> None:
    names = ("damps_factors", "follows", "diagonals", "continues")
    found = {}
    for name, kind in soframe.available("solver").items():
        if kind.__module__.startswith("soframe."):
            solver = kind()
            found[name] = [key for key in names if getattr(solver, key)]
    assert found == {
        "basis": ["continues"],
        "eigen": ["diagonals"],
        "inverse": ["damps_factors", "diagonals"],
        "newton-schulz": ["damps_factors", "diagonals", "continues"],
        "orthogonal-iteration": ["diagonals", "continues"],
        "root": [],
    }


def test_clips_and_policies_declare_what_they_read() -> None:
    clips = soframe.available("clip")
    assert {name: clips[name].reads_gradients for name in ("kl", "norm")} == {
        "kl": True,
        "norm": False,
    }
    policies = soframe.available("damping")
    names = ("constant", "levenberg-marquardt", "relative")
    assert {name: (policies[name].per_block, policies[name].interval) for name in names} == {
        "constant": (False, 0),
        "levenberg-marquardt": (False, 5),
        "relative": (True, 0),
    }


CONVOLUTION = ("sample", True)
UNITS = {
    "AttentionHelper": ("row", False),
    "BatchNormHelper": (None, False),
    **dict.fromkeys(("Conv1dHelper", "Conv2dHelper", "Conv3dHelper"), CONVOLUTION),
    **dict.fromkeys([f"ConvTranspose{n}dHelper" for n in (1, 2, 3)], CONVOLUTION),
    "EmbeddingBagHelper": ("sample", False),
    "EmbeddingHelper": ("row", False),
    "ExpertsHelper": (None, False),
    "GroupNormHelper": ("sample", False),
    "InstanceNormHelper": ("sample", False),
    "LanguageModelRMSNormHelper": ("row", False),
    "LayerHelper": (None, False),
    "LayerNormHelper": ("row", False),
    "LinearHelper": ("row", True),
    "NormHelper": (None, False),
    "RMSNormHelper": ("row", False),
    "RecurrentCellHelper": ("row", False),
    "TransposedLinearHelper": ("row", True),
}
"""The parts of a call that can be taken, and whether moments take rows in half precision."""


def test_layers_declare_what_can_be_taken_of_a_call() -> None:
    helpers = [kind for kind in layers.values() if isinstance(kind, type)]
    found = {}
    for kind in helpers:
        if issubclass(kind, LayerHelper):
            found[kind.__name__] = (kind.unit, kind.widens)
    assert found == UNITS


if __name__ == "__main__":
    TABLE.write_text("\n".join([*defaults(), ""]), encoding="utf-8")
