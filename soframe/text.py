"""Plain-text tables for reports and placements, where no table library may be imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def format_bytes(number: float) -> str:
    """Return a number of bytes with a unit, such as ``"5.4 GB"``."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:  # three digits would round up to 1000
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def alike(
    items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Group items with equal keys whose names differ in numbers, as ``"layers.*.out (12)"``."""
    groups: dict[tuple[str, Hashable], list[T]] = {}
    for item in items:
        groups.setdefault((re.sub(r"\d+", "*", name(item)), key(item)), []).append(item)
    named: list[tuple[str, list[T]]] = []
    for (pattern, _), members in groups.items():
        label = name(members[0])
        if len(members) > 1:
            label = f"{pattern} ({len(members)})"
        named.append((label, members))
    return named


def parse_bytes(text: int | str) -> int:
    """Return a number of bytes, such as ``"2GiB"``, ``"500 MB"`` or a plain number."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kKMGT]?)(i?)B?\s*", str(text))
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a number of bytes, such as 2000000000, '2GB', '1.5GiB'")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ["", "K", "M", "G", "T"].index(match[2].upper()))


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return left-aligned columns under a header and a rule, without a final newline."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["".ljust(width, "-") for width in widths])
    lines: list[str] = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
