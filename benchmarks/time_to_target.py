"""Time to target: soframe's trust region, untuned, against tuned peers.

    python benchmarks/time_to_target.py                  # report: stored settings, seeds 0, 1, 2
    python benchmarks/time_to_target.py curves --quick   # a first impression in a minute
    python benchmarks/time_to_target.py --tune           # tune the peers anew, then report
    python benchmarks/time_to_target.py curves --target 0.5   # peers as tuned for 0.5

The report prints a table for each workload, and writes JSON and plots to `--output`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from harness import target_report, time_to_target, tuning
from harness.search import PEERS
from harness.time_to_target import BENCHMARKS, TRUST_REGION

from soframe.experiments import plots
from soframe.experiments.compare import console, jsonable
from soframe.experiments.config import RunConfig
from soframe.experiments.requirements import MissingLibraryError
from soframe.experiments.tuning import Protocol
from soframe.experiments.workloads import workload

#: What is measured if nothing is named; the transformer is where the trust region gains nothing.
DEFAULT = ("curves", "digits-autoencoder")
QUICK = 0.2
THREADS = 2  # networks as small as these gain nothing from more


def main(
    workloads: Annotated[
        list[str] | None, typer.Argument(help=f"From: {', '.join(BENCHMARKS)}.")
    ] = None,
    optimizers: Annotated[
        str, typer.Option(help="Separated by commas.")
    ] = f"{TRUST_REGION},{','.join(PEERS)}",
    tune: Annotated[bool, typer.Option("--tune", help="Tune the peers first.")] = False,
    tune_only: Annotated[bool, typer.Option("--tune-only", help="And no report.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="Of tuning, for each peer.")] = 8,
    seeds: Annotated[str, typer.Option(help="Of the report, separated by commas.")] = "0,1,2",
    seconds: Annotated[
        float | None, typer.Option(help="Of training, for each run; each workload's if left out.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of torch; two if left out, or one by processor time.", show_default=False
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Peers as tuned for this target, where runs end; else for the lowest."),
    ] = None,
    published_muon: Annotated[
        bool, typer.Option("--published-muon", help="Muon as pytorch_optimizer has it.")
    ] = False,
    cpu_clock: Annotated[
        bool, typer.Option("--cpu-clock", help="Processor time, for busy machines.")
    ] = False,
    turn: Annotated[float, typer.Option(help="Seconds after which the next run goes on.")] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, a fifth of the time.")] = False,
    output: Annotated[Path, typer.Option(help="Of tables and plots.")] = Path(
        "runs/time-to-target"
    ),
    tuned: Annotated[Path, typer.Option(help="Where settings are kept.")] = time_to_target.FOLDER,
) -> None:
    """Train until targets are reached, and say how long it took."""
    names = optimizers.split(",")
    if unknown := [name for name in names if name not in (TRUST_REGION, *PEERS)]:
        raise typer.BadParameter(f"no optimizer {unknown[0]!r} here")
    if unknown := [name for name in workloads or () if name not in BENCHMARKS]:
        raise typer.BadParameter(f"no workload {unknown[0]!r} here")
    # Processor time is that of all threads.
    threads = threads or (1 if cpu_clock else min(THREADS, torch.get_num_threads()))
    screen = console()
    if not screen.is_terminal:
        screen.width = max(screen.width, 140)
    for name in workloads or DEFAULT:
        benchmark = BENCHMARKS[name]
        budget = (seconds or benchmark.seconds) * (QUICK if quick else 1.0)
        if tune or tune_only:
            rungs = ((trials, 0.25), (max(1, trials // 2), 0.5), (1, 1.0))
            budget_of_trials = seconds or benchmark.tuning_seconds
            protocol = Protocol(name, benchmark.targets, budget_of_trials, rungs)
            for optimizer in PEERS:
                if optimizer in names:
                    print(f"{name}, {optimizer}", flush=True)
                    outcome = tuning.tune(
                        optimizer, protocol, tuning.show, evaluate_every=benchmark.evaluate_every
                    )
                    print(
                        f"  best: {tuning.describe(outcome.best)}\n  {outcome.save(tuned)}",
                        flush=True,
                    )
        if tune_only:
            continue
        records = []
        for seed in [int(seed) for seed in seeds.split(",")][: 1 if quick else None]:
            configs = [
                time_to_target.configuration(
                    benchmark,
                    optimizer,
                    seconds=budget,
                    seed=seed,
                    clock="cpu" if cpu_clock else "wall",
                    threads=threads,
                    folder=tuned,
                    target=target,
                )
                for optimizer in (TRUST_REGION, *PEERS)
                if optimizer in names
            ]
            configs = with_muon(configs, published=published_muon)
            records += time_to_target.race(configs, turn=turn)
            print(f"{name}, seed {seed}: done", flush=True)
        report = target_report.Report.of(name, records[0].targets, records)
        screen.print(target_report.table(report))
        for sentence in report.sentences():
            screen.print(sentence, highlight=False)
        figure = plots.loss_curves(workload(name), records, targets=records[0].targets)
        for suffix in ("png", "svg"):
            plots.save(figure, output / f"{name}.{suffix}")
        content = jsonable({**report.as_dict(), "runs": [record.as_dict() for record in records]})
        path = output / f"{name}.json"
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        screen.print(f"{path}, .png, .svg", soft_wrap=True)


def with_muon(configs: list[RunConfig], *, published: bool) -> list[RunConfig]:
    """The runs, Muon's by pytorch_optimizer if it is to be the published one."""
    options = {"published": True} if published else {}
    return [
        one.but(options={**one.options, **options}) if one.optimizer == "muon" else one
        for one in configs
    ]


if __name__ == "__main__":
    try:
        typer.run(main)
    except (FileNotFoundError, MissingLibraryError, ValueError) as error:
        sys.exit(f"error: {error}")
