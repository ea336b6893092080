"""Where benchmarks find kfac-pytorch: installed, or in a folder."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from pathlib import Path

KFAC_PYTORCH_MISSING = """kfac-pytorch cannot be imported ({error}).

Install it, or name a folder that has its package `kfac`:

    git clone https://github.com/gpauloski/kfac-pytorch.git
    python {script} --kfac-path kfac-pytorch
"""


def import_kfac_pytorch(path: Path | None = None) -> None:
    """Import kfac-pytorch's ``kfac.preconditioner``, also from a folder where it is not installed.

    Args:
        path: A folder to look in first.

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

    # It asks for its own version, which only an installed package has.
    importlib.metadata.version = known_version
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Apex is missing
            importlib.import_module("kfac.preconditioner")
    finally:
        importlib.metadata.version = version
    # torch says so of its hooks on a first layer; it says the other of usual intervals.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    warnings.filterwarnings("ignore", "It is suggested that inv_update_steps")
