"""What a tangent costs: rules for the functions that take most of the time, and one for all others.

A function that is linear in its inputs and in its parameters takes two products (its own result,
which plain forward-mode differentiation computes too, would be a third); a nonlinearity one
multiplication with a slope that all directions share. Any other function is differentiated by
torch, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import Tensor

from soframe.kernels import products
from soframe.trust_region.replay import RandomState


class Pair(NamedTuple):
    """A tensor and its tangent, None for zero."""

    primal: Tensor
    tangent: Tensor | None


Rule = Callable[..., list[Tensor | None]]
"""Takes a function's arguments, with a `Pair` for each tensor; returns a tangent per result."""

SLOPES: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.tanh: lambda y: 1 - y * y,
    torch.Tensor.tanh: lambda y: 1 - y * y,
    torch.sigmoid: lambda y: y * (1 - y),
    torch.Tensor.sigmoid: lambda y: y * (1 - y),
    torch.relu: lambda y: (y > 0).to(y.dtype),
    torch.Tensor.relu: lambda y: (y > 0).to(y.dtype),
    F.relu: lambda y: (y > 0).to(y.dtype),
}
"""The derivative of an elementwise function from its result."""

PRODUCTS = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d)


def rule_of(
    function: Any,
    results: Sequence[Tensor | None],
    random: RandomState | None,
    *,
    overwrites: bool = False,
) -> Rule:
    """Return how to differentiate a call.

    Args:
        function: What was called.
        results: What it returned, None where there is no derivative.
        random: The random state at which it was called; None if it draws no numbers.
        overwrites: Whether the arguments' tangents are needed by nobody else.

    Returns:
        The rule.
    """
    if function in SLOPES and results[0] is not None:
        return partial(_scaled, SLOPES[function](results[0]), overwrites)
    if function in PRODUCTS:
        return partial(_product, function)
    return partial(_differentiated, function, random)


def owns(function: Any) -> bool:
    """Return whether a function's tangents are nobody else's memory, as those of views are."""
    return function in SLOPES or function in PRODUCTS


def _scaled(
    slope: Tensor, overwrites: bool, argument: Pair, *rest: Any, **named: Any
) -> list[Tensor | None]:
    del rest, named
    assert argument.tangent is not None
    return [argument.tangent.mul_(slope) if overwrites else argument.tangent * slope]


def _product(
    function: Any,
    input: Pair,
    weight: Pair,
    bias: Pair | None = None,
    *rest: Any,
    **named: Any,
) -> list[Tensor | None]:
    x, dx = input
    w, dw = weight
    db = None if bias is None else bias.tangent
    if dw is None and db is not None:
        dw = torch.zeros_like(w)
    if function is F.linear and w.ndim == 2 and x.dtype == w.dtype:
        tangent = None if dw is None else products.linear(x, dw, db)
        return [tangent if dx is None else products.linear(dx, w, added=tangent)]
    tangent = None if dw is None else function(x, dw, db, *rest, **named)
    if dx is None:
        return [tangent]
    other: Tensor = function(dx, w, None, *rest, **named)
    return [other if tangent is None else tangent + other]


def _differentiated(
    function: Any, random: RandomState | None, *args: Any, **named: Any
) -> list[Tensor | None]:
    if random is not None:
        random.restore()
    with fwd.dual_level():
        args, named = replaced((args, named), Pair, dual)
        return [fwd.unpack_dual(result).tangent for result in tensors(function(*args, **named))]


def dual(pair: Pair) -> Tensor:
    """Return a tensor that carries its tangent, in a dual level."""
    primal, tangent = pair
    return primal if tangent is None else fwd.make_dual(primal, tangent)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for each in value for t in tensors(each)] if isinstance(value, tuple | list) else []


def replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with what is of a kind replaced, in the same order."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, dict):
        return {key: replaced(each, kind, by) for key, each in value.items()}
    if not isinstance(value, tuple | list):
        return value
    each = [replaced(one, kind, by) for one in value]
    return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
