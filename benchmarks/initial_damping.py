"""Does the trust region's initial damping have to be tuned? The same defaults, from 1 to 100.

    python benchmarks/initial_damping.py                  # both autoencoders, three seeds
    python benchmarks/initial_damping.py curves --seeds 0

A run fails if it does not reach the second of its targets within `--steps`. The exit status is the
number of runs that failed.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Annotated

import typer

from soframe.experiments.compare import console
from soframe.experiments.config import RunConfig
from soframe.experiments.requirements import require
from soframe.experiments.time_to_target import BENCHMARKS, TRUST_REGION, race
from soframe.trust_region import LevenbergMarquardt

WORKLOADS = ("curves", "digits-autoencoder")


def main(
    workloads: Annotated[list[str] | None, typer.Argument(help=f"From {WORKLOADS}.")] = None,
    dampings: Annotated[str, typer.Option(help="Separated by commas.")] = "1,3,10,30,100",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="After which a run has failed.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train to the second target from several initial dampings."""
    (tables,) = require("rich.table")
    table = tables.Table(title="steps to target, median (least to greatest) over seeds")
    for column in ("workload", "initial damping", "target", "steps", "failed"):
        table.add_column(column)
    results = []
    failures = 0
    for name in workloads or WORKLOADS:
        targets = BENCHMARKS[name].targets[:2]
        for damping in [float(number) for number in dampings.split(",")]:
            records = [
                race([configuration(name, damping, int(seed), steps)])[0]
                for seed in seeds.split(",")
            ]
            for target in targets:
                reached = [row.step for r in records if (row := r.reached(target)) is not None]
                failed = len(records) - len(reached)
                shown = "-"
                if reached:
                    middle = statistics.median(reached)
                    shown = f"{middle:g} ({min(reached)} to {max(reached)})"
                table.add_row(name, f"{damping:g}", f"{target:g}", shown, str(failed))
                results.append(
                    {"workload": name, "damping": damping, "target": target, "steps": reached}
                )
                failures += failed if target == targets[-1] else 0
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        console().print(table)
    raise typer.Exit(min(failures, 99))


def configuration(name: str, damping: float, seed: int, steps: int) -> RunConfig:
    """The defaults but for the initial damping."""
    return RunConfig(
        workload=name,
        optimizer=TRUST_REGION,
        lr=1.0,
        options={"damping": LevenbergMarquardt(initial=damping)},
        targets=BENCHMARKS[name].targets[:2],
        steps=steps,
        evaluate_every=BENCHMARKS[name].trust_region_evaluate_every,
        seed=seed,
        threads=1,
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
