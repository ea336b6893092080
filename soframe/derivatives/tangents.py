"""What a tangent costs: rules for the functions that take most of the time, and one for all others.

A function that is linear in its inputs and in its parameters takes two products (its own result,
which plain forward-mode differentiation computes too, would be a third); a nonlinearity one pass
over its result: its Jacobian is diagonal, so that what takes a gradient backward takes a tangent
forward. Any other function is differentiated by torch, alone; backward, twice, where torch has no
forward-mode derivative of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import Tensor

from soframe.derivatives.replay import RandomState
from soframe.derivatives.twice import differentiable, tangents_by_gradients
from soframe.kernels import products


class Pair(NamedTuple):
    """A tensor and its tangent, None for zero."""

    primal: Tensor
    tangent: Tensor | None


class Moving(NamedTuple):
    """A tensor and its tangents along each direction, None for zero."""

    primal: Tensor
    tangents: Sequence[Tensor | None]


Rule = Callable[..., list[list[Tensor | None]]]
"""Takes a function's arguments, with a `Moving` for each tensor; returns for each direction a
tangent per result."""

aten: Any = torch.ops.aten

BACKWARD: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    torch.tanh: (aten.tanh_backward, ()),
    torch.Tensor.tanh: (aten.tanh_backward, ()),
    torch.sigmoid: (aten.sigmoid_backward, ()),
    torch.Tensor.sigmoid: (aten.sigmoid_backward, ()),
    torch.relu: (aten.threshold_backward, (0,)),
    torch.Tensor.relu: (aten.threshold_backward, (0,)),
    F.relu: (aten.threshold_backward, (0,)),
}
"""What multiplies by the derivative of an elementwise function, given its result and these."""

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
    if function in BACKWARD and results[0] is not None:
        return partial(_elementwise, *BACKWARD[function], results[0], overwrites)
    if function in PRODUCTS:
        return partial(_products, function)
    return partial(_differentiated, function, random, len(results))


def owns(function: Any) -> bool:
    """Return whether a function's tangents are nobody else's memory, as those of views are."""
    return function in BACKWARD or function in PRODUCTS


def _elementwise(
    backward: Any,
    further: tuple[Any, ...],
    result: Tensor,
    overwrites: bool,
    argument: Moving,
    *rest: Any,
    **named: Any,
) -> list[list[Tensor | None]]:
    del rest, named
    each: list[list[Tensor | None]] = []
    for tangent in argument.tangents:
        if tangent is None:
            each.append([None])
        elif overwrites:
            each.append([backward.grad_input(tangent, result, *further, grad_input=tangent)])
        else:
            each.append([backward(tangent, result, *further)])
    return each


def _products(
    function: Any,
    input: Moving,
    weight: Moving,
    bias: Moving | None = None,
    *rest: Any,
    **named: Any,
) -> list[list[Tensor | None]]:
    nothing = [None] * len(input.tangents)
    rows = zip(
        input.tangents, weight.tangents, nothing if bias is None else bias.tangents, strict=True
    )
    run = partial(_product, function, input.primal, weight.primal, rest, named)
    return [[None if dx is dw is db is None else run(dx, dw, db)] for dx, dw, db in rows]


def _product(
    function: Any,
    x: Tensor,
    w: Tensor,
    rest: tuple[Any, ...],
    named: dict[str, Any],
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
) -> Tensor | None:
    if dw is None and db is not None:
        dw = torch.zeros_like(w)
    if function is F.linear and w.ndim == 2 and x.dtype == w.dtype:
        tangent = None if dw is None else products.linear(x, dw, db)
        return tangent if dx is None else products.linear(dx, w, added=tangent)
    tangent = None if dw is None else function(x, dw, db, *rest, **named)
    if dx is None:
        return tangent
    other: Tensor = function(dx, w, None, *rest, **named)
    return other if tangent is None else tangent + other


def _differentiated(
    function: Any, random: RandomState | None, count: int, *args: Any, **named: Any
) -> list[list[Tensor | None]]:
    moving: list[Moving] = []
    replaced((args, named), Moving, moving.append)
    each: list[list[Tensor | None]] = []
    for j, own in enumerate(zip(*(one.tangents for one in moving), strict=True)):
        if all(tangent is None for tangent in own):
            each.append([None] * count)
            continue

        def carried(one: Moving, j: int = j) -> Tensor:
            return dual(Pair(one.primal, one.tangents[j]))

        if random is not None:
            random.restore()
        try:
            with fwd.dual_level(), differentiable(function):
                own_args, own_named = replaced((args, named), Moving, carried)
                results = tensors(function(*own_args, **own_named))
                each.append([fwd.unpack_dual(result).tangent for result in results])
        except NotImplementedError:  # torch has no forward-mode derivative of this function
            if random is not None:
                random.restore()
            each.append(_by_gradients(function, j, args, named))
    return each


def _by_gradients(
    function: Any, j: int, args: tuple[Any, ...], named: dict[str, Any]
) -> list[Tensor | None]:
    leaves: list[Tensor] = []
    direction: list[Tensor] = []

    def leaf(one: Moving) -> Tensor:
        tangent = one.tangents[j]
        if tangent is None:
            return one.primal
        leaves.append(one.primal.detach().requires_grad_())
        direction.append(tangent)
        return leaves[-1]

    with torch.enable_grad(), differentiable(function):
        own_args, own_named = replaced((args, named), Moving, leaf)
        results = tensors(function(*own_args, **own_named))
        what = getattr(function, "__name__", str(function))
        return tangents_by_gradients(results, leaves, direction, what)


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
