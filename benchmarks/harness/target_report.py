"""What the runs of `harness.time_to_target` say: medians, spreads, ratios, a table."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.time_to_target import BASELINE, TRUST_REGION
from soframe.experiments.records import RunRecord
from soframe.experiments.requirements import require
from soframe.experiments.workloads import workload

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds; infinite where a run did not get there.

    Attributes:
        median: Of all seeds.
        low: The least.
        high: The greatest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarises one value for each seed."""
        # Of infinities and numbers, the lower of the two in the middle would be a gift.
        return cls(statistics.median_high(values), min(values), max(values))


@dataclass(frozen=True)
class Ratio:
    """How many times the time (or steps) of this optimizer another needs.

    Attributes:
        value: Above one where this one is faster.
        is_bound: Whether the other did not get there, so that the value is that of its budget, and
            the true one greater.
    """

    value: float
    is_bound: bool = False

    def __str__(self) -> str:
        return f"{'>' if self.is_bound else ''}{self.value:.2f}"


@dataclass(frozen=True)
class Line:
    """One optimizer and one target.

    Attributes:
        optimizer: Its name.
        label: What tables call it.
        target: The loss to reach.
        seeds: How many runs.
        reached: How many of them reached the target.
        steps: To the target.
        seconds: Likewise.
        milliseconds_per_step: The mean over a run, as a median over the seeds.
        best_loss: The lowest loss of a run, as a median over the seeds.
        trained: The seconds of a run, as a median over the seeds.
        against_baseline: The baseline's median seconds over this one's.
        against_peer: Likewise of the peer that gets there first.
        steps_against_peer: Likewise, in steps.
    """

    optimizer: str
    label: str
    target: float
    seeds: int
    reached: int
    steps: Spread
    seconds: Spread
    milliseconds_per_step: float
    best_loss: float
    trained: float
    against_baseline: Ratio | None = None
    against_peer: Ratio | None = None
    steps_against_peer: Ratio | None = None


@dataclass(frozen=True)
class Report:
    """All runs on one workload.

    Attributes:
        workload: Its name.
        lines: One for each target and optimizer, target by target.
        seeds: Of the runs.
        budget: Seconds of training of each run.
        where: What it was measured with.
    """

    workload: str
    lines: tuple[Line, ...]
    seeds: tuple[int, ...]
    budget: float
    where: dict[str, Any]

    @classmethod
    def of(cls, name: str, targets: Sequence[float], records: Sequence[RunRecord]) -> Report:
        """Summarises runs.

        Args:
            name: The workload.
            targets: Losses to reach, descending.
            records: Runs of any optimizers, each with the same seeds and budget.

        Returns:
            The report.

        Raises:
            ValueError: If seeds or budgets differ between optimizers.
        """
        runs: dict[str, list[RunRecord]] = {}
        for record in records:
            runs.setdefault(record.config.optimizer, []).append(record)
        seeds = {tuple(sorted(r.config.seed for r in of)) for of in runs.values()}
        budgets = {r.config.seconds for r in records}
        if len(seeds) != 1 or len(budgets) != 1:
            raise ValueError(f"runs to compare differ: seeds {seeds}, budgets {budgets}")
        lines = []
        for target in targets:
            lines += compare([line(of, target) for of in runs.values()])
        config = records[0].config
        where = {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": config.threads,
            "clock": config.clock,
            "dtype": config.dtype,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return cls(name, tuple(lines), seeds.pop(), config.seconds or math.inf, where)

    def as_dict(self) -> dict[str, Any]:
        """The report, ready for JSON."""
        return asdict(self) | {"summary": self.sentences()}

    def sentences(self) -> list[str]:
        """The trust region against the best peer, for each target, in words."""
        said = []
        for target in dict.fromkeys(line.target for line in self.lines):
            lines = [line for line in self.lines if line.target == target]
            own = next((line for line in lines if line.optimizer == TRUST_REGION), None)
            peer = best_peer(lines)
            if own is None:
                continue
            if not math.isfinite(own.seconds.median):
                said.append(f"To {target:g}: {own.label} did not get there in {self.budget:g} s.")
            elif peer is None:
                said.append(
                    f"To {target:g}: {own.label} {own.seconds.median:.1f} s; no other optimizer "
                    f"got there in {self.budget:g} s."
                )
            else:
                said.append(
                    f"To {target:g}: {own.label} {own.seconds.median:.1f} s and "
                    f"{own.steps.median:g} steps; the fastest other, {peer.label}, "
                    f"{peer.seconds.median:.1f} s and {peer.steps.median:g} steps: "
                    f"{own.against_peer} times as long."
                )
        return said


def line(records: Sequence[RunRecord], target: float) -> Line:
    """Summarises the runs of one optimizer.

    Args:
        records: One for each seed.
        target: The loss to reach.

    Returns:
        The line, without ratios.
    """
    rows = [record.reached(target) for record in records]
    last = [record.rows[-1] for record in records]
    return Line(
        optimizer=records[0].config.optimizer,
        label=records[0].config.label,
        target=target,
        seeds=len(records),
        reached=sum(row is not None for row in rows),
        steps=Spread.of([row.step if row else math.inf for row in rows]),
        seconds=Spread.of([row.seconds if row else math.inf for row in rows]),
        milliseconds_per_step=statistics.median(
            1e3 * row.seconds / max(row.step, 1) for row in last
        ),
        best_loss=statistics.median(record.best_loss for record in records),
        trained=statistics.median(row.seconds for row in last),
    )


def compare(lines: Sequence[Line]) -> list[Line]:
    """Adds the ratios.

    Args:
        lines: All optimizers, for one target.

    Returns:
        The same lines with ratios.
    """
    baseline = next((other for other in lines if other.optimizer == BASELINE), None)
    peer = best_peer(lines)
    longest = max((o for o in lines if o.optimizer != TRUST_REGION), key=_trained, default=None)
    compared = []
    for own in lines:
        fields = vars(own) | {
            "against_baseline": ratio(own, baseline),
            "against_peer": ratio(own, peer or longest),
        }
        if peer is not None and math.isfinite(own.steps.median):
            steps = peer.steps.median / max(own.steps.median, 1)
            fields["steps_against_peer"] = Ratio(steps)
        compared.append(Line(**fields))
    return compared


def best_peer(lines: Sequence[Line]) -> Line | None:
    """The optimizer other than the trust region that reaches a target first, in the median.

    Args:
        lines: All optimizers, for one target.

    Returns:
        Its line, or None if none gets there.
    """
    there = [
        other
        for other in lines
        if other.optimizer != TRUST_REGION and math.isfinite(other.seconds.median)
    ]
    return min(there, key=lambda other: other.seconds.median, default=None)


def ratio(own: Line, other: Line | None) -> Ratio | None:
    """How many times the seconds another optimizer needs.

    Args:
        own: Of which the ratio is.
        other: What it is compared with.

    Returns:
        The ratio of medians; of the time that the other spent in vain if it did not get there;
        None if this one did not, or if there is no other.
    """
    if other is None or not math.isfinite(own.seconds.median):
        return None
    if math.isfinite(other.seconds.median):
        return Ratio(other.seconds.median / max(own.seconds.median, 1e-9))
    return Ratio(other.trained / max(own.seconds.median, 1e-9), is_bound=True)


def _trained(line: Line) -> float:
    return line.trained


def table(report: Report) -> Table:
    """The report as a table, a section for each target.

    Args:
        report: The report.

    Returns:
        A rich table.
    """
    table_module, box = require("rich.table", "rich.box")
    problem = workload(report.workload)
    runs = f"{len(report.seeds)} seed(s)"
    made: Table = table_module.Table(
        title=f"{problem.title}: {problem.loss_name}; median (least-greatest) of {runs}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    # On a narrow terminal cells are wrapped rather than cut.
    made.add_column("to", justify="right", overflow="fold")
    made.add_column("optimizer", overflow="fold")
    ratios = ("time of AdamW\n/ this", "of best peer\n/ this", "its steps\n/ this")
    for name in ("steps", "seconds", "ms/\nstep", *ratios):
        made.add_column(name, justify="right", overflow="fold")
    target = None
    for line in report.lines:
        if target is not None and line.target != target:
            made.add_section()
        made.add_row("" if line.target == target else f"{line.target:g}", *cells(line))
        target = line.target
    return made


def cells(line: Line) -> list[str]:
    """What a table shows of a line, behind the target.

    Args:
        line: The line.

    Returns:
        One text for each column.
    """
    ratios = (line.against_baseline, line.against_peer, line.steps_against_peer)
    reached = line.reached > 0 and math.isfinite(line.seconds.median)
    if reached:
        steps, seconds = _spread(line.steps, "{:.0f}"), _spread(line.seconds, "{:.1f}")
    else:
        share = f", {line.reached} of {line.seeds} did" if line.reached else ""
        steps, seconds = "not reached", f"{line.best_loss:.3g} after {line.trained:.0f} s{share}"
    return [
        line.label,
        steps,
        seconds,
        f"{line.milliseconds_per_step:.1f}",
        *("-" if value is None else str(value) for value in ratios),
    ]


def _spread(spread: Spread, form: str) -> str:
    def show(value: float) -> str:
        return form.format(value) if math.isfinite(value) else "never"

    if spread.low == spread.high:
        return show(spread.median)
    return f"{show(spread.median)} ({show(spread.low)}-{show(spread.high)})"


def processor() -> str:
    """What the machine calls its processor, or the name of its architecture."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            names = [text for text in file if text.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.machine()
