"""Optional libraries: what to install where one is missing, and where kfac-pytorch is found."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}
_EXTRAS = {  # "demo" has all others; None for a library that no extra has
    "timm": None,
    "pytorch_optimizer": "benchmark",
    "optuna": "benchmark",
    "PIL": "recipes",
    "tyro": "recipes",
    "transformers": "integrations",
    "accelerate": "integrations",
    "peft": "integrations",
}

KFAC_PYTORCH_MISSING = """kfac-pytorch cannot be imported ({error}).

Install it, or name a folder that has its package `kfac`:

    git clone https://github.com/gpauloski/kfac-pytorch.git
    python -m {script} --kfac-path kfac-pytorch
"""


class MissingLibraryError(ImportError):
    """A library that an experiment needs is not installed."""


def require(name: str) -> Any:
    """Import an optional module.

    Raises:
        MissingLibraryError: If it is not installed; the message has the command that installs it.
        ModuleNotFoundError: If it is installed, but lacks a dependency of its own.
    """
    top = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        extra = _EXTRAS.get(top, "demo")
        command = (
            f"pip install -c constraints.txt -e '.[{extra}]'" if extra else f"pip install {top}"
        )
        raise MissingLibraryError(
            f"missing: {_DISTRIBUTIONS.get(top, top)}. In the root of the repository: {command}"
        ) from error


def import_kfac_pytorch(path: Path | None = None) -> ModuleType:
    """Import kfac-pytorch's ``kfac.preconditioner``, also from a folder where it is not installed.

    Raises:
        ImportError: If it is not there either.
    """
    if path is not None:
        sys.path.insert(0, str(path))
    version = importlib.metadata.version

    def known_version(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    # It reads its own version, which only an installed package has.
    importlib.metadata.version = known_version
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Apex is missing
            module = importlib.import_module("kfac.preconditioner")
    finally:
        importlib.metadata.version = version
    # torch warns of its hooks on a first layer, kfac-pytorch of usual intervals.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    warnings.filterwarnings("ignore", "It is suggested that inv_update_steps")
    return module
