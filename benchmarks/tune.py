"""Tunes the optimizers of the demonstration, or checks that what tuning chose still holds.

    python benchmarks/tune.py                               # every optimizer and workload of it
    python benchmarks/tune.py digits-autoencoder kfac       # one
    python benchmarks/tune.py digits-autoencoder kfac --check

`--check` tunes again, writes nothing, and fails if the stored choice, run again for the whole
budget, takes more than `--tolerance` times as long to the lowest target as the best trial now.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.runs import ALONE
from harness.tuning import describe, holds_up, judge, show, tune

from soframe.experiments import tuning
from soframe.experiments.config import OptimizerName
from soframe.experiments.train import train
from soframe.experiments.workloads import workload


def main() -> int:
    parser = argparse.ArgumentParser(description="Tune the optimizers of the demonstration.")
    parser.add_argument("workload", nargs="?", help="all if left out")
    parser.add_argument("optimizer", nargs="?", help="all if left out")
    parser.add_argument("--trials", type=int, default=16, help="in the first rung")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a trial in the last rung")
    parser.add_argument("--output", type=Path, default=tuning.FOLDER)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tolerance", type=float, default=1.5)
    options = parser.parse_args()
    failures = 0
    for name in [workload(options.workload).name] if options.workload else tuning.WORKLOADS:
        for optimizer in tuning.optimizers([options.optimizer] if options.optimizer else []):
            print(f"{name}, {optimizer}", flush=True)
            if options.check:
                failures += not check(name, optimizer, options.tolerance)
                continue
            trials = options.trials
            rungs = ((trials, 0.25), (max(1, trials // 4), 0.5), (1, 1.0))
            protocol = tuning.Protocol(name, workload(name).targets, options.seconds, rungs)
            outcome = tune(optimizer, protocol, show)
            print(f"  best: {describe(outcome.best)}\n  {outcome.save(options.output)}", flush=True)
    return 1 if failures else 0


def check(name: str, optimizer: OptimizerName, tolerance: float) -> bool:
    stored = tuning.load(name, optimizer)
    protocol, best = stored.protocol, stored.best
    again = tune(optimizer, protocol, show)
    config = tuning.configure(
        name,
        optimizer,
        best.settings,
        seconds=protocol.seconds,
        targets=protocol.targets,
        seed=protocol.seed,
        clock="cpu",
    )
    chosen = judge(best.draw, protocol.seconds, best.settings, train(ALONE, config))
    holds = holds_up(chosen, again.best, tolerance)
    print(f"  best now:   {describe(again.best)}\n  chosen now: {describe(chosen)}")
    print(f"  {'within' if holds else 'NOT within'} a factor {tolerance:g} of the best")
    return holds


if __name__ == "__main__":
    sys.exit(main())
