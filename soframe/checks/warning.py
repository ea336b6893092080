"""Warnings at the line of the user."""

from __future__ import annotations

import sys
import warnings
from traceback import walk_stack
from types import FrameType

_LIBRARIES = {"contextlib", "functools", "soframe", "torch"}


def warn(text: str) -> None:
    """Warn at the innermost line of the user, outside of soframe, torch and Python's wrappers."""
    level = 1
    for frame, _ in walk_stack(sys._getframe()):
        if not _is_library(frame):
            break
        level += 1
    warnings.warn(f"soframe: {text}", stacklevel=level)


def _is_library(frame: FrameType) -> bool:
    package, _, _ = str(frame.f_globals.get("__name__")).partition(".")
    return package in _LIBRARIES
