"""Times of training steps: means over an interval, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

STEP_KINDS = ("precondition", "statistics", "solve")
INTERVALS = ((1, 10), (10, 100))
PHASES = ("apply", "factors", "solve")

Times = Mapping[str, list[list[float]]]
"""For each of `STEP_KINDS`, for each round, the times of the steps."""


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


def phases(times: dict[str, float], plain: float) -> dict[str, float]:
    """Return what each part of a preconditioner adds to a step.

    Args:
        times: Of a step of each of `STEP_KINDS`.
        plain: Of a step without a preconditioner.

    Returns:
        For each of `PHASES`, in the unit of the times.
    """
    steps = [plain, *(times[kind] for kind in STEP_KINDS)]
    return {phase: b - a for phase, a, b in zip(PHASES, steps, steps[1:], strict=False)}


def rounds_of(times: Times) -> Iterator[dict[str, float]]:
    """Yield for each round the median of each kind.

    Args:
        times: Of the steps of each kind, in each round.

    Yields:
        The time of each of `STEP_KINDS`.
    """
    for parts in zip(*(times[kind] for kind in STEP_KINDS), strict=True):
        yield {kind: statistics.median(part) for kind, part in zip(STEP_KINDS, parts, strict=True)}


def figures(found: Mapping[str, Times]) -> list[dict[str, Any]]:
    """Return what `table` and `phase_table` show.

    Args:
        found: The seconds of each contender's steps; plain SGD's first. ``"soframe, ..."`` has
            ``"kfac-pytorch, ..."`` for a peer.

    Returns:
        A row for each contender.
    """
    rounds = {name: list(rounds_of(times)) for name, times in found.items()}
    first = next(iter(rounds))
    plain = [times["precondition"] for times in rounds[first]]
    rows = []
    for name, own in rounds.items():
        row: dict[str, Any] = {"name": name}
        for kind in STEP_KINDS:
            row[kind] = 1e3 * statistics.median(times[kind] for times in own)
        for every, solve_every in INTERVALS:
            # Against plain steps at the same places of the round, which is what surrounds them.
            ratios = [
                mean_step(times, every, solve_every) / mean_step(base, every, solve_every)
                for times, base in zip(own, rounds[first], strict=True)
            ]
            row[f"{every}/{solve_every}"] = quartiles(ratios)
        row["worst"] = quartiles([times["solve"] / times["precondition"] for times in own])
        if not name.startswith(first):
            added = [phases(times, base) for times, base in zip(own, plain, strict=True)]
            row["phases"] = {key: 1e3 * statistics.median(a[key] for a in added) for key in PHASES}
            peer = rounds.get(name.replace("soframe", "kfac-pytorch"), own)
            if peer is not own:
                theirs = [phases(times, base) for times, base in zip(peer, plain, strict=True)]
                pairs = list(zip(added, theirs, strict=True))
                row["of peer"] = {
                    key: quartiles([a[key] / b[key] for a, b in pairs]) for key in PHASES
                }
        rows.append(row)
    return rows


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
        rows: For each contender its name, the ms of each of `STEP_KINDS`, quartiles for each of
            `INTERVALS` and for ``"worst"``, and perhaps ``"memory"``.

    Returns:
        Lines.
    """
    head = ["", *(f"{kind} ms" for kind in STEP_KINDS)]
    head += [f"mean {f}/{k} : SGD" for f, k in INTERVALS] + ["solve : usual step"]
    lines = [head]
    for row in rows:
        cells = [row["name"], *(f"{row[kind]:.1f}" for kind in STEP_KINDS)]
        for key in [*(f"{f}/{k}" for f, k in INTERVALS), "worst"]:
            low, middle, high = row[key]
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        if "memory" in row:
            cells.append(f"{row['memory']:.0f}")
        lines.append(cells)
    if "memory" in rows[0]:
        head.append("peak MB")
    return aligned(title, lines)


def phase_table(title: str, rows: list[dict[str, Any]]) -> str:
    """Return what the parts of preconditioners add to a step, as text.

    Args:
        title: What stands above.
        rows: For each contender its name, the ms of each phase, and under ``"of peer"`` quartiles
            of the quotient with kfac-pytorch's, if that took part with the same solver; those
            without phases are left out.

    Returns:
        Lines.
    """
    heads = [f"{name} ms" for name in PHASES] + [f"{name} : kfac-pytorch" for name in PHASES]
    lines = [["", *heads]]
    for row in rows:
        if "phases" not in row:
            continue
        cells = [row["name"], *(f"{row['phases'][name]:.1f}" for name in PHASES)]
        for name in PHASES:
            low, middle, high = row.get("of peer", {}).get(name, (None,) * 3)
            cells.append("" if middle is None else f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(cells)
    return aligned(title, lines)


def aligned(title: str, lines: list[list[str]]) -> str:
    """Return cells as text, in columns.

    Args:
        title: What stands above.
        lines: The head, and the cells of each line; the first of a line is at the left.

    Returns:
        Lines.
    """
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [f"\n{title}"]
    for first, *rest in lines:
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
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
