"""Type checks of constructor arguments: errors name the setting."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    state_dtype: object,
    skip: Sequence[str],
    mappings: Mapping[str, object],
) -> None:
    """Check the types of arguments; ``mappings`` may map patterns, by the setting's name."""
    check_model(model)
    if optimizer is not None:
        _check_rates(optimizer)
    known = isinstance(grad_scaler, torch.amp.GradScaler) or callable(grad_scaler)
    if grad_scaler is not None and (isinstance(grad_scaler, type) or not known):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, a callable that returns the factor of "
            f"the loss, or None, not {grad_scaler!r}"
        )
    for name, chosen_dtype in (("dtype", dtype), ("state_dtype", state_dtype)):
        if chosen_dtype not in (*FACTOR_DTYPES, torch.bfloat16, None):
            raise ValueError(
                f"{name} must be torch.bfloat16, {' or '.join(map(str, FACTOR_DTYPES))}, or None "
                f"for the dtype of the parameters but at least float32, not {chosen_dtype}"
            )
    if isinstance(skip, str):
        raise TypeError(f"skip is a sequence of patterns: pass [{skip!r}]")
    _compile_patterns("skip", skip)
    for name, mapping in mappings.items():
        if isinstance(mapping, Mapping):
            _compile_patterns(name, mapping)


def keywords(constructor: Callable[..., object]) -> set[str]:
    """Return the names of the settings of a constructor, without the model."""
    parameters = inspect.signature(constructor).parameters.values()
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"model"}


def _compile_patterns(name: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{name}: the pattern {pattern!r} is no regular expression ({error}); "
                f"re.escape() makes one of a name"
            ) from None


def check_model(model: object) -> None:
    """Raise a TypeError if a model is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")


def _check_rates(optimizer: object) -> None:
    """Check that an optimizer, or a wrapper of one, has param groups with learning rates."""
    groups: Any = getattr(optimizer, "param_groups", None)
    if isinstance(optimizer, type) or not isinstance(groups, Sequence):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, whose param_groups have the learning "
            f"rates, or None, not {optimizer!r}"
        )
    for index, group in enumerate(groups):
        if group.get("lr") is None:
            raise ValueError(
                f"optimizer: param_groups[{index}]['lr'] is missing or None, as where "
                f"{type(optimizer).__name__} computes rates itself; give it lr=..., or pass "
                f"lr=... instead of optimizer="
            )
