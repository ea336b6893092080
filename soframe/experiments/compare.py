"""Several optimizers on one workload, under one protocol.

The tuned settings of each optimizer come from `soframe.experiments.tuning`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from soframe.experiments.config import RunConfig
from soframe.experiments.records import RunRecord
from soframe.experiments.requirements import require
from soframe.experiments.train import Progress, run

if TYPE_CHECKING:
    from rich.console import Console

#: The strategies that K-FAC is shown under.
STRATEGIES = ("comm-opt", "mem-opt", "hybrid-opt")


class Watch(Protocol):
    """Is told of a run's progress."""

    def __call__(self, label: str, progress: Progress) -> None:
        """Takes the label of a run and how far it is."""


def ignore(label: str, progress: Progress) -> None:
    """Watches nothing."""


@dataclass(frozen=True)
class Comparison:
    """Runs of one workload.

    Attributes:
        workload: Its name.
        records: The runs, in the order they were asked for.
    """

    workload: str
    records: tuple[RunRecord, ...]

    def as_dict(self) -> dict[str, Any]:
        """The comparison, ready for JSON."""
        return {
            "workload": self.workload,
            "targets": list(self.records[0].targets),
            "runs": [record.as_dict() for record in self.records],
        }


def compare(
    configs: Sequence[RunConfig], *, processes: int = 1, watch: Watch = ignore
) -> Comparison:
    """Runs one configuration after the other.

    Args:
        configs: The runs, all of the same workload.
        processes: How many ranks share each batch.
        watch: Told of the progress.

    Returns:
        The records.

    Raises:
        ValueError: If there is no configuration, or if the workloads differ.
    """
    names = {config.workload for config in configs}
    if len(names) != 1:
        raise ValueError(f"a comparison is of one workload, not of {sorted(names)}")
    records = tuple(
        run(config, processes=processes, on_progress=_watcher(watch, config.label))
        for config in configs
    )
    return Comparison(names.pop(), records)


def _watcher(watch: Watch, label: str) -> Callable[[Progress], None]:
    return lambda progress: watch(label, progress)


@contextlib.contextmanager
def bars(console: Console, labels: Sequence[str]) -> Iterator[Watch]:
    """One progress bar for each run, with the loss; nothing unless on a terminal.

    Args:
        console: Where to draw.
        labels: Of the runs.

    Yields:
        What to hand to `compare`.
    """
    if not console.is_terminal:
        yield ignore
        return
    (module,) = require("rich.progress")
    columns = (
        module.TextColumn("{task.description:<18}"),
        module.BarColumn(bar_width=32),
        module.TextColumn("{task.fields[status]}"),
    )
    with module.Progress(*columns, console=console) as display:
        tasks = {label: display.add_task(label, total=1.0, status="") for label in labels}

        def watch(label: str, progress: Progress) -> None:
            row = progress.row
            loss = f"{row.loss:.4f}" if math.isfinite(row.loss) else "diverged"
            status = f"loss {loss}  step {row.step}  {row.seconds:.1f} s"
            display.update(tasks[label], completed=progress.fraction, status=status)

        yield watch


def jsonable(value: Any) -> Any:
    """Replaces what JSON cannot hold (infinities, NaN, tuples), at any depth.

    Args:
        value: Dictionaries, sequences and scalars.

    Returns:
        The same with None in the place of numbers that are not finite.
    """
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def console(*, to_stderr: bool = False) -> Console:
    """A console on the standard streams.

    Args:
        to_stderr: Whether standard output belongs to JSON.

    Returns:
        A rich console.
    """
    (module,) = require("rich.console")
    made: Console = module.Console(file=sys.stderr if to_stderr else sys.stdout)
    if not made.is_terminal:
        # Tables in files are not cut to a width that nobody looks at.
        made.width = max(made.width, 100)
    return made
