"""The trust regions on problems that nobody tuned them to, against tuned AdamW, SOAP and Muon.

    python benchmarks/suite.py                        # everything that is not in `--output` yet
    python benchmarks/suite.py pinn vae --fresh       # those two anew
    python benchmarks/suite.py --unseen               # those that are kept for the end, too

The target is the loss that tuned AdamW ends with, on each seed; a ratio says how many times AdamW's
own time to it an optimizer took. Peers' trials are stored in `benchmarks/harness/suite`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from harness import suite
from harness.suite_problems import PROBLEMS

from soframe.experiments.compare import console
from soframe.experiments.requirements import require
from soframe.experiments.train import numerics


def main(
    problems: Annotated[
        list[str] | None, typer.Argument(help=f"From: {', '.join(PROBLEMS)}.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1",
    optimizers: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(
        (*suite.OWN, *suite.PEERS)
    ),
    seconds: Annotated[float, typer.Option(help="Of the processor, for a peer's run.")] = 2.0,
    longer: Annotated[float, typer.Option(help="Times that, for the trust regions.")] = 2.0,
    unseen: Annotated[bool, typer.Option("--unseen", help="Also those kept for the end.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run the named optimizers anew.")] = False,
    tune_only: Annotated[bool, typer.Option("--tune-only", help="And no report.")] = False,
    output: Annotated[Path, typer.Option(help="Of runs and the table.")] = Path("runs/suite"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run what is missing, and print how everybody fared."""
    names = optimizers.split(",")
    check(names, problems or ())
    wanted = problems or [name for name, own in PROBLEMS.items() if unseen or not own.unseen]
    numbers = [int(seed) for seed in seeds.split(",")]
    made = []
    with numerics(1):
        for name in wanted:
            results = suite.Results(name, seconds, output)
            if tune_only:
                suite.tune(name, seconds, results.trials, results.save)
                print(f"{name}: tuned", flush=True)
                continue
            if fresh:
                for optimizer in names:
                    results.curves.pop(optimizer, None)
            results.complete(numbers, names, longer)
            made += suite.rows(results, numbers, names)
            print(f"{name}: done", flush=True)
    if tune_only:
        return
    if as_json:
        print(json.dumps([row.__dict__ for row in made], indent=1))
        return
    show(made)


def check(optimizers: Sequence[str], problems: Sequence[str]) -> None:
    """Check that there are such."""
    if unknown := set(optimizers) - {*suite.OWN, *suite.PEERS, *suite.UNTUNED}:
        raise typer.BadParameter(f"no optimizer {min(unknown)!r} here")
    if unknown := set(problems) - set(PROBLEMS):
        raise typer.BadParameter(f"no problem {min(unknown)!r} here")
    if "adamw" not in optimizers:
        raise typer.BadParameter("adamw sets the targets")


def show(made: list[suite.Row]) -> None:
    """Print a table, and on how many problems the trust region got there in time."""
    (tables,) = require("rich.table")
    table = tables.Table(title=f"the suite, one thread, torch {torch.__version__}")
    columns = ("problem", "optimizer", "time to AdamW's loss, of AdamW's", "steps", "lowest loss")
    for column in columns:
        table.add_column(column)
    for row in made:
        shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in row.ratios]
        steps = ["-" if step is None else str(step) for step in row.steps]
        lowest = [f"{loss:.4g}" for loss in row.lowest]
        said = row.error[:60] if row.error else ", ".join(lowest)
        table.add_row(row.problem, row.optimizer, ", ".join(shown), ", ".join(steps), said)
    screen = console()
    if not screen.is_terminal:
        screen.width = 140
    screen.print(table)
    for name in suite.OWN:
        own = [row for row in made if row.optimizer == name]
        for times in (1.0, 1.5, 2.0) if own else ():
            count = sum(row.all_within(times) for row in own)
            screen.print(
                f"{name} within {times:g} times AdamW's time on every seed: {count} of {len(own)}"
            )


if __name__ == "__main__":
    typer.run(main)
