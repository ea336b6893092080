"""Functions that torch.compile must not trace and CUDA graphs must not capture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from ``torch.compile``; it raises a RuntimeError under graph capture.

    A step is collectives, solves and tests for finite values, which one graph cannot contain. A
    compiled caller has one graph before the call and one after it. Plain `torch.compiler.disable`
    would import the compiler with the library, which takes seconds. The RuntimeError is raised
    before anything has changed.
    """

    @functools.cache
    def disabled() -> Callable[P, R]:
        excluded: Callable[P, R] = torch.compiler.disable(function)
        return excluded

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return disabled()(*args, **kwargs)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{function.__qualname__} cannot be captured in a CUDA graph: it asks whether "
                f"gradients are finite, and what is due differs from step to step. Capture the "
                f"forward and backward pass alone, as torch.compile(mode='reduce-overhead') does, "
                f"and call it after their replay"
            )
        return function(*args, **kwargs)

    return call
