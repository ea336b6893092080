"""Tables of several runs for each optimizer: for the terminal, Markdown, LaTeX and CSV.

A figure is the mean over seeds and half the width of its 95 % interval, of Student's t. A seed that
did not reach a target, or diverged, has no figure: it is left out of the mean and counted.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

import rich.table
from scipy.special import stdtrit

from experiments import display, records
from experiments.records import MARK, NOTE, RunRecord
from experiments.workloads import Workload
from soframe.text import format_bytes

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Group:
    """The runs of one row of a table: one optimizer and number of ranks, several seeds.

    Attributes:
        records: The runs.
        tuning: The origin of their settings, such as "untuned", with "trials" if they were tuned.
    """

    records: tuple[RunRecord, ...]
    tuning: str

    @property
    def label(self) -> str:
        """The optimizer's name."""
        return self.records[0].label

    @property
    def processes(self) -> int:
        """The number of ranks."""
        return self.records[0].processes

    @property
    def converged(self) -> tuple[RunRecord, ...]:
        """The runs whose last loss is finite."""
        return tuple(record for record in self.records if not record.diverged)


def labels(groups: Sequence[Group], mark: str) -> list[str]:
    """Return the names of rows, with a mark at those that were not tuned beside one that was."""
    firsts = [replace(group.records[0], settings_from=group.tuning) for group in groups]
    return records.labels(firsts, mark)


@dataclass(frozen=True)
class Measured:
    """A figure over seeds.

    Attributes:
        mean: The mean of the seeds that have the figure; None without any.
        half: Half the width of the mean's 95 % interval; None with fewer than two seeds.
        count: The number of seeds that have the figure.
        seeds: The number of all seeds.
    """

    mean: float | None
    half: float | None
    count: int
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float], seeds: int) -> Measured:
        """Return the mean and the interval of a figure's values."""
        count = len(values)
        mean = half = None
        if count > 0:
            mean = statistics.fmean(values)
        if count > 1:
            quantile = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2))
            half = quantile * statistics.stdev(values) / math.sqrt(count)
        return cls(mean, half, count, seeds)

    def __str__(self) -> str:
        if self.mean is None:
            return f"0/{self.seeds}" if self.seeds > 1 else "-"
        text = _rounded(self.mean, self.half)
        if self.count < self.seeds:
            text += f" ({self.count}/{self.seeds})"
        return text


def _rounded(mean: float, half: float | None) -> str:
    """Return a mean with its half-width, both to the second digit of the latter."""
    if not half:
        alone = f"{mean:.4g}"
        if 1e3 <= abs(mean) < 1e6:
            alone = f"{mean:.0f}"
        return alone if half is None else f"{alone} ± 0"
    decimals = 1 - math.floor(math.log10(half))
    if not -5 <= decimals <= 6:
        return f"{mean:.3e} ± {half:.1e}"
    decimals = max(0, decimals)
    return f"{mean:.{decimals}f} ± {half:.{decimals}f}"


@dataclass(frozen=True)
class Table:
    """A table of groups.

    Attributes:
        title: One line.
        heads: The names of the columns.
        statistics: Below each name, the statistic over steps and seeds.
        rows: The cells, as many as columns.
        notes: Sentences for the caption.
    """

    title: str
    heads: tuple[str, ...]
    statistics: tuple[str, ...]
    rows: tuple[tuple[str | Measured, ...], ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return heads and cells, ready for JSON: texts, and figures with mean and half-width."""
        return asdict(self)

    def terminal(self) -> rich.table.Table:
        """Return the table for a console."""
        heads = [f"{a}\n{b}" for a, b in zip(self.heads, self.statistics, strict=True)]
        rows = [list(map(str, row)) for row in self.rows]
        return display.table(self.title, heads, rows, left=2)

    def markdown(self) -> str:
        """Return the table in Markdown, with its caption."""
        heads: list[str] = []
        for head, statistic in zip(self.heads, self.statistics, strict=True):
            heads.append("<br>".join(filter(None, (head, statistic))))
        rule = [":--", ":--"] + ["--:" for _ in heads[2:]]
        rows = [map(_escaped, row) for row in self.rows]
        lines = [f"| {' | '.join(line)} |\n" for line in (heads, rule, *rows)]
        return f"**{self.title}**\n\n{''.join(lines)}\n{' '.join(self.notes)}\n"

    def latex(self, label: str) -> str:
        r"""Return a ``table`` with the rules of booktabs, which ``\ref{tab:LABEL}`` refers to."""

        def row(cells: Sequence[object]) -> str:
            return f"{' & '.join(latex_text(str(cell)) for cell in cells)} \\\\"

        caption = latex_text(f"{self.title}. {' '.join(self.notes)}".strip())
        return "\n".join(
            [
                r"% needs \usepackage{booktabs}",
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{caption}}}",
                rf"\label{{tab:{re.sub('[^A-Za-z0-9-]', '-', label)}}}",
                rf"\begin{{tabular}}{{{'ll'.ljust(len(self.heads), 'r')}}}",
                r"\toprule",
                row(self.heads),
                row(self.statistics),
                r"\midrule",
                "\n".join(map(row, self.rows)),
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"$\dagger$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def latex_text(text: str) -> str:
    """Escape the special characters of LaTeX; numbers below zero get a minus sign."""
    escaped = "".join(_SPECIAL.get(character, character) for character in text)
    return re.sub(r"(?<![\w.}-])-(?=\d)", "$-$", escaped)


@dataclass(frozen=True)
class _Column:
    """A column of figures: of each run a value, or None if that run has no such figure."""

    head: str
    statistic: str
    value: Callable[[RunRecord], float | None]

    def cell(self, group: Group) -> Measured:
        values = [value for record in group.records if (value := self.value(record)) is not None]
        return Measured.of(values, len(group.records))


def summary(workload: Workload, groups: Sequence[Group], budget: str) -> Table:
    """Return the table of a comparison.

    Args:
        workload: The workload.
        groups: Its rows.
        budget: The length of a run, for the caption.
    """
    seeds, ranks = _seeds(groups), {group.processes for group in groups}
    targets = groups[0].records[0].targets
    columns = _columns(workload, targets, "mean" if len(seeds) > 1 else "")

    heads, below = ["optimizer", "settings"], ["", ""]
    names = labels(groups, MARK)
    rows: list[list[str | Measured]] = []
    for name, group in zip(names, groups, strict=True):
        rows.append([name, group.tuning])

    def add(head: str, statistic: str, cells: Sequence[str | Measured]) -> None:
        heads.append(head)
        below.append(statistic)
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)

    if len(ranks) > 1:
        add("ranks", "", [str(group.processes) for group in groups])
    lost = [len(group.records) - len(group.converged) for group in groups]
    if any(lost):
        add("diverged", "seeds", [f"{n} of {len(seeds)}" for n in lost])
    for column in columns:
        add(column.head, column.statistic, [column.cell(group) for group in groups])
    if max(ranks) > 1:
        add("sent/step", "maximum", [format_bytes(_sent(group)) for group in groups])
    add("memory", "maximum", [format_bytes(_curvature(group)) for group in groups])
    title = f"{workload.title}: {workload.loss_name}"
    notes = _notes(groups, names, seeds, budget, targets, lost=any(lost))
    return Table(title, tuple(heads), tuple(below), tuple(map(tuple, rows)), notes)


def _seeds(groups: Sequence[Group]) -> list[int]:
    seeds: set[int] = set()
    for group in groups:
        seeds.update(record.config.seed for record in group.records)
    return sorted(seeds)


def _columns(workload: Workload, targets: Sequence[float], mean: str) -> list[_Column]:
    """Return the columns of losses and times; ``mean`` names the statistic over seeds."""
    columns = []
    for target in targets:
        columns += [
            _Column(f"steps to {target:g}", mean, _at(target, lambda row: row.step)),
            _Column(f"s to {target:g}", mean, _at(target, lambda row: row.seconds)),
        ]
    columns.append(_Column("last loss", mean, _last(lambda record: record.last.loss)))
    if workload.classifies:
        columns.append(_Column("accuracy, %", mean, _last(_percent)))
    columns.append(_Column("ms/step", "median", _milliseconds))
    return columns


def _notes(
    groups: Sequence[Group],
    names: Sequence[str],
    seeds: Sequence[int],
    budget: str,
    targets: Sequence[float],
    *,
    lost: bool,
) -> tuple[str, ...]:
    ranks = sorted({group.processes for group in groups})
    counts = records.ranks(ranks)
    if len(seeds) > 1:
        start = (
            f"Means over seeds {', '.join(map(str, seeds))}, ± the 95 % interval of Student's t, "
            f"on {counts}, after {budget} of training each."
        )
        notes = [start]
        if targets:
            notes.append(
                "Steps and seconds to a loss: over the seeds that reached it; k/n if k of n did."
            )
        speed = "ms/step: median over the steps of a run, mean over seeds."
    else:
        notes = [f"One run each, of seed {seeds[0]}, on {counts}, after {budget} of training."]
        speed = "ms/step: median over the steps."
    if lost:
        notes.append("Seeds whose loss is no longer finite count as diverged, not in means.")
    notes.append(speed)
    sent = "Bytes sent in a step by the busiest rank; peak" if max(ranks) > 1 else "Peak"
    notes.append(f"{sent} of the memory of second-order data on a rank.")
    notes += _notes_on_tuning(groups, targets)
    if list(names) != [group.label for group in groups]:
        notes.append(NOTE)
    return tuple(notes)


def _notes_on_tuning(groups: Sequence[Group], targets: Sequence[float]) -> Iterator[str]:
    tunings = set(map(attrgetter("tuning"), groups))
    if any("trials" in tuning for tuning in tunings):
        aim = f"the shortest time to {min(targets):g}" if targets else "the lowest loss"
        yield f"Trials: settings were tuned for {aim}."
    if "untuned" in tunings:
        yield "Untuned: default settings and a default learning rate."


def _at(target: float, value: Callable[[Any], float]) -> Callable[[RunRecord], float | None]:
    def at_target(record: RunRecord) -> float | None:
        row = record.reached(target)
        return None if row is None else value(row)

    return at_target


def _last(value: Callable[[RunRecord], float | None]) -> Callable[[RunRecord], float | None]:
    return lambda record: None if record.diverged else value(record)


def _percent(record: RunRecord) -> float | None:
    return None if record.last.accuracy is None else 100 * record.last.accuracy


def _milliseconds(record: RunRecord) -> float:
    return record.milliseconds_per_step


def _sent(group: Group) -> float:
    return max(sum(record.sent_bytes_per_step.values()) for record in group.records)


def _curvature(group: Group) -> int:
    return max(max(record.curvature_bytes, default=0) for record in group.records)


FIELDS = (
    "workload",
    "optimizer",
    "label",
    "settings",
    "strategy",
    "ranks",
    "seed",
    "step",
    "seconds",
    "loss",
    "accuracy",
    "ms_per_step",
    "sent_bytes_per_step",
    "curvature_bytes",
)
"""Columns of the CSV; the last three are the run's, and repeated in each of its lines."""


def tidy(groups: Sequence[Group]) -> str:
    """Return CSV with one line for each evaluation of each run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for group in groups:
        for record in group.records:
            config = record.config
            which: list[object] = [config.workload, config.optimizer, group.label, group.tuning]
            which += [config.strategy, record.processes, config.seed]
            costs: list[object] = [
                record.milliseconds_per_step,
                sum(record.sent_bytes_per_step.values()),
                max(record.curvature_bytes, default=0),
            ]
            for row in record.rows:
                evaluation: list[object] = [row.step, row.seconds, row.loss, row.accuracy]
                writer.writerow(which + evaluation + costs)
    return text.getvalue()


def _escaped(cell: str | Measured) -> str:
    """Return a cell of Markdown."""
    return str(cell).replace("|", "\\|")
