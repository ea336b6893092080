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
    """Group items with equal keys whose names differ in numbers, as ``"layers.*.out (12)"``."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((re.sub(r"\d+", "*", name(item)), key(item)), []).append(item)
    return [
        (name(own[0]) if len(own) == 1 else f"{found[0]} ({len(own)})", own)  # type: ignore[index]
        for found, own in groups.items()
    ]


def parse_bytes(text: int | str) -> int:
    """Return a number of bytes, such as ``"2GiB"``, ``"500 MB"`` or a plain number."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([kKMGT]?)(i?)B?\s*", str(text))
    number = float(found[1]) if found and found[1].count(".") < 2 else 0.0
    if found is None or number <= 0:
        raise ValueError(f"{text!r} is no number of bytes, such as 2000000000, '2GB' or '1.5GiB'")
    base = 1024 if found[3] else 1000
    return int(number * base ** " KMGT".index(found[2].upper() or " "))


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return left-aligned columns under a header and a rule, without a final newline."""
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
