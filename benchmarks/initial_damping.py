"""Does the trust region's initial damping have to be tuned? The same defaults, from 1 to 100.

    python benchmarks/initial_damping.py                  # both autoencoders, three seeds
    python benchmarks/initial_damping.py curves --seeds 0
    python benchmarks/initial_damping.py --dampings 3 --parts 1,3    # what runs of layers bring
    python benchmarks/initial_damping.py --dampings 0     # the one that the first batch chooses

A run fails if it does not reach the second of its targets within `--steps`. The exit status is the
number of runs that failed.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import product
from typing import Annotated

import typer
from harness.time_to_target import BENCHMARKS, TRUST_REGION, race

from soframe.experiments.compare import console
from soframe.experiments.config import RunConfig
from soframe.experiments.requirements import require
from soframe.trust_region import LevenbergMarquardt

WORKLOADS = ("curves", "digits-autoencoder")


def main(
    workloads: Annotated[list[str] | None, typer.Argument(help=f"From {WORKLOADS}.")] = None,
    dampings: Annotated[
        str, typer.Option(help="Separated by commas; 0 for the default.")
    ] = "1,3,10,30,100",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    parts: Annotated[
        str, typer.Option(help="Runs of layers with lengths of their own, separated by commas.")
    ] = "3",
    steps: Annotated[int, typer.Option(help="After which a run has failed.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train to the second target from several initial dampings."""
    (tables,) = require("rich.table")
    table = tables.Table(title="steps to target, median (least to greatest) over seeds")
    for column in ("workload", "initial damping", "parts", "target", "steps", "failed", "ms/step"):
        table.add_column(column)
    results = []
    failures = 0
    wanted = list(product(numbers(dampings), map(int, numbers(parts))))
    for name in workloads or WORKLOADS:
        targets = BENCHMARKS[name].targets[:2]
        # Of one seed in turns, so that whatever else the machine does slows all of them alike.
        races = [
            race([configuration(name, *settings, int(seed), steps) for settings in wanted])
            for seed in numbers(seeds)
        ]
        for (damping, part), records in zip(wanted, zip(*races, strict=True), strict=True):
            took = statistics.median(1e3 * r.rows[-1].seconds / r.rows[-1].step for r in records)
            for target in targets:
                reached = [row.step for r in records if (row := r.reached(target)) is not None]
                failed = len(records) - len(reached)
                shown, each = "-", f"{took:.0f}"
                if reached:
                    middle = statistics.median(reached)
                    shown = f"{middle:g} ({min(reached)} to {max(reached)})"
                cells = (f"{damping:g}", str(part), f"{target:g}", shown, str(failed), each)
                table.add_row(name, *cells)
                result = {
                    "workload": name,
                    "damping": damping,
                    "layer_groups": part,
                    "target": target,
                }
                results.append({**result, "steps": reached, "ms_per_step": took})
                failures += failed if target == targets[-1] else 0
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        console().print(table)
    raise typer.Exit(min(failures, 99))


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def configuration(name: str, damping: float, parts: int, seed: int, steps: int) -> RunConfig:
    """The defaults but for the initial damping, and the number of parts."""
    return RunConfig(
        workload=name,
        optimizer=TRUST_REGION,
        lr=1.0,
        options={"damping": LevenbergMarquardt(initial=damping or None), "layer_groups": parts},
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
