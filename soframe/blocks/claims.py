"""Whose a module is: one preconditioner's, since two would precondition its gradient twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

from torch import nn

_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()


def require_free(
    owner: object, modules: Mapping[nn.Module, str], beside: object | None = None
) -> None:
    """Check that modules belong to no other preconditioner.

    Args:
        owner: Who is to have them.
        modules: The modules, with their names.
        beside: An owner whose modules they may be, since one of the two is never given what the
            other one has written.

    Raises:
        ValueError: If one has an owner that lives still.
    """
    if _other(owner, modules, beside) is not None:
        gc.collect()  # one that only waits for the collector is none
        if (name := _other(owner, modules, beside)) is not None:
            raise ValueError(
                f"the module {name!r} belongs to another Preconditioner (or TrustRegion) already, "
                f"and two of them would precondition its gradient twice: call close() on the other "
                f"one first, or let each skip= what the other one has"
            )


def claim(owner: object, modules: Mapping[nn.Module, str], beside: object | None = None) -> None:
    """Let modules belong to an owner, as long as it lives, instead of those that it had.

    Args:
        owner: The owner.
        modules: The modules, with their names.
        beside: An owner who keeps those of them that are its own.
    """
    release(owner)
    reference = weakref.ref(owner)
    free = [m for m in modules if beside is None or m not in _owners or _owners[m]() is not beside]
    _owners.update(dict.fromkeys(free, reference))


def release(owner: object) -> None:
    """Let an owner have nothing any more.

    Args:
        owner: The owner.
    """
    for module in [module for module, own in _owners.items() if own() is owner]:
        del _owners[module]


def _other(owner: object, modules: Mapping[nn.Module, str], beside: object | None) -> str | None:
    """Return the name of a module that somebody else has."""
    for module, name in modules.items():
        reference = _owners.get(module)
        other = None if reference is None else reference()
        if other is not None and other is not owner and other is not beside:
            return name
    return None
