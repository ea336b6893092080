"""Times of training steps: means over an interval, and tables of them."""

from __future__ import annotations

import statistics
from typing import Any

KINDS = ("precondition", "statistics", "solve")
INTERVALS = ((1, 10), (10, 100))


def mean_step(times: dict[str, float], every: int, solve_every: int) -> float:
    """Return the mean over an interval.

    Args:
        times: Of a step of each kind.
        every: Statistics' interval.
        solve_every: The solves', a multiple.

    Returns:
        In the unit of the times.
    """
    taken = solve_every // every
    total = (solve_every - taken) * times["precondition"] + (taken - 1) * times["statistics"]
    return (total + times["solve"]) / solve_every


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the quartiles, the median in the middle.

    Args:
        values: At least one.

    Returns:
        Three numbers, ascending.
    """
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Return the times of kinds of steps as text.

    Args:
        title: What stands above.
        rows: For each contender its name, the ms of each of `KINDS`, quartiles for each of
            `INTERVALS` and for ``"worst"``, and perhaps ``"memory"``.

    Returns:
        Lines.
    """
    head = ["", *(f"{kind} ms" for kind in KINDS)]
    head += [f"mean {f}/{k} : SGD" for f, k in INTERVALS] + ["solve : usual step"]
    lines = [head]
    for row in rows:
        cells = [row["name"], *(f"{row[kind]:.1f}" for kind in KINDS)]
        for key in [*(f"{f}/{k}" for f, k in INTERVALS), "worst"]:
            low, middle, high = row[key]
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        if "memory" in row:
            cells.append(f"{row['memory']:.0f}")
        lines.append(cells)
    if "memory" in rows[0]:
        head.append("peak MB")
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [f"\n{title}"]
    for line in lines:
        first, *rest = (cell for cell in line)
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join(text)


def whole_table(title: str, rows: list[dict[str, Any]]) -> str:
    """Return the times of whole intervals as text.

    Args:
        title: What stands above.
        rows: A name and numbers each, of the same keys.

    Returns:
        Lines.
    """
    keys = [key for key in rows[0] if key != "name"]
    width = max(len(row["name"]) for row in rows)
    head = [f"\n{title}", " " * width + "".join(f"{key:>14}" for key in keys)]
    lines = [
        row["name"].ljust(width) + "".join(f"{row[key]:14.2f}" for key in keys) for row in rows
    ]
    return "\n".join([*head, *lines])
