"""Checks of single settings, each with its name in the message."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard

from torch import Tensor


def is_integer(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Return whether a setting is an integer of at least ``least``; booleans are not."""
    return not isinstance(value, bool) and isinstance(value, Integral) and not value < least


def require_integer(name: str, value: object, least: int) -> None:
    """Raise a ValueError unless a setting is an integer of at least ``least``."""
    if not is_integer(value):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value!r}")


def is_part(value: object) -> bool:
    """Return whether a setting is a fraction in (0, 1], as a float, or an integer of at least 1."""
    return 0 < value <= 1 if isinstance(value, float) else is_integer(value, 1)


def is_number(value: object) -> bool:
    """Return whether a setting is a real number, perhaps in a tensor, that fits into a float."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:  # an integer of hundreds of digits
        return False
    return True


def require_word(name: str, value: object, words: Iterable[str]) -> None:
    """Raise a ValueError unless a setting is one of some words."""
    known = list(words)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def require_numbers(owner: str, **settings: object) -> None:
    """Raise a ValueError unless all settings of ``owner`` are real numbers."""
    for name, value in settings.items():
        if not is_number(value):
            raise ValueError(f"{owner}: {name} must be a number, not {value!r}")
