"""Forward-mode derivatives that reuse the activations of the first forward pass.

Every derivative along a direction runs the model again, and plain forward-mode differentiation
computes all activations again beside their tangents. A `Memo` watches the torch functions that the
first pass calls. While a later pass runs, a call with the same inputs (the same memory, unchanged
since) gets its primal result from the memo, and for the functions that cost most the tangent alone
is computed: of a linear layer or a convolution by two products in place of three, of a nonlinearity
by one multiplication with a slope that all directions share.

Nothing depends on it: what a memo does not recognise is computed as ever. That is so from the first
in-place function on, whose input is gone. `jacobian_product` without a memo is the plain twin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from soframe.kernels import products

_Arguments = tuple[Any, ...]

SLOPES: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.tanh: lambda y: 1 - y * y,
    torch.Tensor.tanh: lambda y: 1 - y * y,
    torch.sigmoid: lambda y: y * (1 - y),
    torch.Tensor.sigmoid: lambda y: y * (1 - y),
    torch.relu: lambda y: (y > 0).to(y.dtype),
    torch.Tensor.relu: lambda y: (y > 0).to(y.dtype),
}
"""The derivative of an elementwise function from its result."""

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, type(Ellipsis))

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


class Memo:
    """What the functions of a forward pass returned.

    It keeps the pass's intermediate tensors, most of which autograd keeps anyway, until it is
    itself forgotten.

    Attributes:
        hits: How many calls were answered.
    """

    def __init__(self) -> None:
        self.hits = 0
        # A random function of the same inputs has another result each time it is called.
        self._results: dict[Hashable, list[tuple[Tensor, int]]] = {}
        self._asked: Counter[Hashable] = Counter()
        self._slopes: dict[int, Tensor] = {}
        # Memory that is part of a key must not be given to another tensor.
        self._storages: list[torch.UntypedStorage] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Remember what is called within this context.

        Yields:
            Nothing.
        """
        with _Mode(self._record):
            yield

    @contextmanager
    def recall(self) -> Iterator[None]:
        """Answer what is called within this context, in a dual level.

        Yields:
            Nothing.
        """
        self._asked.clear()
        with _Mode(self._recall):
            yield

    def _record(self, function: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        key = _call_key(function, args, kwargs, tensors)
        result = function(*args, **kwargs)
        if key is not None and tensors and type(result) is Tensor:
            self._storages += [tensor.untyped_storage() for tensor in tensors]
            self._results.setdefault(key, []).append((result.detach(), result._version))
        return result

    def _recall(self, function: Any, args: _Arguments, kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        known = self._next(_call_key(function, args, kwargs, tensors))
        if known is None or known[0]._version != known[1]:
            return function(*args, **kwargs)
        self.hits += 1
        primal = known[0].detach()  # another tensor, with the same memory
        if all(fwd.unpack_dual(tensor).tangent is None for tensor in tensors):
            return primal
        if function is F.linear or function in CONVOLUTIONS:
            tangent = _product_tangent(function, *args, **kwargs)
        elif function in SLOPES:
            tangent = self._slope_tangent(function, primal, args[0])
        else:
            result = function(*args, **kwargs)
            tangent = fwd.unpack_dual(result).tangent
        return primal if tangent is None else fwd.make_dual(primal, tangent)

    def _next(self, key: Hashable) -> tuple[Tensor, int] | None:
        """Return what the call of this pass returned in the first one, and its version then."""
        known = self._results.get(key, ())
        count = self._asked[key]
        self._asked[key] += 1
        return known[count] if count < len(known) else None

    def _slope_tangent(self, function: Any, result: Tensor, argument: Tensor) -> Tensor | None:
        tangent = fwd.unpack_dual(argument).tangent
        if tangent is None:
            return None
        where = result.data_ptr()
        if where not in self._slopes:
            self._slopes[where] = SLOPES[function](result)
        scaled: Tensor = tangent * self._slopes[where]
        return scaled


def _product_tangent(
    function: Any,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor | None:
    """Return the tangent of a function that is linear in its inputs and in its parameters."""
    x, dx = fwd.unpack_dual(inputs)
    w, dw = fwd.unpack_dual(weight)
    db = None if bias is None else fwd.unpack_dual(bias).tangent
    if dw is None and db is not None:
        dw = torch.zeros_like(w)
    plain = function is F.linear and w.ndim == 2 and x.dtype == w.dtype
    if plain and not torch.is_autocast_enabled(x.device.type):
        tangent = None if dw is None else products.linear(x, dw, db)
        return tangent if dx is None else products.linear(dx, w, added=tangent)
    tangent = None if dw is None else function(x, dw, db, *rest, **named)
    if dx is None:
        return tangent
    other: Tensor = function(dx, w, None, *rest, **named)
    return other if tangent is None else tangent + other


class _Mode(TorchFunctionMode):
    def __init__(self, handle: Callable[[Any, _Arguments, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(
        self, func: Any, types: Any, args: _Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._handle(func, args, kwargs or {})


def _call_key(
    function: Any, args: _Arguments, kwargs: dict[str, Any], tensors: list[Tensor]
) -> Hashable:
    """Return what identifies a call, or None; collect the tensors among its arguments."""
    if getattr(function, "__name__", "") == "__get__":  # an attribute of a tensor
        return None
    keys = _keys(args, tensors)
    if keys is None or not kwargs:
        return None if keys is None else (function, keys)
    named = _keys(tuple(kwargs.values()), tensors)
    return None if named is None else (function, keys, tuple(kwargs), named)


def _keys(values: Sequence[Any], tensors: list[Tensor]) -> Hashable:
    found: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.layout is not torch.strided or value.is_inference():
                return None
            tensors.append(value)
            where = (value.data_ptr(), value.shape, value.stride(), value.dtype, value._version)
            found.append(where)
        elif kind is tuple or kind is list:
            inner = _keys(value, tensors)
            if inner is None:
                return None
            found.append(inner)
        elif kind is slice:
            found.append((kind, value.start, value.stop, value.step))
        elif kind in _PLAIN:
            # 1, 1.0 and True are equal, 0.0 and -0.0 too.
            found.append((kind, repr(value) if kind is float else value))
        else:
            return None
    return tuple(found)
