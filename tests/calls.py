"""Counts of operators and of calls of functions in a step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

TURN = 30
"""Steps: a multiple of every interval at which statistics are taken or factors solved."""

Step = Callable[[], object]


class Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches.

    Attributes:
        count: How many so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(step: Step, steps: int = TURN) -> float:
    """Return how many operators a step dispatches, as a mean over steps."""
    with Operators() as counted:
        for _ in range(steps):
            step()
    return counted.count / steps


def calls(step: Step, steps: int = TURN) -> float:
    """Return the number of functions that a step calls, including C functions.

    Garbage from before the step, whose finalizers would be counted, is collected first; garbage
    collection is off meanwhile.
    """
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return found / steps
