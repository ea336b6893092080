"""What a user may pass to a constructor: whatever cannot be meant is refused there, by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

FACTOR_DTYPES = (torch.float32, torch.float64)
"""The dtypes of factors and second-order data: those in which torch factorises matrices."""


def check(
    *,
    model: object,
    optimizer: object,
    grad_scaler: object,
    dtype: object,
    skip: object,
    mappings: Mapping[str, object],
) -> None:
    """Check arguments whose type says whether they can be meant.

    Args:
        model: A module.
        optimizer: An optimizer, something with its ``param_groups``, or None.
        grad_scaler: A ``GradScaler``, a callable, or None.
        dtype: The dtype of factors, or None.
        skip: Patterns.
        mappings: What may be a mapping from patterns, by its setting's name.

    Raises:
        TypeError: If one is of another type.
        ValueError: If a pattern or the dtype is none.
    """
    check_model(model)
    check_optimizer(optimizer)
    check_grad_scaler(grad_scaler)
    check_dtype(dtype)
    check_skip(skip)
    if isinstance(mappings["method"], torch.optim.Optimizer):
        raise TypeError(
            f"method is a curvature method, not {type(mappings['method']).__name__}: pass an "
            f"optimizer by name, optimizer=..."
        )
    if not isinstance(mappings["layers"], Mapping):
        raise TypeError(
            f"layers is a mapping from patterns on module names to LayerHelper classes, or 'all', "
            f"not {mappings['layers']!r}"
        )
    for name, choice in mappings.items():
        if isinstance(choice, Mapping):
            check_patterns(f"{name}, a mapping from patterns", choice)


def check_model(model: object) -> None:
    """Check that a model is a module.

    Args:
        model: The model.

    Raises:
        TypeError: If it is none.
    """
    if isinstance(model, nn.Module):
        return
    hint = "; pass an instance of the class" if isinstance(model, type) else ""
    if not hint and isinstance(model, Iterable):
        raise TypeError(
            f"model must be a torch.nn.Module, not a {type(model).__name__}, such as "
            f"model.parameters() is: pass the model, whose parameters are found by themselves"
        )
    raise TypeError(f"model must be a torch.nn.Module, not {model!r}{hint}")


def check_optimizer(optimizer: object) -> None:
    """Check that an optimizer has the groups that learning rates are read from.

    Wrappers of optimizers are no ``torch.optim.Optimizer``, some of them.

    Args:
        optimizer: The optimizer, or None.

    Raises:
        TypeError: If it has none.
        ValueError: If one of them lacks parameters or a learning rate, or if the optimizer makes
            the gradients itself.
    """
    if optimizer is None:
        return
    groups: Any = getattr(optimizer, "param_groups", None)
    if isinstance(optimizer, type) or not isinstance(groups, Sequence):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, whose param_groups have the learning "
            f"rates, or None, not {optimizer!r}"
        )
    for index, group in enumerate(groups):
        lacking = [key for key in ("params", "lr") if key not in group]
        if lacking:
            raise ValueError(
                f"optimizer: param_groups[{index}] has no {' and no '.join(map(repr, lacking))}; "
                f"pass lr=... instead of optimizer="
            )
        if group["lr"] is None:
            raise ValueError(
                f"optimizer: param_groups[{index}]['lr'] is None, so {type(optimizer).__name__} "
                f"makes rates itself and keeps them to itself; give it lr=..., or pass lr=... "
                f"instead of optimizer="
            )
    if type(optimizer).__module__.startswith("opacus."):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} makes a private gradient within its step(), "
            f"over what a Preconditioner writes; give make_private() a soframe.Optimizer with a "
            f"method that reads gradients alone, such as 'soap', 'muon' or 'shampoo'"
        )
    if _needs_closure(optimizer):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__}.step() makes gradients anew, by a closure, "
            f"so that preconditioned ones would be lost, and compares gradients of several steps, "
            f"which preconditioning changes; use an optimizer whose step() needs no closure"
        )


def _needs_closure(optimizer: object) -> bool:
    """Return whether an optimizer cannot step without a closure, as LBFGS."""
    step = getattr(type(optimizer), "step", None)
    if not callable(step):
        return False
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_grad_scaler(grad_scaler: object) -> None:
    """Check that something is, or tells, what the loss is multiplied by.

    Args:
        grad_scaler: A ``GradScaler``, a callable, or None.

    Raises:
        TypeError: If it is none of these.
    """
    known = isinstance(grad_scaler, torch.amp.GradScaler) or callable(grad_scaler)
    if grad_scaler is not None and (isinstance(grad_scaler, type) or not known):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, a callable that returns what the loss "
            f"is multiplied by, or None, not {grad_scaler!r}"
        )


def check_dtype(dtype: object) -> None:
    """Check that factors can have a dtype.

    Args:
        dtype: The dtype, or None.

    Raises:
        TypeError: If it is no dtype.
        ValueError: If it is one that matrices cannot be factorised in.
    """
    if dtype is None:
        return
    known = " or ".join(map(str, FACTOR_DTYPES))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be {known}, or None, not {dtype!r}")
    if dtype not in FACTOR_DTYPES:
        raise ValueError(
            f"dtype is that of factors, which are factorised: it must be {known}, or None for "
            f"that of the parameters but at least float32, not {dtype}"
        )


def check_skip(skip: object) -> None:
    """Check patterns of modules to leave alone.

    Args:
        skip: The patterns.

    Raises:
        TypeError: If they are no sequence of strings.
        ValueError: If one is no regular expression.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip is a sequence of patterns: pass [{skip!r}]")
    if not isinstance(skip, Sequence):
        raise TypeError(f"skip is a sequence of patterns (strings), not {skip!r}")
    check_patterns("skip", skip)


def check_patterns(name: str, patterns: Sequence[object] | Mapping[Any, object]) -> None:
    """Check that all patterns are regular expressions.

    Args:
        name: The setting's name, for errors.
        patterns: The patterns.

    Raises:
        TypeError: If one is no string.
        ValueError: If one is no regular expression.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{name}: a pattern is a string, not {pattern!r}")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{name}: the pattern {pattern!r} is no regular expression ({error}); "
                f"re.escape() makes one of a name"
            ) from None
