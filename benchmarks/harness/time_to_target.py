"""Time to target: the trust region, as it comes, against tuned peers.

Every peer is tuned by the protocol of `harness.tuning`. The trust region has no trials: it runs
with the library's defaults, and tuning could only help it.

Reported runs have other seeds, and take turns of a few seconds, so that whatever else the machine
does slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.runs import ALONE
from soframe.experiments.config import ClockName, OptimizerName, RunConfig
from soframe.experiments.records import RunRecord
from soframe.experiments.train import Run, numerics
from soframe.experiments.tuning import TUNING_SEED, configure, load

#: Where the outcomes of tuning are kept.
FOLDER = Path(__file__).parent / "tuned"

TRUST_REGION: OptimizerName = "trust-region"

#: What the table's ratios refer to, besides the best peer.
BASELINE: OptimizerName = "adamw"

SCRIPT = "benchmarks/time_to_target.py"


@dataclass(frozen=True)
class Benchmark:
    """A workload and what is asked of it.

    Attributes:
        workload: Its name.
        targets: Losses to reach, descending.
        seconds: Of training, for each reported run.
        tuning_seconds: Likewise, for a trial of the last rung.
        evaluate_every: Steps between evaluations of the peers.
        trust_region_evaluate_every: Likewise of the trust region, whose steps are longer.
    """

    workload: str
    targets: tuple[float, ...]
    seconds: float
    tuning_seconds: float
    evaluate_every: int = 25
    trust_region_evaluate_every: int = 5


BENCHMARKS = {
    benchmark.workload: benchmark
    for benchmark in (
        Benchmark("curves", (0.5, 0.4, 0.3), seconds=60.0, tuning_seconds=50.0),
        Benchmark("digits-autoencoder", (0.05, 0.02, 0.01), seconds=30.0, tuning_seconds=24.0),
        Benchmark("byte-gpt", (2.5, 2.4), seconds=60.0, tuning_seconds=50.0, evaluate_every=20),
    )
}


def configuration(
    benchmark: Benchmark,
    optimizer: OptimizerName,
    *,
    seconds: float,
    seed: int,
    clock: ClockName = "wall",
    threads: int = 1,
    folder: Path = FOLDER,
    target: float | None = None,
) -> RunConfig:
    """A reported run: of the settings that tuning chose, or of the trust region's defaults.

    Args:
        benchmark: The workload and its targets.
        optimizer: The optimizer.
        seconds: Of training.
        seed: Of the run.
        clock: Whose seconds.
        threads: Of torch.
        folder: Where the outcomes of tuning are.
        target: The settings of the trial that was there first, and the end of the run; None for
            those of the trial that got furthest.

    Returns:
        The configuration.

    Raises:
        ValueError: If the seed is the one that settings were tuned on, or the target none of the
            benchmark's.
    """
    if seed == TUNING_SEED:
        raise ValueError(f"seed {seed} is the one that settings were tuned on: choose another")
    settings: Mapping[str, Any] = {"lr": 1.0}
    if optimizer != TRUST_REGION:
        command = f"python {SCRIPT} {benchmark.workload} --tune --optimizers {optimizer}"
        tuned = load(benchmark.workload, optimizer, folder, command=command)
        settings = (tuned.best if target is None else tuned.soonest(target)).settings
    fields: dict[str, Any] = {"seconds": seconds, "seed": seed, "clock": clock, "threads": threads}
    if target is not None:
        fields["targets"] = tuple(own for own in benchmark.targets if own >= target)
    return _configure(benchmark, optimizer, settings, **fields)


def _configure(
    benchmark: Benchmark, optimizer: OptimizerName, settings: Mapping[str, Any], **fields: Any
) -> RunConfig:
    own = optimizer == TRUST_REGION
    every = benchmark.trust_region_evaluate_every if own else benchmark.evaluate_every
    return configure(
        benchmark.workload,
        optimizer,
        settings,
        **{"targets": benchmark.targets, "evaluate_every": every, **fields},
    )


def race(
    configs: Sequence[RunConfig],
    *,
    turn: float = 2.0,
    on_turn: Callable[[Sequence[RunRecord]], None] = lambda records: None,
) -> list[RunRecord]:
    """Trains in this process, one run at a time, taking turns.

    Args:
        configs: The runs, with the same number of threads.
        turn: Seconds of training after which the next one goes on.
        on_turn: Told of all runs after everyone had a turn.

    Returns:
        One record for each run.

    Raises:
        ValueError: If the turn is not positive, or the numbers of threads differ.
    """
    if turn <= 0:
        raise ValueError(f"a turn must take a positive time, not {turn:g} s")
    threads = {config.threads for config in configs}
    if len(threads) != 1:
        raise ValueError(f"runs that are compared have one number of threads, not {threads}")
    with numerics(threads.pop()):
        runs = [Run(ALONE, config) for config in configs]
        while not all(run.finished() for run in runs):
            for run in runs:
                run.advance(run.rows[-1].seconds + turn)
            on_turn([run.record() for run in runs])
        for run in runs:
            run.close()
        return [run.record() for run in runs]
