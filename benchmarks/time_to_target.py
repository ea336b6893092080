"""Time to target: soframe's trust region, untuned, against tuned peers.

    python -m benchmarks.time_to_target                  # report: stored settings, seeds 0, 1, 2
    python -m benchmarks.time_to_target curves --quick   # a first impression in a minute
    python -m benchmarks.time_to_target --tune           # tune the peers anew, then report
    python -m benchmarks.time_to_target curves --target 0.5   # peers as tuned for 0.5

Every peer is tuned by the protocol of `experiments.tuning`. The trust region has no trials: it runs
with the library's defaults, and tuning could only help it. Reported runs have other seeds, and take
turns of a few seconds, so that other work on the machine slows all of them alike. The report prints
a table for each workload, and writes JSON and plots to `--output`.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments import display, tuning
from experiments.config import RunConfig
from experiments.display import console, run_command
from experiments.records import RunRecord, write_json
from experiments.runs import race
from experiments.workloads import workload

TRUST_REGION = "trust-region"
PEERS = ("sgd", "adamw", "soap", "muon", "shampoo")
BASELINE = "adamw"  # the denominator of ratios, beside the best peer
TUNED = tuning.FOLDER / "time-to-target.json"

#: The workloads by default; the transformer is where the trust region gains nothing.
DEFAULT = ("curves", "digits-autoencoder")
QUICK = 0.2
THREADS = 2  # networks as small as these gain nothing from more


@dataclass(frozen=True)
class Benchmark:
    """A workload's targets, and the seconds of training of a reported run and of a trial.

    Attributes:
        targets: Losses to reach, descending.
        seconds: Of training, for each reported run.
        tuning_seconds: Of training, for each trial.
        evaluate_every: Steps between evaluations of the peers.
        trust_region_evaluate_every: Steps between evaluations of the trust region, which are
            longer.
        weight_decay: Choices of tuning: where the loss is one on held-out data, weights may decay.
    """

    targets: tuple[float, ...]
    seconds: float
    tuning_seconds: float
    evaluate_every: int = 25
    trust_region_evaluate_every: int = 5
    weight_decay: tuple[float, ...] = (0.0,)


BENCHMARKS = {
    "curves": Benchmark((0.5, 0.4, 0.3), seconds=60.0, tuning_seconds=50.0),
    "digits-autoencoder": Benchmark((0.05, 0.02, 0.01), seconds=30.0, tuning_seconds=24.0),
    "byte-gpt": Benchmark(
        (2.5, 2.4), 60.0, tuning_seconds=50.0, evaluate_every=20, weight_decay=(0.0, 0.1)
    ),
}


def configuration(
    name: str, optimizer: str, *, target: float | None, tuned: Path, **fields: Any
) -> RunConfig:
    """Return a reported run: of the settings that tuning chose, or of the trust region's defaults.

    With a target it has the settings of the trial that was there first, and ends there.
    """
    tuning.require_other_seed(fields["seed"])
    benchmark, settings = BENCHMARKS[name], {"lr": 1.0}
    every = benchmark.trust_region_evaluate_every
    if optimizer != TRUST_REGION:
        outcome, every = tuning.load(tuned, name, optimizer), benchmark.evaluate_every
        settings = dict((outcome.best if target is None else outcome.soonest(target)).settings)
    lowest = min(benchmark.targets) if target is None else target
    targets = tuple(own for own in benchmark.targets if own >= lowest)
    fields = {"targets": targets, "evaluate_every": every, **fields}
    return tuning.configure(name, optimizer, settings, **fields)


def tune(name: str, optimizer: str, trials: int, seconds: float | None, path: Path) -> None:
    """Search for a peer's settings, and keep every trial."""
    benchmark = BENCHMARKS[name]
    print(f"{name}, {optimizer}", flush=True)
    outcome = tuning.tune(
        name,
        optimizer,
        targets=benchmark.targets,
        seconds=seconds or benchmark.tuning_seconds,
        trials=trials,
        space={**tuning.SPACES[optimizer], "weight_decay": list(benchmark.weight_decay)},
        evaluate_every=benchmark.evaluate_every,
    )
    outcome.save(path, name, optimizer)
    print(f"  best: {outcome.best}", flush=True)


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds; infinite where a run did not get there."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        # Of infinities and numbers, the lower of the two in the middle would be a gift.
        return cls(statistics.median_high(values), min(values), max(values))

    def show(self, digits: int) -> str:
        median, low, high = (
            f"{value:.{digits}f}" if math.isfinite(value) else "never"
            for value in (self.median, self.low, self.high)
        )
        return median if low == high else f"{median} ({low}-{high})"


@dataclass(frozen=True)
class Line:
    """One optimizer and one target, over the seeds.

    Attributes:
        optimizer: Its name.
        label: Its name in tables.
        target: The loss to reach.
        reached: The number of runs that reached it.
        steps: To the target.
        seconds: To the target.
        milliseconds_per_step: The mean over a run, as a median over the seeds.
        best_loss: The lowest loss of a run, as a median over the seeds.
        trained: The seconds of a run, as a median over the seeds.
        against_baseline: The baseline's median seconds over this one's; with ``>`` if it did not
            get there, for the seconds that it spent in vain.
        against_peer: The seconds of the fastest peer over this one's.
        steps_against_peer: The same ratio, in steps.
    """

    optimizer: str
    label: str
    target: float
    reached: int
    steps: Spread
    seconds: Spread
    milliseconds_per_step: float
    best_loss: float
    trained: float
    against_baseline: str = "-"
    against_peer: str = "-"
    steps_against_peer: str = "-"

    @classmethod
    def of(cls, records: Sequence[RunRecord], target: float) -> Line:
        rows = [record.reached(target) for record in records]
        last = [record.last for record in records]
        each = [1e3 * row.seconds / max(row.step, 1) for row in last]
        return cls(
            optimizer=records[0].config.optimizer,
            label=records[0].label,
            target=target,
            reached=sum(row is not None for row in rows),
            steps=Spread.of([row.step if row else math.inf for row in rows]),
            seconds=Spread.of([row.seconds if row else math.inf for row in rows]),
            milliseconds_per_step=statistics.median(each),
            best_loss=statistics.median(record.best_loss for record in records),
            trained=statistics.median(row.seconds for row in last),
        )

    @property
    def there(self) -> bool:
        """Whether the median run reached the target."""
        return math.isfinite(self.seconds.median)

    def against(self, other: Line | None) -> str:
        """Return the other's seconds over this one's."""
        if other is None or not self.there:
            return "-"
        seconds = other.seconds.median if other.there else other.trained
        return f"{'' if other.there else '>'}{seconds / max(self.seconds.median, 1e-9):.2f}"

    def cells(self, seeds: int) -> list[str]:
        """Return the cells of a table behind the target's."""
        if self.there:
            shown = [self.steps.show(0), self.seconds.show(1)]
        else:
            share = f", {self.reached} of {seeds} did" if self.reached else ""
            shown = ["not reached", f"{self.best_loss:.3g} after {self.trained:.0f} s{share}"]
        ratios = [self.against_baseline, self.against_peer, self.steps_against_peer]
        return [self.label, *shown, f"{self.milliseconds_per_step:.1f}", *ratios]


def best_peer(lines: Sequence[Line]) -> Line | None:
    """Return the optimizer other than the trust region that reaches a target first, or None."""
    there = [line for line in lines if line.optimizer != TRUST_REGION and line.there]
    return min(there, key=lambda line: line.seconds.median, default=None)


def compared(lines: Sequence[Line]) -> list[Line]:
    """Add the ratios to the lines of one target."""
    baseline = next((line for line in lines if line.optimizer == BASELINE), None)
    peers = [line for line in lines if line.optimizer != TRUST_REGION]
    peer, longest = best_peer(lines), max(peers, key=lambda line: line.trained, default=None)
    made = []
    for line in lines:
        steps = "-"
        if peer is not None and line.there:
            steps = f"{peer.steps.median / max(line.steps.median, 1):.2f}"
        ratios = {
            "against_baseline": line.against(baseline),
            "against_peer": line.against(peer or longest),
        }
        made.append(replace(line, steps_against_peer=steps, **ratios))
    return made


def report(records: Sequence[RunRecord]) -> list[Line]:
    """Return a line for each target and optimizer of a workload's runs.

    Raises:
        ValueError: If seeds or budgets differ between optimizers.
    """
    runs: dict[str, list[RunRecord]] = {}
    for record in records:
        runs.setdefault(record.config.optimizer, []).append(record)
    seeds = {tuple(sorted(r.config.seed for r in of)) for of in runs.values()}
    budgets = {r.config.seconds for r in records}
    if len(seeds) != 1 or len(budgets) != 1:
        raise ValueError(f"runs to compare differ: seeds {seeds}, budgets {budgets}")
    lines = []
    for target in records[0].targets:
        lines += compared([Line.of(of, target) for of in runs.values()])
    return lines


def sentences(lines: Sequence[Line], budget: float) -> list[str]:
    """Return the trust region against the best peer, for each target, in words."""
    said = []
    for own in (line for line in lines if line.optimizer == TRUST_REGION):
        peer = best_peer([line for line in lines if line.target == own.target])
        start = f"To {own.target:g}: {own.label}"
        if not own.there:
            said.append(f"{start} did not get there in {budget:g} s.")
        elif peer is None:
            rest = f"no other optimizer got there in {budget:g} s."
            said.append(f"{start} {own.seconds.median:.1f} s; {rest}")
        else:
            said.append(
                f"{start} {own.seconds.median:.1f} s and {own.steps.median:g} steps; the fastest "
                f"other, {peer.label}, {peer.seconds.median:.1f} s and {peer.steps.median:g} "
                f"steps: {own.against_peer} times as long."
            )
    return said


def show(name: str, records: Sequence[RunRecord], output: Path) -> None:
    """Print a workload's table, and write its figures and plots."""
    lines, config, problem = report(records), records[0].config, workload(name)
    seeds = len({record.config.seed for record in records})
    ratios = ("time of AdamW\n/ this", "of best peer\n/ this", "its steps\n/ this")
    rows = []
    for before, line in zip([None, *lines], lines, strict=False):
        first = before is None or before.target != line.target
        rows.append([f"{line.target:g}" if first else "", *line.cells(seeds)])
    title = f"{problem.title}: {problem.loss_name}; median (least-greatest) of {seeds} seed(s)"
    columns = ("to", "optimizer", "steps", "seconds", "ms/\nstep", *ratios)
    screen = console(width=140)
    screen.print(display.table(title, columns, rows, left=2))
    said = sentences(lines, config.seconds or math.inf)
    for sentence in said:
        screen.print(sentence, highlight=False)
    shown = []
    for record in records:
        origin = "untuned" if record.config.optimizer == TRUST_REGION else "tuned by trials"
        shown.append(replace(record, settings_from=origin))
    figure = display.loss_curves(problem, shown, targets=records[0].targets)
    for suffix in ("png", "svg"):
        display.save(figure, output / f"{name}.{suffix}")
    where = {
        "processor": display.processor(),
        "cores": os.cpu_count(),
        "threads": config.threads,
        "clock": config.clock,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    content: dict[str, Any] = {"workload": name, "where": where, "summary": said}
    content["lines"] = [asdict(line) for line in lines]
    content["runs"] = [record.as_dict() for record in records]
    write_json(output / f"{name}.json", content)
    screen.print(f"{output / name}.json, .png, .svg", soft_wrap=True)


def main(
    workloads: Annotated[
        list[str] | None, typer.Argument(help=f"From: {', '.join(BENCHMARKS)}.")
    ] = None,
    optimizers: Annotated[
        str, typer.Option(help="Separated by commas.")
    ] = f"{TRUST_REGION},{','.join(PEERS)}",
    tune_first: Annotated[bool, typer.Option("--tune", help="Tune the peers first.")] = False,
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
    tuned: Annotated[Path, typer.Option(help="Where settings are kept.")] = TUNED,
) -> None:
    """Train until targets are reached, and print the times."""
    names = optimizers.split(",")
    if unknown := [name for name in names if name not in (TRUST_REGION, *PEERS)]:
        raise typer.BadParameter(f"no optimizer {unknown[0]!r} here")
    if unknown := [name for name in workloads or () if name not in BENCHMARKS]:
        raise typer.BadParameter(f"no workload {unknown[0]!r} here")
    fields: dict[str, Any] = {"clock": "cpu" if cpu_clock else "wall"}
    # Processor time counts all threads.
    fields["threads"] = threads or (1 if cpu_clock else min(THREADS, torch.get_num_threads()))
    for name in workloads or DEFAULT:
        if tune_first or tune_only:
            for optimizer in (own for own in PEERS if own in names):
                tune(name, optimizer, trials, seconds, tuned)
        if tune_only:
            continue
        fields["seconds"] = (seconds or BENCHMARKS[name].seconds) * (QUICK if quick else 1.0)
        records = []
        for seed in [int(seed) for seed in seeds.split(",")][: 1 if quick else None]:
            configs = [
                configuration(name, optimizer, target=target, tuned=tuned, seed=seed, **fields)
                for optimizer in (TRUST_REGION, *PEERS)
                if optimizer in names
            ]
            if published_muon:
                configs = [
                    one.but(options={**one.options, "published": True})
                    if one.optimizer == "muon"
                    else one
                    for one in configs
                ]
            records += race(configs, turn=turn)
            print(f"{name}, seed {seed}: done", flush=True)
        show(name, records, output)


if __name__ == "__main__":
    run_command(main)
