"""Time to target: the trust region, as it comes, against tuned peers.

Every peer gets the same number of trials on a seed of its own: a Latin hypercube of settings, by
successive halving (Jamieson and Talwalkar, 2016). Each rung trains the best settings of the last
one anew, for longer. Where the schedule is a cosine, it ends with the rung, so that the rungs are
also a search over its length. The winner is the setting that gets furthest down the targets, and
there the soonest, in whichever rung. The trust region has no trials: it runs with the library's
defaults, and tuning could only help it.

Reported runs have other seeds, and take turns of a few seconds, so that whatever else the machine
does slows all of them alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.search import SPACES, WEIGHT_DECAY, Choice, Range
from soframe.experiments import outcomes
from soframe.experiments.config import ClockName, OptimizerName, RunConfig
from soframe.experiments.launch import Worker
from soframe.experiments.records import RunRecord
from soframe.experiments.train import Run, numerics, train
from soframe.experiments.tuning import TUNING_SEED, configure

#: Where the outcomes of tuning are kept.
FOLDER = Path(__file__).parent / "tuned"

TRUST_REGION: OptimizerName = "trust-region"

#: What the table's ratios refer to, besides the best peer.
BASELINE: OptimizerName = "adamw"

_ALONE = Worker(rank=0, world_size=1, send=lambda message: None)

#: The part of a trial's budget in which its steps are timed, to know how many a cosine may have.
_TIMING = 0.1


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


@dataclass(frozen=True)
class Protocol:
    """How the peers are tuned on a workload: the same for each of them.

    Attributes:
        workload: The name of the workload.
        targets: Losses to reach, descending.
        seconds: Of training, for a trial of the last rung; of processor time, which a busy machine
            stretches less.
        rungs: How many trials, and each one's share of the seconds.
        seed: Of the trials' runs and of the search.
    """

    workload: str
    targets: tuple[float, ...]
    seconds: float
    rungs: tuple[tuple[int, float], ...] = ((8, 0.25), (4, 0.5), (1, 1.0))
    seed: int = TUNING_SEED


@dataclass(frozen=True)
class Trial:
    """One setting, trained for one rung.

    Attributes:
        draw: Which of the drawn settings it is.
        budget: Seconds of training.
        settings: Fields of `RunConfig`; names with a dot are arguments of the optimizer.
        reached: How many of the targets.
        seconds: To the lowest of those; None if there is none.
        step: Likewise, in steps.
        loss: The lowest loss.
    """

    draw: int
    budget: float
    settings: Mapping[str, Any]
    reached: int
    seconds: float | None
    step: int | None
    loss: float

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts trials, the best first."""
        if self.seconds is not None:
            return (-self.reached, self.seconds)
        return (0, self.loss if math.isfinite(self.loss) else math.inf)


@dataclass(frozen=True)
class Tuned:
    """The outcome for one peer on one workload.

    Attributes:
        protocol: How it was found.
        optimizer: Of what.
        trials: All of them, the best first.
    """

    protocol: Protocol
    optimizer: OptimizerName
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial that was chosen."""
        return self.trials[0]

    def soonest(self, target: float) -> Trial:
        """The trial that was at a target first, as far as is known.

        Args:
            target: One of the protocol's.

        Returns:
            Of those that were there the one that needed least time to its lowest target; if there
            is none, the best.

        Raises:
            ValueError: If the target is another one.
        """
        if target not in self.protocol.targets:
            raise ValueError(f"no target {target:g}, but {self.protocol.targets}")
        wanted = self.protocol.targets.index(target) + 1
        there = [trial for trial in self.trials if trial.reached >= wanted]
        return min(there, key=lambda trial: trial.seconds or math.inf, default=self.best)

    def save(self, folder: Path = FOLDER) -> Path:
        """Writes the outcome as JSON.

        Args:
            folder: Where; made if needed.

        Returns:
            The path of the file.
        """
        return outcomes.write(folder, self.protocol.workload, self.optimizer, self)


def load(workload_name: str, optimizer: str, folder: Path = FOLDER) -> Tuned:
    """Reads an outcome.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.
        folder: Where the outcomes are.

    Returns:
        The outcome.

    Raises:
        FileNotFoundError: If that optimizer was never tuned on that workload.
    """
    script = "benchmarks/time_to_target.py"
    command = f"python {script} {workload_name} --tune --optimizers {optimizer}"
    fields = outcomes.read(folder, workload_name, optimizer, command)
    protocol = dict(fields["protocol"])
    protocol["targets"] = tuple(protocol["targets"])
    protocol["rungs"] = tuple((count, share) for count, share in protocol["rungs"])
    return Tuned(
        protocol=Protocol(**protocol),
        optimizer=fields["optimizer"],
        trials=tuple(Trial(**trial) for trial in fields["trials"]),
    )


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
        tuned = load(benchmark.workload, optimizer, folder)
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


def draw(optimizer: OptimizerName, protocol: Protocol) -> list[dict[str, Any]]:
    """The settings that the first rung tries: the same for the same seed.

    Args:
        optimizer: Whose search space to draw from.
        protocol: How many, and the seed.

    Returns:
        Settings, with a name in the place of the schedule's length.
    """
    generator = random.Random(f"{protocol.seed} {protocol.workload} {optimizer}")
    space: dict[str, Range | Choice] = dict(SPACES[optimizer])
    if protocol.workload in WEIGHT_DECAY:
        space["weight_decay"] = WEIGHT_DECAY[protocol.workload]
    count, _ = protocol.rungs[0]
    columns = {name: values.draws(generator, count) for name, values in space.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def tune(
    optimizer: OptimizerName,
    protocol: Protocol,
    benchmark: Benchmark,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Runs the protocol for one peer.

    Args:
        optimizer: What to tune.
        protocol: How.
        benchmark: On what.
        on_trial: Called after each trial.

    Returns:
        The outcome.
    """
    drawn = draw(optimizer, protocol)
    survivors = list(range(len(drawn)))
    trials: list[Trial] = []
    for count, share in protocol.rungs:
        budget = share * protocol.seconds
        rung: list[Trial] = []
        for index in survivors[:count]:
            fields = {"seconds": budget, "seed": protocol.seed, "clock": "cpu"}
            settings = _timed(benchmark, optimizer, drawn[index], fields)
            record = train(_ALONE, _configure(benchmark, optimizer, settings, **fields))
            rung.append(judge(index, budget, settings, record))
            on_trial(rung[-1])
        trials += rung
        survivors = [trial.draw for trial in sorted(rung, key=lambda trial: trial.rank)]
    return Tuned(protocol, optimizer, tuple(sorted(trials, key=lambda trial: trial.rank)))


def _timed(
    benchmark: Benchmark,
    optimizer: OptimizerName,
    drawn: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Replaces the name of a schedule by its length: the steps that fit in the budget."""
    settings = {name: value for name, value in drawn.items() if name != "schedule"}
    if drawn["schedule"] == "constant":
        return {**settings, "schedule_steps": None}
    trial = {**fields, "seconds": _TIMING * fields["seconds"], "stop_at_target": False}
    last = train(_ALONE, _configure(benchmark, optimizer, settings, **trial)).rows[-1]
    steps = fields["seconds"] / max(last.seconds, 1e-9) * last.step
    return {**settings, "schedule_steps": max(1, int(float(f"{steps:.2g}")))}


def judge(draw_index: int, budget: float, settings: Mapping[str, Any], record: RunRecord) -> Trial:
    """Reduces a run to what tuning compares.

    Args:
        draw_index: Which of the drawn settings it is.
        budget: Seconds of training.
        settings: As in `Trial.settings`.
        record: The run.

    Returns:
        The trial.
    """
    rows = [row for target in record.targets if (row := record.reached(target)) is not None]
    losses = [row.loss for row in record.rows if math.isfinite(row.loss)]
    return Trial(
        draw=draw_index,
        budget=budget,
        settings=settings,
        reached=len(rows),
        seconds=rows[-1].seconds if rows else None,
        step=rows[-1].step if rows else None,
        loss=min(losses) if losses else math.inf,
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
        runs = [Run(_ALONE, config) for config in configs]
        while not all(run.finished() for run in runs):
            for run in runs:
                run.advance(run.rows[-1].seconds + turn)
            on_turn([run.record() for run in runs])
        for run in runs:
            run.close()
        return [run.record() for run in runs]
