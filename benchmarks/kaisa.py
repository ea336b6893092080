"""KAISA's claim at this size: a ResNet-20, epochs and seconds to the accuracy that SGD ends with.

    python -m benchmarks.kaisa --tune                                  # everything, 50,000 images
    python -m benchmarks.kaisa --tune --images 10000 --epochs 3        # smaller
    python -m benchmarks.kaisa --only "SGD; K-FAC 10/100" --processes 1,4

Pauloski et al. (SC 2021) report that K-FAC behind SGD, statistics every 10 steps and solves every
100, takes 18 to 36 % less time than the original optimizer to the same accuracy. Here SGD with
momentum and a line to zero trains a ResNet-20 on generated images (`experiments.clutter`).
The target is the mean over the seeds of the accuracy on held-out digits that it ends with. The
others have the same global batch; they train for parts of SGD's epochs, `--lengths`, each with a
line of that length, and the epochs to the target are read off between two lengths, from means over
the seeds. SGD is trained for these lengths too: a target that it would reach itself in fewer epochs
shows there. Tuning tries as many learning rates for each, on a seed of its own.

Seconds are epochs times the mean of a step. Steps are timed in one process (or one group of
processes), where the contenders take turns of ten steps, over whole cycles of a hundred: one
process by the processor's time, which others on the machine stretch less, several by the wall
clock. Runs are kept in `--runs`: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.methods import USUAL
from experiments import display, runs
from experiments.clutter import TRAINING_IMAGES
from experiments.config import ClockName, RunConfig
from experiments.display import console, print_json, processor, run_command
from experiments.launch import launch
from experiments.libraries import require
from experiments.records import jsonable, write_json
from experiments.runs import steps_to
from experiments.tuning import FOLDER, TUNING_SEED, TriedRates

SGD = "SGD"
TUNED = FOLDER / "learning-rates" / "cluttered-digits.json"
WEIGHT_DECAY = 5e-4
AUXILIARY_LR = 0.008
PERIOD, TURN = 100, 10  # steps: of the longest interval, and of a turn


@dataclass(frozen=True)
class Contender:
    """An optimizer with its settings.

    Attributes:
        optimizer: See `RunConfig`.
        lrs: The learning rates of tuning: as many for each.
        weight_decay: Added to the gradient by SGD, decoupled elsewhere.
        preconditioner: Arguments of the preconditioner.
        options: Arguments of the optimizer.
        method: Arguments of the method.
    """

    optimizer: str
    lrs: tuple[float, float, float]
    weight_decay: float = 0.0
    preconditioner: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=dict)


def every(statistics_every: int, solve_every: int) -> dict[str, int]:
    """Return intervals as options."""
    return {"statistics_every": statistics_every, "solve_every": solve_every}


#: Damping, decay and clip are KAISA's own; only learning rates are tuned.
CONTENDERS: Mapping[str, Contender] = {
    SGD: Contender("sgd", (0.05, 0.1, 0.2), WEIGHT_DECAY),
    "K-FAC 10/100": Contender(
        "kfac",
        (0.05, 0.1, 0.2),
        WEIGHT_DECAY,
        preconditioner={
            "solver": "inverse",
            "damping": 0.003,
            "decay": 0.95,
            "kl_clip": 0.4,  # KAISA's 0.001 of a step at a rate of 0.05
            **every(10, 100),
        },
    ),
    "muon": Contender("soframe:muon", (0.01, 0.02, 0.04), options={"auxiliary_lr": AUXILIARY_LR}),
    "soap-muon": Contender(
        "soframe:soap-muon",
        (0.01, 0.02, 0.04),
        options={"auxiliary_lr": AUXILIARY_LR, **every(1, 10)},
        method=USUAL,
    ),
}


@dataclass(frozen=True)
class Size:
    """The training data, and the length of training.

    Attributes:
        images: Training images.
        batch: Of each step, over all processes.
        epochs: SGD's.
        lengths: Parts of SGD's epochs that the others train for.
    """

    images: int
    batch: int
    epochs: float
    lengths: tuple[float, ...]

    @property
    def workload(self) -> str:
        """The name of the workload."""
        whole = self.images == TRAINING_IMAGES
        return "cluttered-digits" if whole else f"cluttered-digits:{self.images}"

    @property
    def key(self) -> str:
        """The key of tuned learning rates."""
        return f"{self.images} images, batch {self.batch}, {self.epochs:g} epochs"

    @property
    def epoch(self) -> int:
        """Steps of an epoch."""
        return self.images // self.batch

    def steps(self, part: float = 1.0) -> int:
        """Return the steps of a part of SGD's epochs."""
        return max(1, round(part * self.epochs * self.epoch))


def configuration(name: str, lr: float, size: Size, part: float, seed: int) -> RunConfig:
    """Return a run.

    Args:
        name: Of the contender.
        lr: Its learning rate at the first step.
        size: The training data.
        part: Of SGD's epochs.
        seed: Of weights and of the order of images.

    Returns:
        A run that is evaluated in the middle and at its end.
    """
    one, steps = CONTENDERS[name], size.steps(part)
    return RunConfig(
        size.workload,
        one.optimizer,
        lr=lr,
        momentum=0.9,
        weight_decay=one.weight_decay,
        preconditioner=one.preconditioner,
        options=one.options,
        method=one.method,
        schedule="linear",
        steps=steps,
        stop_at_target=False,
        batch_size=size.batch,
        evaluate_every=-(-steps // 2),
        seed=seed,
    )


@dataclass(frozen=True)
class Machinery:
    """How runs are trained.

    Attributes:
        folder: Where they are kept.
        at_once: How many at a time.
        cycles: Of timing.
    """

    folder: Path
    at_once: int
    cycles: int

    def accuracies(self, configs: Sequence[RunConfig], processes: int) -> list[float]:
        """Return the last held-out accuracy of each run."""
        found = runs.kept(
            configs,
            self.folder,
            processes=processes,
            at_once=self.at_once if processes == 1 else 1,
            tell=runs.tell,
        )
        return [0.0 if one.last.accuracy is None else one.last.accuracy for one in found]


def tune(names: Sequence[str], size: Size, part: float, how: Machinery, rates: TriedRates) -> None:
    """Try every learning rate of every contender once, for a part of SGD's epochs."""
    pairs = [(name, lr) for name in names for lr in CONTENDERS[name].lrs]
    configs = [configuration(name, lr, size, part, TUNING_SEED) for name, lr in pairs]
    each = how.accuracies(configs, 1)
    scores = [(name, lr, accuracy) for (name, lr), accuracy in zip(pairs, each, strict=True)]
    rates.keep(size.key, scores)


def report(
    names: Sequence[str],
    size: Size,
    *,
    lrs: Mapping[str, float],
    seeds: Sequence[int],
    processes: int,
    how: Machinery,
) -> dict[str, Any]:
    """Train and time all contenders.

    Args:
        names: Contenders; SGD is always one.
        size: The training data.
        lrs: Their learning rates.
        seeds: Of the runs.
        processes: How many share each batch.
        how: How runs are trained.

    Returns:
        The target, and for each contender its learning rate, accuracies by steps, epochs to the
        target, milliseconds of a step, ratios to SGD's, and bytes that a rank sends in a step.
    """
    names = list(dict.fromkeys((SGD, *names)))
    lengths = sorted({*size.lengths, 1.0})
    jobs = [(name, part, seed) for seed in seeds for part in (1.0, *lengths[:-1]) for name in names]
    configs = {
        (name, part, seed): configuration(name, lrs[name], size, part, seed)
        for name, part, seed in jobs
    }
    flat = how.accuracies(list(configs.values()), processes)
    found = dict(zip(configs, flat, strict=True))
    # Where processes wait for each other, processor time leaves that out.
    clock: ClockName = "cpu" if processes == 1 else "wall"
    timed = [
        configuration(name, lrs[name], size, 1.0, TUNING_SEED).but(clock=clock) for name in names
    ]
    threads = timed[0].threads
    arguments = (timed, how.cycles, PERIOD, TURN)
    times = launch(runs.turns, processes, timeout=24 * 3600.0, threads=threads)(*arguments)[0]
    target = statistics.mean(found[SGD, 1.0, seed] for seed in seeds)
    rows = {}
    for name, seconds in zip(names, times, strict=True):
        by_steps = {size.steps(p): [found[name, p, seed] for seed in seeds] for p in lengths}
        errors = {steps: 1 - statistics.mean(each) for steps, each in by_steps.items()}
        steps = steps_to(1 - target, errors)
        ratio, spread = runs.ratios(seconds, times[0])
        kept = runs.kept([configs[name, 1.0, seeds[0]]], how.folder, processes=processes)[0]
        part = None if steps is None else steps / size.steps()
        rows[name] = {
            "lr": lrs[name],
            "accuracies": by_steps,
            "steps": steps,
            "epochs": None if steps is None else steps / size.epoch,
            "milliseconds": 1e3 * statistics.median(seconds),
            "step_ratio": ratio,
            "step_ratio_spread": spread,
            "epochs_ratio": part,
            "seconds_ratio": None if part is None else ratio * part,
            "sent_bytes_per_step": kept.sent_bytes_per_step,
            "curvature_bytes": list(kept.curvature_bytes),
        }
    return {
        "size": size.key,
        "processes": processes,
        "target": target,
        "seeds": list(seeds),
        "torch": torch.__version__,
        "processor": processor(),
        "rows": rows,
    }


def table(found: Mapping[str, Any], size: Size) -> Table:
    """Return a report as a table."""
    title = (
        f"ResNet-20, {found['size']}, {found['processes']} process(es): "
        f"to {100 * found['target']:.1f} % of held-out images"
    )
    lengths = sorted({*size.lengths, 1.0})
    after = [f"% after\n{part * size.epochs:.3g} epochs" for part in lengths]
    columns = ["optimizer", "lr", *after, "epochs\nto it", "of\nSGD's", "ms a step,\nof SGD's"]
    columns += ["seconds,\nof SGD's", "sent a step,\nrank, MB"]
    rows = []
    for name, row in found["rows"].items():
        each = {int(steps): values for steps, values in row["accuracies"].items()}
        reached = row["steps"] is not None
        sent = sum(row["sent_bytes_per_step"].values())
        rows.append(
            [
                name,
                f"{row['lr']:g}",
                *(f"{100 * statistics.mean(each[size.steps(p)]):.1f}" for p in lengths),
                f"{row['epochs']:.2f}" if reached else "not reached",
                f"{row['epochs_ratio']:.2f}" if reached else "-",
                f"{row['milliseconds']:.0f}, {row['step_ratio']:.2f}",
                f"{row['seconds_ratio']:.2f}" if reached else "-",
                f"{sent / 1e6:.2f}" if sent else "-",
            ]
        )
    return display.table(title, columns, rows)


def figure(found: Mapping[str, Any], size: Size) -> Any:
    """Draw the final results of runs by length, against epochs and against SGD's seconds."""
    made = require("matplotlib.figure").Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = made.subplots(1, 2, sharey=True)
    for name, row in found["rows"].items():
        each = {int(steps): values for steps, values in row["accuracies"].items()}
        steps = sorted(each)
        means = [100 * statistics.mean(each[n]) for n in steps]
        epochs = [n / size.epoch for n in steps]
        style = {"marker": "o", "markersize": 4, "label": name}
        (line,) = left.plot(epochs, means, **style)
        seconds = [row["step_ratio"] * n / size.steps() for n in steps]
        right.plot(seconds, means, color=line.get_color(), **style)
        for place, axes in ((epochs, left), (seconds, right)):
            for x, n in zip(place, steps, strict=True):
                dots = [100 * value for value in each[n]]
                axes.plot([x] * len(dots), dots, ".", color=line.get_color(), alpha=0.4)
    for axes, label in ((left, "epochs"), (right, "time, of SGD's whole run")):
        axes.axhline(100 * found["target"], color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("% of held-out images")
    right.legend(frameon=False, fontsize=9)
    made.suptitle(f"ResNet-20, {found['size']}: the end of runs of several lengths", fontsize=11)
    return made


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers that commas separate."""
    return tuple(float(part) for part in text.split(",") if part)


def main(
    only: Annotated[str, typer.Option(help="Contenders, separated by semicolons.")] = "",
    tune_first: Annotated[bool, typer.Option("--tune", help="Tune them first.")] = False,
    tune_part: Annotated[float, typer.Option(help="Of SGD's epochs, for a trial.")] = 1.0,
    images: Annotated[int, typer.Option(min=10, help="Training images.")] = TRAINING_IMAGES,
    epochs: Annotated[float, typer.Option(help="Of SGD.")] = 5.0,
    batch: Annotated[int, typer.Option(min=1, help="Over all processes.")] = 128,
    lengths: Annotated[str, typer.Option(help="Parts of SGD's epochs.")] = "0.5,0.65,0.8",
    seeds: Annotated[str, typer.Option(help="Of the report, separated by commas.")] = "0,1,2",
    processes: Annotated[str, typer.Option(help="One report for each, by commas.")] = "1",
    at_once: Annotated[int, typer.Option(min=1, help="Runs of one process at a time.")] = 1,
    cycles: Annotated[int, typer.Option(min=1, help="Of a hundred steps, timed.")] = 3,
    kept: Annotated[Path, typer.Option("--runs", help="Where runs are kept.")] = Path(
        "runs/kaisa/runs"
    ),
    tuned: Annotated[Path, typer.Option(help="Where learning rates are kept.")] = TUNED,
    output: Annotated[Path, typer.Option(help="Of figures and plots.")] = Path("runs/kaisa"),
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Train until SGD's accuracy is reached, and print the epochs and seconds."""
    names = [name.strip() for name in only.split(";")] if only else list(CONTENDERS)
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise typer.BadParameter(f"no contender {unknown[0]!r}; there are: {'; '.join(CONTENDERS)}")
    size = Size(images=images, batch=batch, epochs=epochs, lengths=numbers(lengths))
    if wrong := [part for part in size.lengths if not 0 < part <= 1]:
        raise typer.BadParameter(f"a length is a part of SGD's epochs, not {wrong[0]:g}")
    how = Machinery(folder=kept, at_once=at_once, cycles=cycles)
    names = list(dict.fromkeys((SGD, *names)))
    rates = TriedRates(tuned, highest=True)
    if tune_first:
        tune(names, size, tune_part, how, rates)
    lrs = rates.best({name: CONTENDERS[name].lrs for name in names}, size.key)
    reports = []
    for count in numbers(processes):
        found = jsonable(
            report(
                names,
                size,
                lrs=lrs,
                seeds=[int(seed) for seed in numbers(seeds)],
                processes=int(count),
                how=how,
            )
        )
        reports.append(found)
        path = output / f"kaisa-{int(count)}.json"
        write_json(path, found)
        display.save(figure(found, size), path.with_suffix(".png"))
        if not as_json:
            screen = console(width=120)
            screen.print(table(found, size))
    if as_json:
        print_json(reports)


if __name__ == "__main__":
    run_command(main)
