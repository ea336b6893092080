"""KAISA's table at the size of a laptop: steps and time to the quality of the tuned baseline.

    python -m benchmarks.applications                      # all, ten minutes of processor time
    python -m benchmarks.applications --only unet,bert     # some
    python -m benchmarks.applications --short              # a test of the command, below a minute

Pauloski et al. (SC 2021) train four applications with K-FAC until they are as good as the original
optimizer makes them. Here three recipes stand for three of them, `unet`, `detector` and
`bert_bytes`; the fourth, a ResNet, has a command of its own, `benchmarks.kaisa`.

Each contender tries as many learning rates, on a seed of its own and for the whole length. The
baseline is the first-order optimizer that ends best there. On three other seeds it trains for the
whole length, and its mean quality at the end is the target; and for four fifths of it, which shows
whether it would have been there sooner. K-FAC trains for ever longer parts of the length, each with
a schedule of that length, until its mean quality is the target; the steps to it are read off
between the last two. Columns:

- *equal batch*: steps, and processor time, which is steps times the time of a step. Contenders take
  turns of a few steps, over whole intervals of solves.
- *equal memory*: the baseline has the largest batch in K-FAC's bytes (weights, gradients, states,
  planned curvature, activations that autograd saves), as many samples, and a rate that grows with
  the batch.
- *ranks*: the quality at the end of runs, and the time of a step by the clock, on local processes
  over Gloo.
- *planned*: steps of the same network, larger, on 64 ranks of described hardware, with statistics
  every 10 steps and solves every 100. Nothing runs there.

Runs are lines of ``records.jsonl`` in ``--output``: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import itertools
import json
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from benchmarks import fixed_memory
from benchmarks.simulation import largest_batch
from experiments import display
from experiments.display import console, processor, table
from experiments.launch import Worker, launch
from experiments.libraries import MissingLibraryError
from experiments.recipes import common, loop
from experiments.recipes.common import Common
from experiments.records import jsonable, write_json
from experiments.runs import ratios, steps_to
from experiments.tuning import TUNING_SEED
from soframe.planning.hardware import Hardware
from soframe.planning.planner import Option, plan
from soframe.planning.task import Task
from soframe.planning.workloads import WORKLOADS
from soframe.strategies import CommOpt

SEEDS = (0, 1, 2)
PARTS = (0.4, 0.6, 0.8, 1.0)
"""Lengths of runs, of the baseline's."""
RANKS = (2, 4)
TURN, CYCLES = 5, 3
"""Steps of a turn, and intervals of solves that are timed."""
HARDWARE = "a100-ib"
PLANNED_RANKS = 64
DAY = 86400.0


@dataclass(frozen=True)
class Contender:
    """An optimizer of the table.

    Attributes:
        settings: Settings of the recipe.
        rates: The learning rates of tuning; as many for each contender.
        bound: soframe's bound of the KL clip, whatever the rate; None for its default.
    """

    settings: Mapping[str, Any]
    rates: tuple[float, ...]
    bound: float | None = None


@dataclass(frozen=True)
class Application:
    """A row of the table.

    Attributes:
        name: Its name in commands.
        title: Its name in tables.
        recipe: The module in `experiments.recipes`.
        quality: The figure that is compared.
        is_loss: Whether the lowest is the best.
        baselines: First-order optimizers by name.
        contenders: Those of soframe; the first is the one that is trained on several ranks.
        large: The network and a batch of inputs that are planned.
        changes: Settings of all its runs.
    """

    name: str
    title: str
    recipe: str
    quality: str
    is_loss: bool
    baselines: Mapping[str, Contender]
    contenders: Mapping[str, Contender]
    large: Callable[[], Task]
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> Any:
        """The recipe."""
        return importlib.import_module(f"experiments.recipes.{self.recipe}")

    @property
    def whole(self) -> Common:
        """The settings of the recipe."""
        settings: Common = self.module.Settings(**self.changes)
        return settings

    def contender(self, name: str) -> Contender:
        return {**self.baselines, **self.contenders}[name]

    def error(self, quality: float) -> float:
        """Return a number that is the smaller, the better the quality."""
        return quality if self.is_loss else 1 - quality


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        application: The application.
        contender: The contender.
        rate: Its learning rate.
        steps: The steps.
        batch: Samples of a step over all ranks.
        seed: The seed.
        ranks: The number of ranks.
    """

    application: str
    contender: str
    rate: float
    steps: int
    batch: int
    seed: int
    ranks: int = 1

    @property
    def module(self) -> Any:
        """The recipe."""
        return APPLICATIONS[self.application].module

    def settings(self, output: Path) -> Common:
        """Return the settings of the recipe."""
        application = APPLICATIONS[self.application]
        contender = application.contender(self.contender)
        chosen = dict(contender.settings)
        if contender.bound is not None:
            chosen["kl_clip"] = contender.bound * self.rate**2  # a recipe bounds whole steps
        return replace(
            application.whole,
            **chosen,
            lr=self.rate,
            steps=self.steps,
            batch_size=self.batch,
            seed=self.seed,
            processes=self.ranks,
            evaluate_every=self.steps,
            save_every=self.steps,
            device="cpu",
            tensorboard=False,
            resume=True,
            output=output,
        )


# -- applications ----------------------------------------------------------------------------------


def _large(name: str, inputs: tuple[int, ...], **changes: Any) -> Task:
    module = importlib.import_module(f"experiments.recipes.{name}")
    with torch.device("meta"):
        model = module.model(module.Settings(**changes))
    return Task.of(model, (torch.empty(inputs, device="meta"),), method="kfac")


def _bert_large() -> Task:
    workload = WORKLOADS["bert-large"]
    return Task.of(workload.model(), workload.inputs(64), method="kfac")


def first_order(name: str, *rates: float) -> Contender:
    """Return SGD or AdamW."""
    return Contender({"optimizer": name}, rates)


def preconditioned(*rates: float, bound: float | None = None) -> Contender:
    """Return K-FAC in front of AdamW, with the recipe's damping and intervals."""
    return Contender({"optimizer": "soframe", "method": "kfac", "base": "adamw"}, rates, bound)


APPLICATIONS: Mapping[str, Application] = {
    "unet": Application(
        name="unet",
        title="U-Net, segmentation",
        recipe="unet",
        quality="dice",
        is_loss=False,
        baselines={
            "SGD": first_order("sgd", 0.03, 0.1, 0.3, 1.0),
            "AdamW": first_order("adamw", 3e-3, 1e-2, 3e-2, 0.1),
        },
        contenders={"K-FAC": preconditioned(3e-3, 1e-2, 3e-2, 0.1, bound=0.4)},
        large=partial(_large, "unet", (8, 1, 256, 256), width=32),
    ),
    "detector": Application(
        name="detector",
        title="Detector",
        recipe="detector",
        quality="f1",
        is_loss=False,
        baselines={
            "SGD": first_order("sgd", 0.01, 0.03, 0.1, 0.3),
            "AdamW": first_order("adamw", 3e-3, 1e-2, 3e-2, 0.1),
        },
        contenders={"K-FAC": preconditioned(3e-3, 1e-2, 3e-2, 0.1, bound=0.4)},
        large=partial(_large, "detector", (8, 1, 256, 256), width=64),
    ),
    "bert": Application(
        name="bert",
        title="BERT, masked bytes",
        recipe="bert_bytes",
        quality="loss",
        is_loss=True,
        baselines={"AdamW": first_order("adamw", 1e-3, 3e-3, 1e-2, 3e-2)},
        contenders={"K-FAC": preconditioned(1e-3, 3e-3, 1e-2, 3e-2)},
        large=_bert_large,
    ),
}


# -- runs ------------------------------------------------------------------------------------------


@dataclass
class Records:
    """The runs of a folder, one line each.

    Attributes:
        folder: The folder.
        pool: Processes that train runs of one rank.
    """

    folder: Path
    pool: Pool

    def __post_init__(self) -> None:
        self.path = self.folder / "records.jsonl"
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        # A benchmark that was killed may have left a part of a line.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        if lines and "".join(lines) != text:
            self.path.write_text("".join(lines), encoding="utf-8")
        self.figures = {Job(**row["job"]): row["figures"] for row in map(json.loads, lines)}

    def quality(self, job: Job) -> float:
        """Return the figure that the job's application is compared by."""
        value = self.figures[job][APPLICATIONS[job.application].quality]
        return math.nan if value is None else float(value)

    def complete(self, jobs: Sequence[Job]) -> None:
        """Train the runs that are missing.

        Raises:
            KeyboardInterrupt: If a run was interrupted; the next call goes on with it.
        """
        missing = [job for job in dict.fromkeys(jobs) if job not in self.figures]
        alone = [(job, self.folder) for job in missing if job.ranks == 1]
        together = [(job, self.folder) for job in missing if job.ranks > 1]
        ended = itertools.chain(
            self.pool.imap_unordered(trained, alone), (trained(pair) for pair in together)
        )
        columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
        screen = console(to_stderr=True)
        quiet = not screen.is_terminal
        with Progress(*columns, TimeRemainingColumn(), console=screen, disable=quiet) as shown:
            task = shown.add_task("", total=len(missing))
            for job, figures in ended:
                if figures is None:
                    raise KeyboardInterrupt
                self._keep(job, figures)
                text = f"{job.application}, {job.contender}, {job.rate:g}, {job.steps} steps"
                shown.update(task, description=text, advance=1)
                if quiet:
                    print(f"{text}: {self.quality(job):.4f}", file=sys.stderr, flush=True)

    def _keep(self, job: Job, figures: Mapping[str, float]) -> None:
        self.figures[job] = row = jsonable(dict(figures))
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": asdict(job), "figures": row}) + "\n")


def trained(pair: tuple[Job, Path]) -> tuple[Job, Mapping[str, float] | None]:
    """Train in a folder of a job's own within another.

    Returns:
        The job, and the figures of the last evaluation; None if the run was interrupted.
    """
    job, folder = pair
    application = APPLICATIONS[job.application]
    name = hashlib.sha256(json.dumps(asdict(job)).encode()).hexdigest()[:16]
    output = folder / "running" / name
    start = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = loop.run(application.module, job.settings(output))
    except loop.DivergedError:
        shutil.rmtree(output)
        return job, {application.quality: math.nan}
    except KeyboardInterrupt:  # before the first step
        return job, None
    if not outcome.finished:
        return job, None
    shutil.rmtree(output)
    return job, {**outcome.figures, "processor_seconds": time.process_time() - start}


def turns(worker: Worker, jobs: Sequence[Job], cycles: int) -> list[list[float]]:
    """Time the steps of several runs, which take turns.

    Returns:
        For each run the mean seconds of a step, cycle by cycle: processor time on one rank, else
        time by the clock.
    """
    clock = time.process_time if worker.world_size == 1 else time.perf_counter
    period = max(job.settings(Path()).solve_every or TURN for job in jobs)
    steps = [stepper(job.module, job.settings(Path()), worker) for job in jobs]
    times: list[list[float]] = in_turns(steps, [clock], period, cycles)[:, :, 0].T.tolist()
    return times


def in_turns(
    steps: Sequence[Callable[[], None]],
    meters: Sequence[Callable[[], float]],
    period: int,
    cycles: int,
) -> npt.NDArray[np.float64]:
    """Let several runs take turns of a few steps, and read meters before and after each turn.

    Args:
        steps: Functions that take a step of a run.
        meters: Functions that read what steps increase, as a clock does.
        period: Steps of a run in a cycle.
        cycles: The number of cycles.

    Returns:
        What a step adds to each meter in the mean, `(cycles, runs, meters)`.
    """

    for step in steps:
        for _ in range(TURN):
            step()  # warms up, and solves for the first time
    added = np.zeros((cycles, len(steps), len(meters)))
    for cycle in range(cycles):
        for _ in range(period // TURN):
            for index, step in enumerate(steps):
                if dist.is_initialized():
                    dist.barrier()
                before = np.array([meter() for meter in meters])
                for _ in range(TURN):
                    step()
                added[cycle, index] += np.array([meter() for meter in meters]) - before
    return added / (period // TURN * TURN)


def stepper(module: Any, settings: Common, worker: Worker) -> Callable[[], None]:
    """Return a function that takes a step of a recipe on this rank's part of a batch."""
    model = built(module, settings)
    batches = itertools.cycle(samples(module, settings, worker))
    make = getattr(module, "optimizer", common.optimizer)
    optimizer, preconditioner = make(model, settings)
    forward = DistributedDataParallel(model) if worker.world_size > 1 else model

    def step() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        if preconditioner is not None and hasattr(module, "terms"):
            preconditioner.count(module.terms(*batch))
        module.loss(forward, *batch).backward()
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()

    return step


def built(module: Any, settings: Common) -> nn.Module:
    """Return the model of a recipe."""
    torch.manual_seed(settings.seed)
    model: nn.Module = module.model(settings)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def samples(module: Any, settings: Common, worker: Worker, batches: int = 4) -> list[list[Tensor]]:
    """Return this rank's part of a few batches of a recipe."""
    train, _ = module.data(settings)
    parts = []
    for first in range(0, batches * settings.batch_size, settings.batch_size):
        indices = range(first + worker.rank, first + settings.batch_size, worker.world_size)
        batch = default_collate([train[index % len(train)] for index in indices])
        if settings.channels_last:
            batch[0] = batch[0].contiguous(memory_format=torch.channels_last)
        parts.append(batch)
    return parts


# -- memory ----------------------------------------------------------------------------------------


def memory(job: Job) -> fixed_memory.Memory:
    """Count the bytes of one rank."""
    module, settings = job.module, job.settings(Path())
    model = built(module, settings)
    make = getattr(module, "optimizer", common.optimizer)
    optimizer, preconditioner = make(model, settings)
    curvature = (0, 0)
    if preconditioner is not None:
        placement = preconditioner.placement
        curvature = (placement.memory(0)["total"], placement.window(0))
        preconditioner.close()
    train, _ = module.data(settings)

    def loss(batch: int) -> Tensor:
        value: Tensor = module.loss(model, *default_collate([train[i] for i in range(batch)]))
        return value

    return fixed_memory.count(model, optimizer, loss, curvature=curvature)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Makes one row of the table.

    Attributes:
        application: The application.
        records: Its runs.
        seeds: Seeds of the reported runs.
        parts: Lengths, of the whole.
        ranks: Numbers of ranks beside one.
        cycles: Intervals of solves that are timed.
    """

    application: Application
    records: Records
    seeds: Sequence[int] = SEEDS
    parts: Sequence[float] = PARTS
    ranks: Sequence[int] = RANKS
    cycles: int = CYCLES

    def job(self, contender: str, rate: float, part: float = 1.0, **changes: Any) -> Job:
        """Return a run of a part of the whole length, by default of tuning."""
        whole = self.application.whole
        assert whole.steps is not None
        steps = max(1, round(part * whole.steps))
        job = Job(self.application.name, contender, rate, steps, whole.batch_size, TUNING_SEED)
        return replace(job, **changes)

    def tuned(self) -> dict[str, float]:
        """Return the best rate of every contender, after trying all."""
        every = {**self.application.baselines, **self.application.contenders}
        trials = {name: [self.job(name, rate) for rate in every[name].rates] for name in every}
        self.records.complete([job for jobs in trials.values() for job in jobs])
        return {name: min(jobs, key=self._error).rate for name, jobs in trials.items()}

    def _error(self, job: Job) -> float:
        error = self.application.error(self.records.quality(job))
        return math.inf if math.isnan(error) else error

    def baseline(self, rates: Mapping[str, float]) -> str:
        """Return the first-order optimizer that ended best in tuning."""
        names = self.application.baselines
        return min(names, key=lambda name: self._error(self.job(name, rates[name])))

    def row(self) -> dict[str, Any]:
        """Train and time everything that is missing, and return the figures."""
        rates = self.tuned()
        baseline = self.baseline(rates)
        names = [baseline, *self.application.contenders]
        whole = self.job(baseline, rates[baseline])
        ends = {baseline: self.ends(baseline, rates[baseline], self.parts[-2:])}
        target = statistics.mean(ends[baseline][whole.steps])
        for name in self.application.contenders:
            ends[name] = self.ends(name, rates[name], self.parts, target)
        times = self.times(names, rates, 1)
        contenders = {}
        for name in names:
            by_steps = ends[name]
            ratio, spread = ratios(times[name], times[baseline])
            steps = self.steps(target, by_steps)
            contenders[name] = {
                "rate": rates[name],
                "qualities": by_steps,
                "steps": steps,
                "at_most": steps == min(by_steps),
                "steps_ratio": None if steps is None else steps / whole.steps,
                "milliseconds": 1e3 * statistics.median(times[name]),
                "step_ratio": ratio,
                "step_ratio_spread": spread,
                "time_ratio": None if steps is None else ratio * steps / whole.steps,
            }
        row = {
            "title": self.application.title,
            "quality": self.application.quality,
            "baseline": baseline,
            "target": target,
            "seeds": list(self.seeds),
            "contenders": contenders,
            "tuning": self.trials(),
        }
        row["equal_memory"] = self.equal_memory(baseline, rates)
        row["ranks"] = self.on_ranks(baseline, rates, contenders)
        row["planned"] = self.planned(contenders)
        return row

    def ends(
        self, name: str, rate: float, parts: Sequence[float], target: float | None = None
    ) -> dict[int, list[float]]:
        """Train for ever longer parts until the mean quality is the target.

        Returns:
            Steps -> the quality of each seed at the end.
        """
        lengths = {
            part: [self.job(name, rate, part, seed=seed) for seed in self.seeds] for part in parts
        }
        if target is None:
            self.records.complete([job for jobs in lengths.values() for job in jobs])
        ends: dict[int, list[float]] = {}
        for jobs in lengths.values():
            self.records.complete(jobs)
            ends[jobs[0].steps] = qualities = [self.records.quality(job) for job in jobs]
            error = self.application.error(statistics.mean(qualities))
            if target is not None and error <= self.application.error(target):
                break
        return ends

    def trials(self) -> dict[str, dict[str, float]]:
        """Return the quality of every rate that was tried."""
        every = {**self.application.baselines, **self.application.contenders}
        return {
            name: {
                f"{rate:g}": self.records.quality(self.job(name, rate))
                for rate in every[name].rates
            }
            for name in every
        }

    def steps(self, target: float, by_steps: Mapping[int, Sequence[float]]) -> float | None:
        """Return the steps to a quality; None if no length ends with it."""
        errors = {
            steps: self.application.error(statistics.mean(values))
            for steps, values in by_steps.items()
        }
        return steps_to(self.application.error(target), errors)

    def times(
        self, names: Sequence[str], rates: Mapping[str, float], ranks: int
    ) -> dict[str, list[float]]:
        """Return the mean seconds of a step for each contender and cycle."""
        jobs = [self.job(name, rates[name], ranks=ranks) for name in names]
        return dict(zip(names, self._timed(jobs, ranks), strict=True))

    def _timed(self, jobs: Sequence[Job], ranks: int) -> list[list[float]]:
        key = json.dumps([[asdict(job) for job in jobs], self.cycles], sort_keys=True)
        path = self.records.folder / f"times-{self.application.name}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if key not in known:
            known[key] = launch(turns, ranks, timeout=DAY)(jobs, self.cycles)[0]
            write_json(path, known)
        times: list[list[float]] = known[key]
        return times

    def equal_memory(self, baseline: str, rates: Mapping[str, float]) -> dict[str, Any]:
        """Train the baseline with the largest batch in the bytes of the first contender."""
        contender = next(iter(self.application.contenders))
        job, whole = self.job(contender, rates[contender]), self.job(baseline, rates[baseline])
        larger, smaller = memory(job), memory(whole)
        cap = larger.at(job.batch)
        batch = largest_batch(cap, smaller.fixed, smaller.per_sample)
        steps = max(1, round(whole.steps * whole.batch / batch))
        rate = float(f"{rates[baseline] * batch / whole.batch:.3g}")
        base = replace(whole, batch=batch, steps=steps, rate=rate)
        runs = [replace(base, seed=seed) for seed in self.seeds]
        self.records.complete(runs)
        target = statistics.mean(self.records.quality(run) for run in runs)
        by_steps = self.ends(contender, rates[contender], self.parts, target)
        reached = self.steps(target, by_steps)
        times, base_times = self._timed([job, base], 1)
        ratio, spread = ratios(times, base_times)
        return {
            "bytes": cap,
            "bytes_of_baseline_at_equal_batch": smaller.at(whole.batch),
            "curvature": larger.curvature + larger.window,
            "batch": batch,
            "rate": rate,
            "target": target,
            "steps_of_baseline": steps,
            "steps": reached,
            "at_most": reached == min(by_steps),
            "step_ratio": ratio,
            "step_ratio_spread": spread,
            "time_ratio": None if reached is None else ratio * reached / steps,
        }

    def on_ranks(
        self, baseline: str, rates: Mapping[str, float], contenders: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Train on several ranks, and time steps there."""
        name = next(iter(self.application.contenders))
        steps = contenders[name]["steps"]
        whole = self.job(baseline, rates[baseline]).steps
        part = next((p for p in self.parts if steps and p * whole >= steps), max(self.parts))
        jobs = [self.job(baseline, rates[baseline]), self.job(name, rates[name], part)]
        rows = []
        for ranks in (1, *self.ranks):
            qualities = []
            for job in jobs:
                runs = [replace(job, ranks=ranks, seed=seed) for seed in self.seeds]
                self.records.complete(runs)
                qualities.append([self.records.quality(run) for run in runs])
            times = self.times([baseline, name], rates, ranks)
            ratio, spread = ratios(times[name], times[baseline])
            rows.append(
                {
                    "ranks": ranks,
                    "steps": [job.steps for job in jobs],
                    "qualities": qualities,  # of each seed
                    "milliseconds": [1e3 * statistics.median(times[n]) for n in (baseline, name)],
                    "step_ratio": ratio,
                    "step_ratio_spread": spread,
                }
            )
        return rows

    def planned(self, contenders: Mapping[str, Any]) -> dict[str, Any]:
        """Plan steps of the larger network on 64 ranks."""
        option = Option(CommOpt(), statistics_every=10, solve_every=100)
        planned = plan(
            self.application.large(),
            ranks=PLANNED_RANKS,
            hardware=Hardware.load(HARDWARE),
            options=[option],
        )
        ratio = planned.rows[0].timing.mean / planned.plain
        steps = contenders[next(iter(self.application.contenders))]["steps_ratio"]
        return {
            "hardware": HARDWARE,
            "ranks": PLANNED_RANKS,
            "step_ratio": ratio,
            "time_ratio": None if steps is None else ratio * steps,
        }


def report(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    """Yield tables of the figures."""
    lines = []
    for row in rows.values():
        for name, figures in row["contenders"].items():
            ends = [
                f"{steps}: {statistics.mean(values):.3f}"
                for steps, values in figures["qualities"].items()
            ]
            mark = "<= " if figures["at_most"] else ""
            steps = figures["steps"]
            lines.append(
                [
                    f"{row['title']}, {name}",
                    f"{figures['rate']:g}",
                    ", ".join(ends),
                    "not reached" if steps is None else f"{mark}{steps:.0f}",
                    "-" if steps is None else f"{mark}{figures['steps_ratio']:.2f}",
                    f"{figures['milliseconds']:.0f}, {figures['step_ratio']:.2f}",
                    "-" if steps is None else f"{mark}{figures['time_ratio']:.2f}",
                ]
            )
    columns = ["", "rate", "quality after steps", "steps to\nbaseline's", "of its\nsteps"]
    yield table("Equal batch", [*columns, "ms a step,\nof its", "of its\ntime"], lines)
    lines = []
    for row in rows.values():
        cells = row["equal_memory"]
        steps, mark = cells["steps"], "<= " if cells["at_most"] else ""
        lines.append(
            [
                row["title"],
                f"{cells['bytes'] / 1e6:.1f}",
                f"{cells['curvature'] / 1e6:.1f}",
                f"{cells['batch']}",
                f"{cells['target']:.3f}",
                "not reached" if steps is None else f"{mark}{steps:.0f}",
                "-" if steps is None else f"{mark}{cells['time_ratio']:.2f}",
            ]
        )
    columns = ["", "MB", "of them\ncurvature", "baseline's\nbatch", "its\nquality", "K-FAC's steps"]
    yield table("Equal memory", [*columns, "of its\ntime"], lines)
    lines = []
    for row in rows.values():
        for cells in row["ranks"]:
            lines.append(
                [
                    row["title"],
                    str(cells["ranks"]),
                    ", ".join(str(steps) for steps in cells["steps"]),
                    ", ".join(f"{statistics.mean(ends):.3f}" for ends in cells["qualities"]),
                    ", ".join(f"{ms:.0f}" for ms in cells["milliseconds"]),
                    f"{cells['step_ratio']:.2f}",
                ]
            )
    columns = ["", "ranks", "steps:\nbaseline, K-FAC", "quality", "ms a step", "ratio"]
    yield table("Ranks", columns, lines)
    lines = []
    for row in rows.values():
        cells, ratio = row["planned"], row["planned"]["time_ratio"]
        saved = "-" if ratio is None else f"{100 * (1 - ratio):.0f} %"
        lines.append([row["title"], f"{cells['step_ratio']:.2f}", saved])
    columns = ["", "step, of the\nbaseline's", "time saved"]
    yield table(f"Planned on {PLANNED_RANKS} ranks of {HARDWARE}", columns, lines)


SHORT: Mapping[str, Any] = {"steps": 4, "batch_size": 4, "solve_every": 2 * TURN}
"""Settings of `--short`."""


def shortened(application: Application) -> Application:
    """Return an application with a few steps and two rates for each contender."""
    baselines = {
        name: replace(contender, rates=contender.rates[1:2])
        for name, contender in application.baselines.items()
    }
    contenders = {
        name: replace(contender, rates=contender.rates[1:2])
        for name, contender in application.contenders.items()
    }
    changes = {**application.changes, **SHORT}
    return replace(application, baselines=baselines, contenders=contenders, changes=changes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = display.parser(__doc__)
    parser.add_argument("--only", default=",".join(APPLICATIONS), help="applications, by commas")
    parser.add_argument("--short", action="store_true", help="a few steps, one seed, two ranks")
    parser.add_argument("--output", type=Path, default=Path("runs/applications"))
    parser.add_argument("--at-once", type=int, default=1, help="runs of one rank at a time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - set(APPLICATIONS):
        parser.error(f"no application {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in names:
        application = APPLICATIONS[name]
        application.module.data(application.whole)
    chosen = {name: APPLICATIONS[name] for name in names}
    limits: dict[str, Any] = {}
    if options.short:
        chosen = {name: shortened(application) for name, application in chosen.items()}
        limits = {"seeds": (0,), "parts": (0.5, 1.0), "ranks": (2,), "cycles": 1}
    try:
        # Forked, so that every process has the data that this one has loaded.
        with get_context("fork").Pool(options.at_once) as pool:
            records = Records(options.output, pool)
            rows = {name: Table(chosen[name], records, **limits).row() for name in names}
    except (ValueError, MissingLibraryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    where = {"torch": torch.__version__, "processor": processor()}
    content = jsonable({**where, "applications": rows})
    write_json(options.output / "applications.json", content)
    if options.json:
        print(json.dumps(content, indent=1))
        return 0
    screen = console(width=120)
    for shown in report(rows):
        screen.print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
