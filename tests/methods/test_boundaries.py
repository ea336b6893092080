"""Settings at the ends of their ranges: those that are just valid, and those that are not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import soframe
from soframe.layers.layout import BlockShape
from soframe.methods import (
    KLSOAP,
    SGD,
    SOAP,
    AdamW,
    Blocked,
    KLShampoo,
    Momentum,
    NormaliseRows,
    Orthogonalise,
    Shampoo,
)
from soframe.methods.base import Given
from soframe.solvers import Eigen, Lazy, NewtonSchulz, OrthogonalIteration, Root
from soframe.specs import VALUE
from tests.curvature import randn

VALID: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (SOAP, {"max_size": 1}),
    (SOAP, {"max_ratio": 1.5}),
    (SOAP, {"betas": (0.0, 0.0), "shampoo_beta": 0.0}),
    (SOAP, {"eps": 0.5}),
    (AdamW, {"eps": 0.5, "betas": (0.0, 0.99)}),
    (SGD, {"momentum": 0.5, "nesterov": True}),
    (SGD, {"momentum": 0.0}),
    (Momentum, {"beta": 0.0}),
    (NormaliseRows, {"beta": 0.0, "eps": 0.5}),
    (Shampoo, {"max_size": 1}),
    (Shampoo, {"power": -5.0}),
    (Shampoo, {"epsilon": 0.0}),
    (KLShampoo, {"power": -0.5, "start": 0.5}),
    (KLSOAP, {"epsilon": 0.0, "start": 0.5}),
    (KLSOAP, {"epsilon": 0.5}),
    (Blocked, {"block_size": 1}),
    (Orthogonalise, {"steps": 1}),
    (NewtonSchulz, {"iterations": 1}),
    (OrthogonalIteration, {"iterations": 1}),
    (Root, {"power": 0.5, "epsilon": 0.0}),
    (Lazy, {"solver": Eigen(), "tolerance": 0.0}),
]
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (SOAP, {"max_ratio": math.nan}, "max_ratio"),
    (SOAP, {"betas": (0.9, 0.9, 0.9)}, "two numbers"),
    (SOAP, {"betas": 0.9}, "two numbers"),
    (AdamW, {"eps": math.inf}, "eps must be positive"),
    (AdamW, {"eps": 0.0}, "eps must be positive"),
    (SGD, {"nesterov": True}, "needs a momentum"),
    (Shampoo, {"power": -math.inf}, "power must be negative"),
    (Shampoo, {"power": 0.0}, "power must be negative"),
    (KLShampoo, {"power": 0.5}, "power"),
    (KLShampoo, {"power": -0.25}, "power must be -1/2"),
    (KLShampoo, {"start": math.inf}, "start"),
    (KLSOAP, {"max_size": 0}, "max_size"),
    (Blocked, {"block_size": True}, "block_size"),
    (Blocked, {"method": "kfac"}, "reads calls"),
]


@pytest.mark.parametrize(("kind", "settings"), VALID, ids=str)
def test_the_least_and_the_largest_are_taken(
    kind: Callable[..., Any], settings: dict[str, Any]
) -> None:
    made = kind(**settings)
    assert {name: getattr(made, name) for name in settings if name != "method"} == settings


@pytest.mark.parametrize(("kind", "settings", "words"), REFUSED, ids=str)
def test_what_is_beyond_is_refused(
    kind: Callable[..., Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**settings)


BAD: dict[str, list[Any]] = {
    "beta": [-0.1, 1.0],
    "betas": [0.9, (0.9, 1.0), (-0.1, 0.9)],
    "block_size": [0],
    "carry": ["up"],
    "coefficients": ["up"],
    "decay": [-0.1, 1.0],
    "eps": [0.0, math.inf],
    "epsilon": [-0.1, math.inf],
    "graft_steps": [-1],
    "iterations": [0],
    "max_ratio": [0.5, math.nan],
    "momentum": [-0.1, 1.0],
    "power": [math.inf],
    "row_beta": [-0.1, 1.0],
    "scale": ["up"],
    "shampoo_beta": [-0.1, 1.0],
    "sides": ["up"],
    "split": ["up"],
    "square_beta": [-0.1, 1.0],
    "start": [0.0],
    "steps": [0],
    "tolerance": [-0.1, math.nan],
}
PARTS = [part for kind in ("method", "solver") for part in soframe.available(kind).values()]


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (kind, setting)
        for kind in PARTS
        if kind.__module__.startswith("soframe.")
        for setting in sorted(BAD.keys() & inspect.signature(kind).parameters)
    ],
)
def test_parts_refuse_what_no_part_takes(kind: Any, setting: str) -> None:
    """Also those that have the setting from another, or pass it to a stage as its ``beta``."""
    for bad in BAD[setting]:
        with pytest.raises(ValueError, match=f"{setting}|beta"):
            kind(**{setting: bad})


# -- steps by hand --------------------------------------------------------------------------------


def given(gradient: torch.Tensor, state: dict[str, torch.Tensor], **data: Any) -> Given:
    return Given(gradient, gradient, data, state, 1, Eigen(), 0.1)


def test_eigenvalues_of_zero_have_inverse_roots_of_zero() -> None:
    data = {"L_values": {VALUE: torch.tensor([[4.0, 0.25, 0.0]])}}
    assert KLSOAP(epsilon=0.0)._inverse_root(data, "L").tolist() == [[0.5, 2.0, 0.0]]
    # Relative to the largest of them.
    roots = KLSOAP(epsilon=0.25)._inverse_root(data, "L")
    torch.testing.assert_close(roots, torch.tensor([[5.0, 1.25, 1.0]]).rsqrt())


def test_soap_waits_for_the_bases_of_both_sides() -> None:
    gradient = randn(2, 3, 4) * torch.tensor([1.0, 9.0]).double().view(2, 1, 1)
    square = torch.ones_like(gradient)
    state = {"square": square, "rotated_mean": square}
    left = {"vectors": torch.linalg.qr(randn(2, 3, 3))[0]}
    found = SOAP(skip_first=False).direct(given(gradient, state, L=left))
    sizes = gradient.square().mean((1, 2), keepdim=True).sqrt()  # [groups, 1, 1]
    torch.testing.assert_close(found.matrix, gradient / sizes)
    assert not found.state
    # What loses its basis stays in the former one.
    moved = SOAP().rebase({"square": gradient.square()}, {"L": left}, {})
    assert torch.equal(moved["square"], gradient.square())


def test_soap_keeps_no_mean_without_a_first_decay() -> None:
    shape = BlockShape(1, 3, 4)
    assert SOAP((0.0, 0.9)).state(shape).keys() == {"square"}
    assert SOAP((0.9, 0.0)).state(shape).keys() == {"rotated_mean", "square"}


def test_normalised_updates_may_be_tiny() -> None:
    """One of 1e-30 comes to a half: as much is added to its root mean square."""
    method = SOAP((0.0, 0.5), eps=1e30, correct_bias=False, normalise=True, skip_first=False)
    gradient = torch.ones(2, 1, 4, dtype=torch.float64)
    found = method.direct(given(gradient, {"square": torch.zeros_like(gradient)}))
    torch.testing.assert_close(found.matrix, 0.5 * gradient)


def test_names_of_parts_are_those_of_their_four_shapes() -> None:
    method, shape = Blocked(SOAP(), 4), BlockShape(1, 10, 11)
    names = {factor.name for factor in method.factors(shape)}
    assert len(names) == 8
    assert method.factor_names() == names
    assert method.state_names() == set(method.state(shape))
