"""Files that are on the disk once they are written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write(path: Path, contents: Callable[[IO[bytes]], object]) -> None:
    """Let ``contents`` write a file."""
    with path.open("wb") as file:
        contents(file)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, contents: Callable[[IO[bytes]], object]) -> None:
    """Write a file; if that is killed or fails, the former one stays."""
    part = path.with_name(f".{path.name}.tmp")
    write(part, contents)
    part.replace(path)  # a rename is atomic
    sync(path.parent)


def sync(folder: Path) -> None:
    """Write the directory entries of a folder to the disk."""
    if os.name == "nt":
        return  # Windows has no handles of folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
