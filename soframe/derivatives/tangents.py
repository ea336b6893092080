"""What a tangent costs: a rule for each function that a tape knows.

*Products* (layers, matrices, elementwise ones) take one product for each factor that moves; their
own result, which forward-mode differentiation computes too, would be another. *Linear* functions,
such as views and sums, are called with tangents; dropout multiplies them by its mask. *Symmetric*
ones have a symmetric Jacobian, so that what takes a gradient backward takes a tangent forward:
elementwise functions, whose Jacobian is diagonal; the softmax, ``diag(p) - p p^T``; and a
normalisation before its scale and shift, ``(I - 1 1^T / n - y y^T / n) / sigma``.

A function without a rule ends the tape: see `soframe.derivatives`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from soframe.derivatives.replay import RandomState
from soframe.kernels import products


class Moving(NamedTuple):
    """A tensor and its tangents along each direction, None for zero."""

    primal: Tensor
    tangents: Sequence[Tensor | None]


Tangents = list[list[Tensor | None]]
"""For each direction a tangent per result."""

Rule = Callable[..., Tangents]
"""Takes the results, whether it may overwrite the tangents that it is given, and a function's
arguments with a `Moving` for each tensor."""

aten: Any = torch.ops.aten


def _named(names: str, *owners: Any) -> set[Any]:
    """Return the functions of these names that the owners have."""
    return {
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    }


_EVERYWHERE = (torch, torch.Tensor, F)

BACKWARD: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    **dict.fromkeys(_named("tanh", torch, torch.Tensor), (aten.tanh_backward, ())),
    **dict.fromkeys(_named("sigmoid", torch, torch.Tensor), (aten.sigmoid_backward, ())),
    **dict.fromkeys(_named("relu", *_EVERYWHERE), (aten.threshold_backward, (0,))),
}
"""What multiplies by the derivative of an elementwise function, given its result and these."""

LAYERS = {F.linear, torch.conv1d, torch.conv2d, torch.conv3d}
PRODUCTS = _named("matmul mul bmm mm __matmul__ __mul__ __rmul__ __rmatmul__", torch, torch.Tensor)
SYMMETRIC = _named(
    "gelu silu mish elu selu celu leaky_relu softplus hardtanh hardswish hardsigmoid logsigmoid "
    "exp expm1 log log1p sin cos square sqrt rsqrt abs reciprocal erf clamp pow div true_divide "
    "__truediv__ __rtruediv__ __rdiv__ __pow__ __rpow__ softmax",
    *_EVERYWHERE,
)
RANDOM = _named("dropout dropout1d dropout2d dropout3d", F)
SUMS = _named("add sub rsub __add__ __radd__ __sub__ __rsub__", torch, torch.Tensor)
FILLS = _named("masked_fill where", torch, torch.Tensor)
JOINS = _named("cat concat stack", torch)
LINEAR = (
    SUMS
    | FILLS
    | JOINS
    | _named(
        "view reshape flatten unflatten transpose permute t movedim swapaxes unsqueeze squeeze "
        "expand expand_as narrow select split chunk unbind contiguous clone __getitem__ "
        "neg sum mean cumsum roll flip repeat repeat_interleave gather index_select to float "
        "double tril triu diagonal avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d pixel_shuffle embedding __neg__",
        *_EVERYWHERE,
    )
    | {getattr(torch.Tensor, name).__get__ for name in ("T", "mT")}
)
CHANNELS = {F.group_norm, F.batch_norm, F.instance_norm}
NORMS = CHANNELS | _named("layer_norm rms_norm", F)
POOLS: dict[Any, tuple[Any, int]] = {
    getattr(F, f"max_pool{n}d"): (getattr(F, f"max_pool{n}d_with_indices"), n) for n in (1, 2, 3)
}


def rule_of(function: Any, random: RandomState | None = None) -> Rule | None:
    """Return how to differentiate a call.

    Args:
        function: What was called.
        random: The random state at which it was called; None if it draws no numbers.

    Returns:
        The rule; None if there is none.
    """
    for functions, rule in _RULES:
        if function in functions:
            return partial(rule, function if random is None else partial(_from, random, function))
    return None


def _from(random: RandomState, function: Any, *args: Any, **named: Any) -> Any:
    random.restore()
    return function(*args, **named)


def owns(function: Any) -> bool:
    """Return whether a function's tangents are nobody else's memory, as those of views are."""
    return function in BACKWARD or function in LAYERS


def _elementwise(
    function: Any,
    results: Sequence[Tensor | None],
    overwrites: bool,
    *args: Any,
    **named: Any,
) -> Tangents:
    (tangents,) = _tangents_in((args, named))
    backward, further = BACKWARD[function]
    (result,) = results
    each: Tangents = []
    for tangent in tangents:
        if tangent is None:
            each.append([None])
        elif overwrites:
            each.append([backward.grad_input(tangent, result, *further, grad_input=tangent)])
        else:
            each.append([backward(tangent, result, *further)])
    return each


def _layers(
    function: Any,
    results: Sequence[Tensor | None],
    overwrites: bool,
    input: Moving,
    weight: Moving,
    bias: Moving | None = None,
    *options: Any,
    **named: Any,
) -> Tangents:
    del results, overwrites
    nothing = [None] * len(input.tangents)
    rows = zip(
        input.tangents, weight.tangents, nothing if bias is None else bias.tangents, strict=True
    )
    return [
        [
            None
            if dx is dw is db is None
            else _layer(function, input.primal, weight.primal, (dx, dw, db), options, named)
        ]
        for dx, dw, db in rows
    ]


def _layer(
    function: Any,
    x: Tensor,
    w: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: tuple[Any, ...],
    named: dict[str, Any],
) -> Tensor | None:
    dx, dw, db = tangents
    if dw is None and db is not None:
        dw = torch.zeros_like(w)
    if function is F.linear and w.ndim == 2 and x.dtype == w.dtype:
        tangent = None if dw is None else products.linear(x, dw, db)
        return tangent if dx is None else products.linear(dx, w, added=tangent)
    tangent = None if dw is None else function(x, dw, db, *options, **named)
    if dx is None:
        return tangent
    other: Tensor = function(dx, w, None, *options, **named)
    return other if tangent is None else tangent + other


def _products(
    function: Any, results: Sequence[Tensor | None], overwrites: bool, *args: Any, **named: Any
) -> Tangents:
    del results, overwrites
    first = [named.pop("input")] if "input" in named else []
    factors = (*first, *args, *named.values())
    one, other = (each.primal if isinstance(each, Moving) else each for each in factors)
    nothing = [None] * len(_tangents_in(factors)[0])
    rows = (each.tangents if isinstance(each, Moving) else nothing for each in factors)
    tangents: Tangents = []
    for d_one, d_other in zip(*rows, strict=True):
        terms = [] if d_one is None else [function(d_one, other)]
        terms += [] if d_other is None else [function(one, d_other)]
        tangents.append([_sum(terms)])
    return tangents


def _sum(terms: Sequence[Tensor]) -> Tensor | None:
    return sum(terms[1:], terms[0]) if terms else None


def _linear(
    function: Any, results: Sequence[Tensor | None], overwrites: bool, *args: Any, **named: Any
) -> Tangents:
    del overwrites
    given = _tangents_in((args, named))
    chooses = named.get("condition", named.get("mask")) if function in FILLS else None
    if function in FILLS and chooses is None:
        chooses = args[0 if function is torch.where else 1]
    # Integers and booleans are indices and masks, but here constants, as numbers are.
    adds = function in SUMS or function in JOINS or function in FILLS

    def tangent_or_zeros(j: int, one: Moving) -> Tensor:
        tangent = one.tangents[j]
        if tangent is not None:
            return tangent
        if one is chooses or not (adds or one.primal.is_floating_point()):
            return one.primal
        return one.primal.new_zeros(()).expand(one.primal.shape)

    tangents: Tangents = []
    for j in range(len(given[0])):
        if all(each[j] is None for each in given):
            tangents.append([None] * len(results))
            continue
        plain_args, plain_named = replaced((args, named), Moving, partial(tangent_or_zeros, j))
        # A number is a constant, but for ``alpha``, which was a sum's second of three arguments.
        if function in FILLS or (function in SUMS and len(args) < 3):
            plain_args = tuple(0 if isinstance(one, int | float) else one for one in plain_args)
            plain_named = {
                name: 0 if isinstance(one, int | float) and name != "alpha" else one
                for name, one in plain_named.items()
            }
        tangents.append([*tensors(function(*plain_args, **plain_named))])
    return tangents


def _dropout(
    function: Any, results: Sequence[Tensor | None], overwrites: bool, *args: Any, **named: Any
) -> Tangents:
    del results, overwrites
    (tangents,) = _tangents_in((args, named))
    # Of ones that lie in memory as the argument does: masks are drawn in that order.
    plain_args, plain_named = replaced(
        (args, named), Moving, lambda one: torch.ones_like(one.primal)
    )
    mask = function(*plain_args, **plain_named)
    return [[None if tangent is None else tangent * mask] for tangent in tangents]


def _symmetric(
    function: Any, results: Sequence[Tensor | None], overwrites: bool, *args: Any, **named: Any
) -> Tangents:
    del overwrites
    (result,) = results
    assert result is not None
    shape, dtype = result.shape, result.dtype
    leaves: list[tuple[Tensor, Sequence[Tensor | None]]] = []

    def leaf(one: Moving) -> Tensor:
        if all(tangent is None for tangent in one.tangents):
            return one.primal
        # As large as the result, so that the Jacobian in each of several arguments is diagonal.
        leaves.append((one.primal.detach().expand(shape).requires_grad_(), one.tangents))
        return leaves[-1][0]

    with torch.enable_grad():
        plain_args, plain_named = replaced((args, named), Moving, leaf)
        again = function(*plain_args, **plain_named)
    tangents: Tangents = []
    for j in range(len(leaves[0][1])):
        moved = [(one, each[j]) for one, each in leaves]
        terms = [
            _times_jacobian(again, one, tangent.expand(shape).to(dtype)).to(dtype)
            for one, tangent in moved
            if tangent is not None
        ]
        tangents.append([_sum(terms)])
    return tangents


def _times_jacobian(result: Tensor, argument: Tensor, tangent: Tensor) -> Tensor:
    """Return what a gradient in the result is in the argument, where the Jacobian is symmetric."""
    (gradient,) = torch.autograd.grad(result, argument, tangent, retain_graph=True)
    return gradient


def _norms(
    function: Any, results: Sequence[Tensor | None], overwrites: bool, *args: Any, **named: Any
) -> Tangents:
    del results, overwrites
    bound = signature(function).bind(*args, **named)
    input = bound.arguments["input"]
    weight, bias = (bound.arguments.get(name) for name in ("weight", "bias"))
    bound.arguments |= {name: None for name in ("weight", "bias") if name in bound.arguments}
    leaf = input.primal.detach().requires_grad_()
    plain_args, plain_named = replaced(
        (bound.args, bound.kwargs), Moving, lambda one: leaf if one is input else one.primal
    )
    with torch.enable_grad():
        normalised = function(*plain_args, **plain_named)
    y = normalised.detach()
    # Features are the last dimensions of a layer norm, and the second one of others.
    shape = (-1, *[1] * (y.ndim - 2)) if function in CHANNELS else ()

    def spread(one: Tensor) -> Tensor:
        return one.view(shape) if shape else one

    tangents: Tangents = []
    for j, tangent in enumerate(input.tangents):
        terms = [] if tangent is None else [_times_jacobian(normalised, leaf, tangent)]
        if terms and weight is not None:
            terms = [terms[0] * spread(weight.primal)]
        d_weight, d_bias = (None if one is None else one.tangents[j] for one in (weight, bias))
        terms += [] if d_weight is None else [y * spread(d_weight)]
        terms += [] if d_bias is None else [spread(d_bias).expand(y.shape)]
        tangents.append([_sum(terms)])
    return tangents


def _pools(
    function: Any,
    results: Sequence[Tensor | None],
    overwrites: bool,
    input: Moving,
    *options: Any,
    **named: Any,
) -> Tangents:
    del overwrites
    (result,) = results
    assert result is not None
    with_indices, dimensions = POOLS[function]
    _, indices = with_indices(input.primal, *options, **named)
    at = indices.flatten(-dimensions)
    return [
        [None if t is None else t.flatten(-dimensions).gather(-1, at).view(result.shape)]
        for t in input.tangents
    ]


def _attention(
    function: Any,
    results: Sequence[Tensor | None],
    overwrites: bool,
    query: Moving,
    key: Moving,
    value: Moving,
    attn_mask: Moving | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tangents:
    """With ``P = softmax(scale Q K^T + mask)`` that of ``P V``; the scores are computed again."""
    del function, results, overwrites
    assert dropout_p == 0.0  # `attention_without_rule` has told of others
    assert not enable_gqa
    q, k, v = query.primal, key.primal, value.primal
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q * scale) @ k.mT
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    mask = attn_mask.primal if attn_mask is not None else None
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    p = scores.softmax(-1).nan_to_num(0.0)  # a row without a key attends to nothing
    masks = [None] * len(query.tangents) if attn_mask is None else attn_mask.tangents
    tangents: Tangents = []
    rows = zip(query.tangents, key.tangents, value.tangents, masks, strict=True)
    for dq, dk, dv, dm in rows:
        terms = [] if dq is None else [(dq * scale) @ k.mT]
        terms += [] if dk is None else [(q * scale) @ dk.mT]
        terms += [] if dm is None else [dm]
        moved = [] if dv is None else [p @ dv]
        ds = _sum(terms)
        if ds is not None:
            weighed = p * ds
            moved.append((weighed - p * weighed.sum(-1, keepdim=True)) @ v)
        tangents.append([_sum(moved)])
    return tangents


def attention_without_rule(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a call of attention draws random numbers or shares keys among heads.

    Args:
        args: Of `torch.nn.functional.scaled_dot_product_attention`.
        named: Likewise.
    """
    dropout = args[4] if len(args) > 4 else named.get("dropout_p", 0.0)
    return bool(dropout != 0.0 or named.get("enable_gqa", False))


_RULES: list[tuple[Iterable[Any], Any]] = [
    (BACKWARD, _elementwise),
    (LAYERS, _layers),
    (PRODUCTS, _products),
    (LINEAR, _linear),
    (RANDOM, _dropout),
    (SYMMETRIC, _symmetric),
    (NORMS, _norms),
    (POOLS, _pools),
    ({F.scaled_dot_product_attention}, _attention),
]


@lru_cache
def signature(function: Any) -> inspect.Signature:
    """Return the signature of a function of Python."""
    return inspect.signature(function)


def _tangents_in(value: Any) -> list[Sequence[Tensor | None]]:
    tangents: list[Sequence[Tensor | None]] = []
    replaced(value, Moving, lambda one: tangents.append(one.tangents))
    return tangents


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
