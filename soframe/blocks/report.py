"""The registration report: every parameter ends in a block, or has a reason why not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from soframe.checks.warning import warn
from soframe.text import alike, format_bytes, format_table

FROZEN = "frozen"
"""Why a parameter that needs no gradient has no block."""

_MOST = 12
"""The reasons that an error lists."""


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
        # Layers that are alike share a line.
        cells = []
        for name, rows in alike(self.rows, lambda row: row.parameter, _shown):
            shape, method, note = _shown(rows[0])
            cells.append((name, shape, _block(rows), method, note))
        lines = [self._covered]
        if self.memory:
            kinds = {kind: number for kind, number in self.memory.items() if number}
            total = format_bytes(kinds.pop("total", 0))
            parts = [f"{k.replace('_', ' ')} {format_bytes(n)}" for k, n in kinds.items()]
            lines.append(f"at most {total} on a rank: {', '.join(parts)}")
        if self.solver:
            lines.append(self.solver)
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
        blocks = [row.block for row in self.rows if row.block is not None]
        coverage = self.coverage
        text = f"{len(blocks)} of {len(self.rows)} parameters in {len(set(blocks))} block(s)"
        text += f", {sum(coverage.values()):.0%} of the trained weights"
        if len(coverage) > 1:
            text += ": " + ", ".join(f"{part:.0%} {method}" for method, part in coverage.items())
        return text

    def reasons(self) -> str:
        """Return the reasons why parameters have no block, each with their number and a name."""
        names: dict[str, list[str]] = {}
        for row in self.rows:
            if row.block is None:
                names.setdefault(row.reason, []).append(row.parameter)
        reasons = sorted(names, key=lambda reason: -len(names[reason]))
        lines = [self._covered]
        lines += [f"{len(names[r])}, such as {names[r][0]}: {r}" for r in reasons[:_MOST]]
        if len(reasons) > _MOST:
            lines.append(f"and {len(reasons) - _MOST} further reasons")
        return "\n  ".join(lines)

    def with_note(self, note: str, blocks: Collection[str]) -> Report:
        """Return a report with a further note on the blocks of these names."""
        rows: list[ReportRow] = []
        for row in self.rows:
            if row.block in blocks:
                rows.append(replace(row, note="; ".join(filter(None, (row.note, note)))))
            else:
                rows.append(row)
        return replace(self, rows=tuple(rows))


def _shown(row: ReportRow) -> tuple[str, str, str]:
    """Return the shape, the method and the note of a row, as text."""
    shape = "x".join(map(str, row.shape)) or "scalar"
    return shape, row.method, row.reason or row.note


def _block(rows: Sequence[ReportRow]) -> str:
    blocks = {row.block for row in rows if row.block is not None}
    return next(iter(blocks), "-") if len(blocks) < 2 else f"{len(blocks)} blocks"


def warn_of_lost_blocks(before: Report, after: Report) -> None:
    """Warn of layers that are still trained and have lost their block.

    A layer that was frozen or removed has none by the user's wish. A layer whose weight became a
    computed tensor, for example by pruning, continues without preconditioning.
    """
    kept = {row.block for row in after}
    methods: dict[str, str] = {}
    for row in before:
        if row.block and row.block not in kept and row.block != row.parameter:
            methods[row.block] = row.method
    lost = []
    for name, method in methods.items():
        reasons = _reasons(after, name)
        if reasons:
            why = reasons[0] or "its parameters have other blocks"
            lost.append(f"{name} ({method} before): {why}")
    if lost:
        warn(
            "the model was changed, and layers that are still trained have lost their "
            f"block: {'; '.join(lost)}. report() lists the block or the reason of each parameter"
        )


def _reasons(report: Report, name: str) -> list[str]:
    """Return why the trained parameters of a layer have no block, or blocks of single ones."""
    reasons: list[str] = []
    notes: list[str] = []
    for row in report:
        if not row.parameter.startswith(f"{name}."):
            continue
        if row.block == row.parameter:
            notes.append(row.note)
        elif row.block is None and row.reason != FROZEN:
            reasons.append(row.reason)
    return reasons + notes
