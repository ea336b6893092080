"""What a run leaves behind, and what tables, plots and JSON say about it.

Every figure that is shown anywhere is computed from a `RunRecord` in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soframe.experiments.config import OptimizerName, RunConfig
from soframe.experiments.workloads import workload

KFAC: tuple[OptimizerName, ...] = ("kfac", "trust-region")
#: What a verdict is on, and what it compares with.
SECOND_ORDER: tuple[OptimizerName, ...] = (*KFAC, "stochastic-trust-region")
FIRST_ORDER: tuple[OptimizerName, ...] = ("sgd", "adamw", "muon", "soframe:muon")


@dataclass(frozen=True)
class Row:
    """One evaluation.

    Attributes:
        step: Optimizer steps taken.
        seconds: Spent training, without evaluations.
        loss: The mean over the whole training set, or what else the workload measures.
        accuracy: On the test set, from 0 to 1, where the workload has one.
    """

    step: int
    seconds: float
    loss: float
    accuracy: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        config: What was run.
        processes: How many ranks it ran on.
        parameters: The number of trained parameters.
        targets: Training losses to reach, descending.
        rows: Evaluations in order, the first before any step.
        milliseconds_per_step: The median over the steps.
        sent_bytes_per_step: The mean over the steps of the payload that a rank hands to
            collectives, by purpose: "gradients" (averaged by DDP) and the preconditioner's phases;
            of the rank with the largest sum. Empty on one process.
        curvature_bytes: The peak of the preconditioner's memory, for each rank.
        gradient_workers: How many ranks precondition each block, in the preconditioner's order.
    """

    config: RunConfig
    processes: int
    parameters: int
    targets: tuple[float, ...]
    rows: tuple[Row, ...]
    milliseconds_per_step: float
    sent_bytes_per_step: Mapping[str, float]
    curvature_bytes: tuple[int, ...]
    gradient_workers: tuple[int, ...] = ()

    def reached(self, target: float) -> Row | None:
        """The first evaluation at or below a training loss, or None."""
        return next((row for row in self.rows if row.loss <= target), None)

    @property
    def best_loss(self) -> float:
        """The lowest training loss of all evaluations."""
        return min(row.loss for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The record, ready for JSON, with the figures of the table under "summary"."""
        fields = asdict(self)
        fields["config"] = self.config.as_dict()
        fields["label"] = self.config.label
        fields["summary"] = summarise(self).as_dict()
        return fields


@dataclass(frozen=True)
class Reached:
    """When a run reached a target: both None if it did not."""

    target: float
    step: int | None
    seconds: float | None


@dataclass(frozen=True)
class Summary:
    """One line of a table.

    Attributes:
        label: The optimizer.
        targets: When each target was reached.
        final_loss: The training loss of the last evaluation.
        final_step: The number of steps taken.
        final_seconds: The seconds trained.
        final_accuracy: The last test accuracy, where the workload has a test set.
        milliseconds_per_step: The median.
        bytes_per_step: Sent by the rank that sends most, for all purposes together.
        curvature_bytes: Peak memory of the preconditioner on the rank that holds most.
    """

    label: str
    targets: tuple[Reached, ...]
    final_loss: float
    final_step: int
    final_seconds: float
    final_accuracy: float | None
    milliseconds_per_step: float
    bytes_per_step: float
    curvature_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The line, ready for JSON."""
        return asdict(self)


def summarise(record: RunRecord) -> Summary:
    """The figures of a run that a table shows.

    Args:
        record: The run.

    Returns:
        The line of the table.
    """
    hits = [(target, record.reached(target)) for target in record.targets]
    last = record.rows[-1]
    return Summary(
        label=record.config.label,
        targets=tuple(
            Reached(target, row.step if row else None, row.seconds if row else None)
            for target, row in hits
        ),
        final_loss=last.loss,
        final_step=last.step,
        final_seconds=last.seconds,
        final_accuracy=last.accuracy,
        milliseconds_per_step=record.milliseconds_per_step,
        bytes_per_step=sum(record.sent_bytes_per_step.values()),
        curvature_bytes=max(record.curvature_bytes, default=0),
    )


def verdict(records: Sequence[RunRecord], target: float, optimizer: OptimizerName = "kfac") -> str:
    """One sentence on K-FAC against the best first-order run, from the recorded figures.

    The first run of the optimizer is compared with the first-order run that reached the target in
    the fewest seconds. Of several strategies the first listed is taken, not the fastest: they
    follow one trajectory, and the best of several noisy clocks would be a gift. One seed proves no
    difference, so the sentence states figures only.

    Args:
        records: Runs of one workload.
        target: The loss to reach: that of training, or on held-out data where the workload has it.
        optimizer: "kfac", one of the trust regions, or soframe's of a method.

    Returns:
        The sentence.

    Raises:
        ValueError: If there is no run of that optimizer.
    """
    first = next((r for r in records if r.config.optimizer == optimizer), None)
    if first is None:
        raise ValueError(f"a verdict on {optimizer} needs a run of it")
    held_out = workload(first.config.workload).held_out
    measured = "held-out loss" if held_out else "training loss"
    kfac = _fastest([first], target)
    other = _fastest([r for r in records if r.config.optimizer in FIRST_ORDER], target)
    if kfac is None and other is None:
        return (
            f"Neither {first.config.label} nor a first-order run reached a {measured} of "
            f"{target:g} within the budget."
        )
    if kfac is None:
        assert other is not None
        record, row = other
        return (
            f"{first.config.label} did not reach a {measured} of {target:g} within the budget; "
            f"{record.config.label} did, after {row.step} steps and {row.seconds:.1f} s."
        )
    record, row = kfac
    start = (
        f"To a {measured} of {target:g}, {record.config.label} took {row.step} steps "
        f"and {row.seconds:.1f} s"
    )
    if other is None:
        return f"{start}; no first-order run reached it within the budget."
    first_order, other_row = other
    name = "K-FAC" if optimizer in KFAC else record.config.label
    return (
        f"{start}; the fastest first-order run, {first_order.config.label}, took "
        f"{other_row.step} steps and {other_row.seconds:.1f} s: {name} needed "
        f"{_ratio(other_row.step / max(row.step, 1), 'fewer', 'more', 'steps')} and "
        f"{_ratio(other_row.seconds / max(row.seconds, 1e-9), 'less', 'more', 'time')}."
    )


def _fastest(records: Sequence[RunRecord], target: float) -> tuple[RunRecord, Row] | None:
    hits = [(record, row) for record in records if (row := record.reached(target)) is not None]
    return min(hits, key=lambda hit: hit[1].seconds, default=None)


def _ratio(ratio: float, better: str, worse: str, what: str) -> str:
    """Says how much better or worse, unless that rounds to "1.0 times"."""
    factor = f"{max(ratio, 1 / ratio):.1f}"
    if factor == "1.0":
        return f"about as many {what}" if what == "steps" else f"about as much {what}"
    return f"{factor} times {better if ratio > 1 else worse} {what}"
