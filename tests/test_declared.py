"""Defaults and declarations of registered parts: a change of one changes training, or what it is.

`CONTRIBUTING.md`, *Versions*: a change of a default is a change of the interface.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

import soframe
from soframe.layers import LayerHelper
from soframe.layers import __dict__ as layers
from soframe.methods.base import DECLARED, Method

ORTHOGONAL = {"scale": "spectral", "steps": 5, "coefficients": "muon", "dtype": None}
OF_SOAP = {
    "betas": (0.95, 0.95),
    "eps": 1e-8,
    "shampoo_beta": 0.95,
    "skip_first": True,
    "max_size": 10_000,
    "max_ratio": math.inf,
    "correct_bias": True,
    "normalise": False,
    "carry": "permute",
    "positions": 1,
}
OF_SOAP_MUON = {
    **ORTHOGONAL,
    "momentum": 0.85,
    "square_beta": 0.95,
    "shampoo_beta": 0.95,
    "eps": 1e-8,
    "max_size": 10_000,
    "max_ratio": 2.0,
    "carry": "permute",
    "steps": 3,
}
OF_SHAMPOO = {
    "decay": 0.999,
    "sides": "both",
    "power": None,
    "epsilon": 1e-6,
    "graft": "adamw",
    "graft_steps": 10,
    "max_size": 8192,
}
LONGEST = {"max_size": 8192}
METHODS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "blocked": {"method": "shampoo", "block_size": 1024},
    "diagonal": {},
    "ekfac": LONGEST,
    "eva": {},
    "foof": LONGEST,
    "graft": {},
    "kfac": LONGEST,
    "kfac-muon": {"momentum": 0.95, **LONGEST},
    "kfac-reduce": LONGEST,
    "kl-shampoo": {**OF_SHAMPOO, "decay": 0.95, "graft": None, "start": 0.1},
    "kl-soap": {**OF_SOAP, "epsilon": 1e-6, "start": 0.1},
    "match-rms": {"scale": "spectral"},
    "momentum": {"beta": 0.9, "nesterov": False, "averaged": True},
    "muon": {"momentum": 0.95, "nesterov": True, **ORTHOGONAL},
    "newton-muon": {"momentum": 0.95, **LONGEST},
    "normalise-rows": {"beta": 0.95, "eps": 1e-8},
    "normuon": {"momentum": 0.95, "nesterov": True, "row_beta": 0.95, **ORTHOGONAL},
    "orthogonalise": {"steps": 5, "coefficients": "muon", "dtype": None},
    "sgd": {"momentum": 0.0, "nesterov": False},
    "shampoo": OF_SHAMPOO,
    "soap": OF_SOAP,
    "soap-muon": OF_SOAP_MUON,
    "soap-normuon": OF_SOAP_MUON,
    "tnt": LONGEST,
}
SOLVERS: dict[str, dict[str, Any]] = {
    "basis": {"ordered": True},
    "eigen": {"follows": False},
    "inverse": {"split": "pi"},
    "newton-schulz": {"split": "pi", "iterations": 40},
    "orthogonal-iteration": {"iterations": 1, "tolerance": 0.1, "follows": False},
    "root": {"power": -0.25, "epsilon": 1e-6},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "auto": {"memory_limit": None, "hardware": None, "budget": 4.0},
    "comm-opt": {"colocate": True},
    "hybrid-opt": {"colocate": True, "gradient_workers": 0.5},
    "mem-opt": {},
    "owner-local": {},
    "sharded": {"colocate": False, "group": 4, "deferred": False, "wire": None},
}
DAMPINGS: dict[str, dict[str, Any]] = {
    "constant": {"value": 0.01},
    "levenberg-marquardt": {"initial": None, "omega": 0.8, "interval": 5, "low": 1e-8, "high": 1e8},
    "relative": {"value": 0.1},
}
BACKENDS: dict[str, dict[str, Any]] = {
    "recording": {"inner": None, "rank": 0, "world_size": 1, "fused": False},
    "single": {},
    "torch": {"group": None, "meet_timeout": 300.0, "overlap": True, "fused": None},
}
DEFAULTS = {
    "method": METHODS,
    "solver": SOLVERS,
    "strategy": STRATEGIES,
    "damping": DAMPINGS,
    "backend": BACKENDS,
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, parts in DEFAULTS.items() for name in parts]
)
def test_defaults_stay(kind: str, name: str) -> None:
    found: dict[str, Any] = {}
    for parameter in inspect.signature(soframe.available(kind)[name]).parameters.values():
        value = parameter.default
        if value is None or isinstance(value, bool | int | float | str | tuple):
            found[parameter.name] = value
    assert found == DEFAULTS[kind][name]


@pytest.mark.parametrize("kind", DEFAULTS)
def test_every_part_has_its_defaults_here(kind: str) -> None:
    of_soframe = {
        name
        for name, part in soframe.available(kind).items()
        if part.__module__.startswith("soframe.")
    }
    assert of_soframe == set(DEFAULTS[kind])


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
        if name in SOLVERS:
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
    assert {name: (policies[name].per_block, policies[name].interval) for name in DAMPINGS} == {
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
