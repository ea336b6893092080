"""What torch.compile, and a CUDA graph, are to leave alone, whoever calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run as it is where ``torch.compile`` would trace it.

    A step is collectives, solves and questions of what is finite: nothing that one graph could
    have. Not `torch.compiler.disable` alone: that imports the compiler, seconds of it, with the
    library.

    Args:
        function: The function, or a method as a class has it.

    Returns:
        The same; a compiled caller has one graph before it and one after it. While a CUDA graph is
        captured it raises a RuntimeError, before it has changed anything.
    """

    @functools.cache
    def disabled() -> Callable[P, R]:
        found: Callable[P, R] = torch.compiler.disable(function)
        return found

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
