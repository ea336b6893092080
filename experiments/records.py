"""Records of runs, and the figures that tables, plots and JSON show of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.config import RunConfig
from experiments.workloads import workload

KFAC = ("kfac", "trust-region")
MARK = " †"
NOTE = "†: not tuned, beside others that were: tuned it may be faster."
#: Optimizers that a verdict compares with.
FIRST_ORDER = ("sgd", "adamw", "muon", "soframe:muon")


@dataclass(frozen=True)
class Row:
    """One evaluation.

    Attributes:
        step: Optimizer steps taken.
        seconds: Seconds of training, without evaluations.
        loss: The mean over the whole training set, or over the held-out set.
        accuracy: On the held-out set, from 0 to 1, where the workload has one.
    """

    step: int
    seconds: float
    loss: float
    accuracy: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        config: The run's settings.
        processes: The number of ranks.
        parameters: The number of trained parameters.
        targets: Losses to reach, descending.
        rows: Evaluations in order, the first before any step.
        milliseconds_per_step: The median over the steps.
        sent_bytes_per_step: Mean payload that a rank hands to collectives in a step, by purpose:
            "gradients" (averaged by DDP) and the preconditioner's phases; of the rank with the
            largest sum. Empty on one process.
        curvature_bytes: The peak of the preconditioner's memory, for each rank.
        gradient_workers: The number of gradient workers of each block.
        settings: The settings that the optimizer and the preconditioner had at the start, with
            the defaults of their libraries.
        environment: Versions, commit and hardware; empty unless the run is one of a comparison.
        settings_from: The origin of the settings in words, with "trials" if they were tuned.
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
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    settings_from: str = ""

    @property
    def last(self) -> Row:
        """The last evaluation."""
        return self.rows[-1]

    @property
    def best_loss(self) -> float:
        """The lowest loss of all evaluations that are finite."""
        return min((row.loss for row in self.rows if math.isfinite(row.loss)), default=math.inf)

    @property
    def diverged(self) -> bool:
        """Whether the last loss is infinite or not a number."""
        return not math.isfinite(self.last.loss)

    @property
    def label(self) -> str:
        """See `RunConfig.label`."""
        return self.config.label

    @property
    def tuned(self) -> bool:
        """Whether a search chose the settings."""
        return "trials" in self.settings_from

    def reached(self, target: float) -> Row | None:
        """Return the first evaluation at or below a loss, or None."""
        return next((row for row in self.rows if row.loss <= target), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the record, ready for `write_json`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RunRecord:
        """Return the inverse of `as_dict`, also from JSON, which has no infinite losses."""
        values = dict(fields)
        values["config"] = RunConfig.from_dict(values["config"])
        values["rows"] = tuple(Row(**with_infinity(row)) for row in values["rows"])
        for name in ("targets", "curvature_bytes", "gradient_workers"):
            values[name] = tuple(values[name])
        return cls(**values)


def labels(records: Sequence[RunRecord], mark: str) -> list[str]:
    """Return the names of runs, with a mark at those that were not tuned beside one that was."""
    is_mixed = any(record.tuned for record in records)
    names: list[str] = []
    for record in records:
        name = record.label
        if is_mixed and not record.tuned:
            name += mark
        names.append(name)
    return names


def ranks(counts: Sequence[int]) -> str:
    """Return numbers of ranks in words."""
    if list(counts) == [1]:
        return "1 rank"
    return f"{' and '.join(map(str, counts))} ranks"


def jsonable(value: Any) -> Any:
    """Replace numbers that are not finite by None, and tuples by lists, at any depth."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def with_infinity(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of JSON with its loss: infinite where `jsonable` has put None."""
    if row["loss"] is None:
        return {**row, "loss": math.inf}
    return dict(row)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file of JSON, and an empty dict where it is missing."""
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_json(path: Path, content: object) -> None:
    """Write JSON; an interrupt leaves the former file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    text = json.dumps(jsonable(content), indent=1, allow_nan=False) + "\n"
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _fastest_first_order(
    records: Sequence[RunRecord], target: float
) -> tuple[RunRecord, Row] | None:
    """Return the first-order run that reached a loss in the fewest seconds, and the row."""
    hits: list[tuple[RunRecord, Row]] = []
    for record in records:
        row = record.reached(target)
        if record.config.optimizer in FIRST_ORDER and row is not None:
            hits.append((record, row))
    return min(hits, key=lambda hit: hit[1].seconds, default=None)


def verdict(records: Sequence[RunRecord], target: float, optimizer: str = "kfac") -> str:
    """Return one sentence on an optimizer against the best first-order run.

    The first run of the optimizer is compared with the first-order run that reached the target in
    the fewest seconds. Of several strategies the first listed is taken, not the fastest: they
    follow one trajectory, and the best of several noisy clocks would be a gift. One seed proves no
    difference, so the sentence states figures only.

    Raises:
        ValueError: If no record has that optimizer.
    """
    first = next((r for r in records if r.config.optimizer == optimizer), None)
    if first is None:
        raise ValueError(f"a verdict on {optimizer} needs a run of it")
    kind = "held-out" if workload(first.config.workload).held_out else "training"
    measured = f"{kind} loss of {target:g}"
    row = first.reached(target)
    first_order = _fastest_first_order(records, target)
    if row is None:
        if first_order is None:
            neither = f"Neither {first.label} nor a first-order run reached"
            return f"{neither} a {measured} within the budget."
        other, fastest = first_order
        return (
            f"{first.label} did not reach a {measured} within the budget; {other.label} did, after "
            f"{fastest.step} steps and {fastest.seconds:.1f} s."
        )
    start = f"To a {measured}, {first.label} took {row.step} steps and {row.seconds:.1f} s"
    if first_order is None:
        return f"{start}; no first-order run reached it within the budget."
    other, fastest = first_order
    name = "K-FAC" if optimizer in KFAC else first.label
    steps, seconds = fastest.step / max(row.step, 1), fastest.seconds / max(row.seconds, 1e-9)
    return (
        f"{start}; the fastest first-order run, {other.label}, took {fastest.step} steps and "
        f"{fastest.seconds:.1f} s: {name} needed {_ratio(steps, 'fewer', 'many', 'steps')} and "
        f"{_ratio(seconds, 'less', 'much', 'time')}."
    )


def _ratio(ratio: float, better: str, much: str, what: str) -> str:
    """Return how much better or worse, unless that rounds to "1.0 times"."""
    factor = f"{max(ratio, 1 / ratio):.1f}"
    if factor == "1.0":
        return f"about as {much} {what}"
    return f"{factor} times {better if ratio > 1 else 'more'} {what}"
