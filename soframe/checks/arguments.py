"""Type checks of constructor arguments: errors name the setting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

FACTOR_DTYPES = (torch.float32, torch.float64)
"""The dtypes of factors and second-order data: torch factorises matrices in these."""


def check(
    *,
    model: object,
    optimizer: object,
    grad_scaler: object,
    dtype: object,
    skip: object,
    mappings: Mapping[str, object],
) -> None:
    """Check the types of arguments; ``mappings`` may map patterns, by the setting's name."""
    check_model(model)
    check_optimizer(optimizer)
    check_grad_scaler(grad_scaler)
    check_dtype(dtype)
    check_skip(skip)
    if not isinstance(mappings["layers"], Mapping):
        raise TypeError(
            f"layers is a mapping from patterns on module names to LayerHelper classes, or 'all', "
            f"not {mappings['layers']!r}"
        )
    for name, choice in mappings.items():
        if isinstance(choice, Mapping):
            check_patterns(f"{name}, a mapping from patterns", choice)


def check_model(model: object) -> None:
    """Raise a TypeError if a model is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")


def check_optimizer(optimizer: object) -> None:
    """Check that an optimizer, or a wrapper of one, has param groups with learning rates."""
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


def check_grad_scaler(grad_scaler: object) -> None:
    """Raise a TypeError if this is no GradScaler, callable or None."""
    known = isinstance(grad_scaler, torch.amp.GradScaler) or callable(grad_scaler)
    if grad_scaler is not None and (isinstance(grad_scaler, type) or not known):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, a callable that returns what the loss "
            f"is multiplied by, or None, not {grad_scaler!r}"
        )


def check_dtype(dtype: object) -> None:
    """Check that factors can have a dtype; None is the default."""
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
    """Check the patterns of modules to skip."""
    if isinstance(skip, str):
        raise TypeError(f"skip is a sequence of patterns: pass [{skip!r}]")
    if not isinstance(skip, Sequence):
        raise TypeError(f"skip is a sequence of patterns (strings), not {skip!r}")
    check_patterns("skip", skip)


def check_patterns(name: str, patterns: Sequence[object] | Mapping[Any, object]) -> None:
    """Check that all patterns of a setting are regular expressions."""
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
