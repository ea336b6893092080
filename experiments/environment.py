"""The surroundings of a run: versions, the checkout's commit, the hardware, the command."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import soframe
from experiments import display

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "numpy", "scipy", "optuna", "pytorch_optimizer", "transformers", "peft")


def environment(threads: int) -> dict[str, Any]:
    """Return versions, the checkout's commit, the hardware and the command line.

    Args:
        threads: Torch threads of each process.
    """
    versions = {"python": platform.python_version(), "soframe": soframe.__version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional library
    commit, dirty = _checkout()
    hardware = {
        "processor": display.processor(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_process": threads,
    }
    return {
        "versions": versions,
        "commit": commit,
        "dirty": dirty,
        "hardware": hardware,
        "command": shlex.join(sys.orig_argv),
    }


def sources() -> str:
    """Return a digest of the code that decides a run, beside installed libraries.

    These are the files of soframe and of this folder, and the modules that a workload's file has
    imported.
    """
    packages = [Path(soframe.__file__).parent, ROOT / "experiments"]
    paths: set[Path] = set()
    for folder in packages:
        paths.update(path.resolve() for path in folder.rglob("*.py"))
    installed = tuple(f"{Path(prefix)}{os.sep}" for prefix in (sys.base_prefix, sys.prefix))
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None) or ""
        is_library = name.startswith(installed)  # text alone: there are thousands of modules
        if name.endswith(".py") and not is_library and Path(name).is_file():
            paths.add(Path(name).resolve())
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _checkout() -> tuple[str | None, bool | None]:
    """Return the commit, and whether tracked files have changed since; None outside of git."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(ROOT), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # no git on this machine
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    output = git("rev-parse", "--show-toplevel", "HEAD")
    top, _, commit = (output or "").partition("\n")
    if Path(top) != ROOT:  # no repository, or another one around this folder
        return None, None
    return commit, bool(git("status", "--porcelain", "--untracked-files=no"))
