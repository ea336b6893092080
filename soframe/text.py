"""Plain-text tables for reports and placements, where no table library may be imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def format_bytes(number: int) -> str:
    """Return a number of bytes with a unit, such as ``"5.4 GB"``."""
    value, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def alike(
    items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Group items that have equal keys, and names that differ in their numbers alone.

    Returns:
        Each group, in the order of its first item, under a name such as ``"layers.*.out (12)"``.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((re.sub(r"\d+", "*", name(item)), key(item)), []).append(item)
    return [
        (name(own[0]) if len(own) == 1 else f"{found[0]} ({len(own)})", own)  # type: ignore[index]
        for found, own in groups.items()
    ]


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return left-aligned columns under a header and a rule.

    Args:
        header: The columns' names.
        rows: The cells.

    Returns:
        The table, without a final newline.
    """
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
