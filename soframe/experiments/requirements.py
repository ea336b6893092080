"""The optional libraries of the experiments, and what to say when one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

#: What `pip install` calls a library whose import name differs.
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}

#: The extra that brings a library; "demo" for all others.
_EXTRAS = {"pytorch_optimizer": "benchmark"}


class MissingLibraryError(ImportError):
    """A library that the experiments need is not installed."""


def require(*modules: str) -> list[ModuleType]:
    """Imports optional modules.

    Args:
        modules: Import names, for example `"matplotlib.figure"`.

    Returns:
        The modules, in the order asked for.

    Raises:
        MissingLibraryError: If one of them is not installed; it names them all, and the command
            that installs them.
        ModuleNotFoundError: If one of them is installed, but lacks what it needs itself.
    """
    imported: list[ModuleType] = []
    missing: list[str] = []
    for name in modules:
        top = name.partition(".")[0]
        try:
            imported.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            # A broken installation, whose own imports fail, keeps its own message.
            if error.name is None or error.name.partition(".")[0] != top:
                raise
            missing.append(_DISTRIBUTIONS.get(top, top))
    if missing:
        extras = ",".join(sorted({_EXTRAS.get(name, "demo") for name in missing}))
        raise MissingLibraryError(
            f"missing: {', '.join(dict.fromkeys(missing))}. "
            f"Install what the experiments need with: pip install 'soframe[{extras}]', or in the "
            f"root of the repository pip install '.[{extras}]'"
        )
    return imported
