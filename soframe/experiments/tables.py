"""Tables of recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soframe.experiments.records import RunRecord, Summary, summarise
from soframe.experiments.requirements import require
from soframe.experiments.workloads import Workload

if TYPE_CHECKING:
    from rich.table import Table


def format_bytes(size: float) -> str:
    """A size with a binary unit and three digits.

    Args:
        size: In bytes.

    Returns:
        For example "1.50 MiB"; "-" for nothing.
    """
    if size == 0:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def comparison(workload: Workload, records: Sequence[RunRecord]) -> Table:
    """The table of several runs of one workload.

    Args:
        workload: What was trained.
        records: One run for each line.

    Returns:
        A rich table.
    """
    table_module, box = require("rich.table", "rich.box")
    summaries = [summarise(record) for record in records]
    table: Table = table_module.Table(
        title=f"{workload.title}: {workload.loss_name}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    # On a narrow terminal cells are wrapped rather than cut.
    table.add_column("optimizer", min_width=len("hybrid-opt"))
    for target in records[0].targets if records else workload.targets:
        table.add_column(f"to {target:g}\nsteps / s", justify="right")
    table.add_column("last\nloss", justify="right")
    if workload.classifies:
        table.add_column("test\nacc.", justify="right")
    table.add_column("ms/\nstep", justify="right")
    table.add_column("sent per\nstep, rank", justify="right")
    table.add_column("curvature\npeak, rank", justify="right")
    for summary in summaries:
        table.add_row(*_cells(summary, workload.classifies))
    return table


def _cells(summary: Summary, classifies: bool) -> list[str]:
    cells = [summary.label]
    for reached in summary.targets:
        if reached.step is None:
            cells.append("not reached")
        else:
            cells.append(f"{reached.step} / {reached.seconds:.1f}")
    cells.append(f"{summary.final_loss:.3g}")
    if classifies:
        accuracy = summary.final_accuracy
        cells.append("-" if accuracy is None else f"{100 * accuracy:.1f}%")
    cells.append(f"{summary.milliseconds_per_step:.1f}")
    cells.append(format_bytes(summary.bytes_per_step))
    cells.append(format_bytes(summary.curvature_bytes))
    return cells
