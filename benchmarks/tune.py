"""Tunes the optimizers of the experiments, or checks that what tuning chose still holds.

    python benchmarks/tune.py                               # every optimizer, the demo's workloads
    python benchmarks/tune.py digits-autoencoder kfac       # one
    python benchmarks/tune.py digits-autoencoder kfac --check

`--check` repeats every trial, writes nothing, and fails if the stored choice, run again, takes more
than `--tolerance` times as long to the target as the best trial of the repetition.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from soframe.experiments import tuning
from soframe.experiments.workloads import workload


def main() -> int:
    parser = argparse.ArgumentParser(description="Tune the optimizers of the experiments.")
    parser.add_argument("workload", nargs="?", help="all if left out")
    parser.add_argument("optimizer", nargs="?", help="all if left out")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="of training, for each trial")
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
            protocol = tuning.Protocol(name, options.trials, options.seconds)
            outcome = tuning.tune(optimizer, protocol, on_trial=show)
            print(f"  best: {describe(outcome.best)}\n  {outcome.save(options.output)}", flush=True)
    return 1 if failures else 0


def check(name: str, optimizer: tuning.OptimizerName, tolerance: float) -> bool:
    stored = tuning.load(name, optimizer)
    again = tuning.tune(optimizer, stored.protocol, on_trial=show)
    chosen = next(trial for trial in again.trials if same(trial, stored.best))
    holds = tuning.holds_up(chosen, again.best, tolerance)
    print(f"  best now:   {describe(again.best)}\n  chosen now: {describe(chosen)}")
    print(f"  {'within' if holds else 'NOT within'} a factor {tolerance:g} of the best")
    return holds


def same(trial: tuning.Trial, other: tuning.Trial) -> bool:
    # What was read from JSON holds lists where a fresh trial holds tuples.
    return json.dumps(trial.settings) == json.dumps(other.settings)


def show(trial: tuning.Trial) -> None:
    print(f"  {describe(trial)}", flush=True)


def describe(trial: tuning.Trial) -> str:
    reached = "-" if trial.step is None else f"{trial.step} steps, {trial.seconds:.2f} s"
    return f"loss {trial.loss:.4g}, target: {reached}; {dict(trial.settings)}"


if __name__ == "__main__":
    sys.exit(main())
