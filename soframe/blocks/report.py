"""The registration report: every parameter ends in a block, or has a reason why not."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from soframe.text import alike, format_bytes, format_table

FROZEN = "frozen"
"""Why a parameter that needs no gradient has no block."""


@dataclass(frozen=True)
class ReportRow:
    """Where one parameter ended.

    Attributes:
        parameter: The parameter's qualified name.
        shape: Its shape.
        block: The name of its block; None if it has none.
        method: The block's curvature method.
        reason: Why it has no block; empty if it has one.
        note: A remark on the block.
    """

    parameter: str
    shape: tuple[int, ...]
    block: str | None
    method: str = ""
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Every parameter of a model; iterate for the rows, print for a table without repetitions.

    Attributes:
        rows: The parameters.
        memory: The planned bytes on the rank that holds most, by kind: see `Placement.memory`.
        solver: The solver by default, and why it is this one; empty if the user chose one.
    """

    rows: tuple[ReportRow, ...]
    memory: Mapping[str, int] = field(default_factory=dict)
    solver: str = ""

    def __iter__(self) -> Iterator[ReportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        def told(row: ReportRow) -> tuple[str, ...]:
            shape = "x".join(map(str, row.shape)) or "scalar"
            return (shape, row.method, row.reason or row.note)

        # Layers that are alike share a line.
        groups = alike(self.rows, lambda row: row.parameter, told)
        cells = [(name, told(own[0])[0], _block(own), *told(own[0])[1:]) for name, own in groups]
        lines = [self._covered]
        if self.memory:
            kinds = {kind: number for kind, number in self.memory.items() if number}
            total = format_bytes(kinds.pop("total", 0))
            parts = [f"{k.replace('_', ' ')} {format_bytes(n)}" for k, n in kinds.items()]
            lines.append(f"at most {total} on a rank: {', '.join(parts)}")
        lines += [self.solver] if self.solver else []
        header = ("parameter", "shape", "block", "method", "why / note")
        return "\n".join([*lines, format_table(header, cells)])

    @property
    def coverage(self) -> dict[str, float]:
        """The part of the trained parameters' entries that each method has, the largest first."""
        sizes: dict[str, int] = {}
        trained = 0
        for row in self.rows:
            if row.reason == FROZEN:
                continue
            trained += prod(row.shape)
            if row.block is not None:
                sizes[row.method] = sizes.get(row.method, 0) + prod(row.shape)
        ordered = sorted(sizes.items(), key=lambda pair: -pair[1])
        return {method: size / trained for method, size in ordered if trained}

    @property
    def _covered(self) -> str:
        covered = [row for row in self.rows if row.block is not None]
        blocks = len({row.block for row in covered})
        coverage = self.coverage
        text = f"{len(covered)} of {len(self.rows)} parameters in {blocks} block(s)"
        text += f", {sum(coverage.values()):.0%} of the trained weights"
        if len(coverage) > 1:
            text += ": " + ", ".join(f"{part:.0%} {method}" for method, part in coverage.items())
        return text

    def reasons(self, most: int = 12) -> str:
        """Return the reasons why parameters have no block, each with their number and a name."""
        names: dict[str, list[str]] = {}
        for row in self.rows:
            if row.block is None:
                names.setdefault(row.reason, []).append(row.parameter)
        ordered = sorted(names.items(), key=lambda one: -len(one[1]))
        lines = [f"{len(own)}, such as {own[0]}: {reason}" for reason, own in ordered[:most]]
        lines += [f"and {len(ordered) - most} further reasons"] if len(ordered) > most else []
        return "\n  ".join([self._covered, *lines])

    def with_note(self, note: str, blocks: Collection[str]) -> Report:
        """Return a report with a further note on the blocks of these names."""
        rows = (
            replace(row, note="; ".join(filter(None, (row.note, note))))
            if row.block in blocks
            else row
            for row in self.rows
        )
        return replace(self, rows=tuple(rows))


def _block(rows: Sequence[ReportRow]) -> str:
    blocks = {row.block for row in rows if row.block is not None}
    return next(iter(blocks), "-") if len(blocks) < 2 else f"{len(blocks)} blocks"


def warn_of_lost_blocks(before: Report, after: Report, stacklevel: int) -> None:
    """Warn of layers that are still trained and have lost their block.

    A layer that was frozen or removed has none by the user's wish. A layer whose weight became a
    computed tensor, for example by pruning, continues without preconditioning.
    """
    kept = {row.block for row in after}
    had = {row.block: row.method for row in before if row.block and row.block != row.parameter}
    lost = []
    for name in (name for name in had if name not in kept):
        rows = [row for row in after if row.parameter.startswith(f"{name}.")]
        why = [row.reason for row in rows if row.block is None and row.reason != FROZEN]
        why += [row.note for row in rows if row.block == row.parameter]
        if why:
            said = why[0] or "its parameters have other blocks"
            lost.append(f"{name} ({had[name]} before): {said}")
    if lost:
        warnings.warn(
            "soframe: the model was changed, and there are layers that are still trained and have "
            f"lost their block: {'; '.join(lost)}. report() says what became of each parameter",
            stacklevel=stacklevel,
        )
