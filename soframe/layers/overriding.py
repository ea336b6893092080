"""Subclasses of a known layer that compute in another way, so that its helper would be wrong.

A helper is registered for a class, and serves its subclasses. One of them may override ``forward``:
to cast or to count, which changes nothing, or to mask the weight, to standardise it or to scale the
output, so that the rows of the class are not those of the gradient. A report could not tell these
apart. So each call of such a module is held against the forward of the registered class, where
statistics are taken.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from soframe.layers.base import LayerHelper
from soframe.registry import KINDS

STEPS = ("forward", "_conv_forward")
"""What computes the output of a layer; torch's convolutions do it in the second."""

LEAST = 1e-3
"""Relative differences from here on count, in any precision."""


@cache
def _known_class(kind: type, helper: type[LayerHelper], given: bool) -> type[nn.Module] | None:
    """Return the class that a helper knows, of a module that overrides its forward.

    Args:
        kind: The module's class.
        helper: The helper's.
        given: Whether the module itself was given a ``forward``.

    Returns:
        None where nothing is overridden, or for a helper that is not the registered one, whose
        module may compute anything.
    """
    registry = KINDS["layer"]
    for base in kind.__mro__:
        found = registry.lookup(base, optional=True)
        if found is None:  # what is mixed in, as fully_shard does
            continue
        if found is not helper:
            return None
        if registry.has(base):
            known: type[nn.Module] = base
            same = all(getattr(kind, step, None) is getattr(base, step, None) for step in STEPS)
            return None if same and not given else known
    return None


def computes_otherwise(
    helper: LayerHelper, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> str | None:
    """Return why a call is not that of the class which a helper is registered for.

    Args:
        helper: The helper.
        args: What its module was called with.
        kwargs: Likewise.
        output: What it returned.

    Returns:
        The reason; None if it is, or nothing can be compared: parameters that are elsewhere, as
        sharded ones are between their layers' calls.

    Raises:
        OutOfMemoryError: If the device has no room for another output.
    """
    module = helper.module
    kind: type = type(module)
    base = _known_class(kind, type(helper), "forward" in module.__dict__)
    if base is None:
        return None
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    dtype = next((x.dtype for x in given if x.is_floating_point()), output.dtype)
    own = [p for p in module._parameters.values() if p is not None]
    if any(type(t) not in (Tensor, nn.Parameter) or t.numel() == 0 for t in (*own, *given, output)):
        return None
    with torch.no_grad():
        try:
            expected = base.forward(_twin(module, base, dtype), *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is: the class has another call
            return f"{_who(module, base)}, which cannot be called so ({error})"
        if expected.shape != output.shape:
            return f"{_who(module, base)}, whose output would be {list(expected.shape)}"
        difference = float((output - expected).float().norm())
        bound = max(LEAST, 8 * max(torch.finfo(t.dtype).eps for t in (output, expected)))
        if not difference > bound * float(expected.float().norm()):
            return None
    return _who(module, base)


def _who(module: nn.Module, base: type[nn.Module]) -> str:
    return f"{type(module).__name__}.forward does not compute what {base.__name__}'s does"


def _twin(module: nn.Module, base: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return a module of the base class with the same parameters, and with copies of its buffers.

    Args:
        module: The module.
        base: The class.
        dtype: That of the inputs: a subclass may cast its parameters so.
    """
    twin: nn.Module = object.__new__(base)
    parameters, buffers = module._parameters.items(), module._buffers.items()
    own = {
        **vars(module),
        "_parameters": {k: None if p is None else p.detach().to(dtype) for k, p in parameters},
        "_buffers": {k: None if b is None else b.clone() for k, b in buffers},
    }
    own.pop("forward", None)
    vars(twin).update(own)
    return twin
