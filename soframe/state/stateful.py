"""States as `torch.distributed.checkpoint` (DCP) asks for them: whole, in one entry.

DCP takes objects with ``state_dict`` and ``load_state_dict`` themselves (``Stateful``), alone or in
one of the user's. When it loads it asks for their state first, and reads what that has, into the
tensors that are there. An optimizer that has taken no step has few of them. So what DCP is given is
the whole state as bytes, which say nothing about ranks, and when it loads an empty place for them.
Neither call says whom it is from: the stack of calls is looked at, as in `soframe.checks.savers`.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import torch

log = logging.getLogger("soframe")

WHOLE = "whole"
"""Where the bytes are."""
SAVER = "torch.distributed.checkpoint.state_dict_saver"
LOADER = "torch.distributed.checkpoint.state_dict_loader"
DEPTH = 8
"""How many calls up to look: users' own objects ask in between."""

P = ParamSpec("P")


def whole_for_dcp(state_dict: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """Let a ``state_dict`` return bytes, in a dict, where DCP asks for it.

    Args:
        state_dict: The method.

    Returns:
        The method. All ranks call it, as they call DCP.
    """

    @functools.wraps(state_dict)
    def asked(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        who = _who_asks()
        if who == LOADER:
            return {WHOLE: b""}
        state = state_dict(*args, **kwargs)
        if who is None:
            return state
        packed = io.BytesIO()
        torch.save(state, packed)
        return {WHOLE: packed.getvalue()}

    return asked


def unpacked(state: Any) -> Any:
    """Return a state, which DCP may have read.

    Args:
        state: What ``load_state_dict`` was given.

    Returns:
        The state; an empty one if the bytes are none, which is then refused on all ranks together.
    """
    if not isinstance(state, Mapping) or set(state) != {WHOLE}:
        return state  # whatever it is: it is checked
    try:
        return torch.load(io.BytesIO(state[WHOLE]), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes may fail in any way; no rank may raise alone
        log.warning("what torch.distributed.checkpoint has read is no state: %s", error)
        return {}


def _who_asks() -> str | None:
    """Return the module of DCP that asks, by itself or by an object of the user's."""
    frame = inspect.currentframe()
    frame = frame.f_back if frame is not None else None  # of `asked`
    for _ in range(DEPTH):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return None
        name = str(frame.f_globals.get("__name__"))
        if name in (SAVER, LOADER):
            return name
        if name.split(".", maxsplit=1)[0] == "soframe":
            return None  # a part of another state
    return None
