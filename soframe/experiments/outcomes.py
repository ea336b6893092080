"""Outcomes of tuning, one JSON file for each workload and optimizer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write(folder: Path, workload: str, optimizer: str, outcome: DataclassInstance) -> Path:
    """Writes an outcome.

    Args:
        folder: Where; made if needed.
        workload: The workload.
        optimizer: The optimizer.
        outcome: A dataclass.

    Returns:
        The path of the file.
    """
    path = _path(folder, workload, optimizer)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    return path


def read(folder: Path, workload: str, optimizer: str, command: str) -> dict[str, Any]:
    """Reads an outcome.

    Args:
        folder: Where outcomes are.
        workload: The workload.
        optimizer: The optimizer.
        command: What would make one.

    Returns:
        Its fields.

    Raises:
        FileNotFoundError: If that optimizer was never tuned on that workload.
    """
    path = _path(folder, workload, optimizer)
    if not path.exists():
        raise FileNotFoundError(f"{optimizer} was never tuned on {workload}: {command}")
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields


def _path(folder: Path, workload: str, optimizer: str) -> Path:
    return folder / f"{workload}-{optimizer}.json"
