"""Whose a module is: one preconditioner's, since two would precondition its gradient twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

from torch import nn

_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()


def require_free(owner: object, modules: Mapping[nn.Module, str]) -> None:
    """Check that modules belong to no other preconditioner.

    Args:
        owner: Who is to have them.
        modules: The modules, with their names.

    Raises:
        ValueError: If one has an owner that lives still.
    """
    if _other(owner, modules) is not None:
        gc.collect()  # one that only waits for the collector is none
        if (name := _other(owner, modules)) is not None:
            raise ValueError(
                f"the module {name!r} belongs to another Preconditioner (or TrustRegion) already, "
                f"and two of them would precondition its gradient twice: call close() on the other "
                f"one first, or let each skip= what the other one has"
            )


def claim(owner: object, modules: Mapping[nn.Module, str]) -> None:
    """Let modules belong to an owner, as long as it lives, instead of those that it had.

    Args:
        owner: The owner.
        modules: The modules, with their names.
    """
    release(owner)
    reference = weakref.ref(owner)
    _owners.update(dict.fromkeys(modules, reference))


def release(owner: object) -> None:
    """Let an owner have nothing any more.

    Args:
        owner: The owner.
    """
    for module in [module for module, own in _owners.items() if own() is owner]:
        del _owners[module]


def _other(owner: object, modules: Mapping[nn.Module, str]) -> str | None:
    """Return the name of a module that somebody else has."""
    for module, name in modules.items():
        reference = _owners.get(module)
        other = None if reference is None else reference()
        if other is not None and other is not owner:
            return name
    return None
