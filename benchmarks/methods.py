"""Methods on the byte-level GPT: steps and seconds to tuned Muon's final loss.

    python -m benchmarks.methods                     # report: stored settings, seeds 0, 1, 2
    python -m benchmarks.methods --tune              # first tune all untuned ones, all alike
    python -m benchmarks.methods --only "muon; soap-muon" --seeds 0

Orthogonal methods train the matrices within the model; AdamW, of one learning rate for all, trains
embeddings, vectors and the head. Methods whose name ends with "all parameters" train these too.
Learning rates fall along a line to zero; the stochastic trust region has none. Tuning gives each
method as many learning rates to try, on a seed of its own. The report trains Muon, or another
``--reference``, for `STEPS` steps; the target is the mean of its last held-out losses over the
seeds. The others train for other numbers of steps, each time with a line of that length, as many of
`LENGTHS` as it takes to have the target between two; the steps to the target are read off between
these, from means over the seeds. Seconds are these steps times the seconds of a step; steps are
timed in one process of one thread, where the contenders take turns, in seconds of the processor,
which on an idle machine equal the clock's.

Every run that ends is kept in ``--runs``, under all of its settings, and is not repeated: a report
that was interrupted goes on where it was. Delete that folder once code has changed. ``--trials``
ranks the trials of tuning, and trains nothing. ``--after 100`` compares losses after so many steps
at the best learning rate that has been tried so far, or ``--lr``, and looks for no target.
``--apart 40`` measures how far apart contenders are after so many steps of the same run:
implementations of one method.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from experiments import display, runs
from experiments.config import TRUST_REGIONS, RunConfig
from experiments.display import console, print_json, run_command
from experiments.libraries import require
from experiments.records import write_json
from experiments.runs import steps_to
from experiments.train import ALONE, WorkloadRun, numerics
from experiments.tuning import FOLDER, TUNING_SEED, TriedRates

STEPS = 300
LENGTHS = (210, 225, 240, 270, 300, 360, 450, 600)
NEAR = 0.1
"""How far above the target a method may end that is drawn."""
FIRST = 240
"""Which of them is tried first."""
FAR = 0.3
"""How far above the target a method ends after `STEPS` that is tried at the greatest length."""
AUXILIARY_LR = 0.008
TUNED = TriedRates(FOLDER / "learning-rates" / "byte-gpt.json")
_TURN = 20  # steps, after which the next contender is timed


@dataclass(frozen=True)
class Contender:
    """A method with its settings.

    Attributes:
        optimizer: See `RunConfig`.
        method: Arguments of the method.
        options: Arguments of the optimizer.
        betas: Of optimizers that are no methods.
        modules: See `RunConfig`.
        lrs: The learning rates of tuning.
        rate_of: The contender whose tuned learning rate it has, where it is another implementation
            of the same steps; it is not tuned by itself then.
    """

    optimizer: str
    method: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    modules: str | None = None
    lrs: Sequence[float] = (0.04, 0.03, 0.06, 0.02)
    rate_of: str | None = None

    def config(self, lr: float, steps: int, seed: int) -> RunConfig:
        """Return a run of so many steps."""
        options = dict(self.options)
        if self.optimizer == "muon" or (self.optimizer == "soap" and self.modules is not None):
            options["adamw_lr"] = AUXILIARY_LR
        if self.optimizer.startswith("soframe:") and self.optimizer != "soframe:adamw":
            options["auxiliary_lr"] = AUXILIARY_LR
        return RunConfig(
            "byte-gpt",
            self.optimizer,
            lr=lr,
            momentum=0.95,
            betas=self.betas,
            method=self.method,
            modules=self.modules,
            options=options,
            schedule="constant" if self.optimizer in TRUST_REGIONS else "linear",
            steps=steps,
            seed=seed,
            stop_at_target=False,
            evaluate_every=steps,
            clock="cpu",
        )


def every(steps: int) -> dict[str, int]:
    """Return options of methods that gather at every step, and solve at every so many."""
    return {"statistics_every": 1, "solve_every": steps}


WITHIN = r"^layers\."
"""The modules within the model: for methods that would take embeddings and the head, too."""
WIDE = 1e9
"""A ratio of sides that no matrix has: all of them have a basis."""
USUAL: Mapping[str, Any] = {"momentum": 0.95, "steps": 5, "max_ratio": WIDE}
"""SOAP-Muon without the settings that its defaults have by now."""
_SHORT: Mapping[str, Any] = {**USUAL, "max_ratio": 2.0}
_APART: Mapping[str, Any] = {"cut": {"qkv": 3}}
_LIGHT: Mapping[str, Any] = {"statistics_every": 2, "solve_every": 20, **_APART}
"""Half of the statistics and of the bases; three Newton-Schulz iterations go with it, of five."""
_MOMENTA_OF_MUON = {0.9: (0.02, 0.03, 0.04), 0.85: (0.03, 0.04, 0.06), 0.8: (0.04, 0.06)}
_MOMENTA = {0.9: (0.03, 0.04, 0.06), 0.85: (0.04, 0.06, 0.08), 0.8: (0.04, 0.06, 0.08)}
"""Momenta other than the usual 0.95, and the learning rates that are tried with each."""
_SOAP = (0.001, 0.002, 0.004, 0.008)
_ADAM = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
_AVERAGED: Mapping[str, Any] = {"momentum": {"beta": 0.95}}
_CALLS: Mapping[str, Any] = {**every(10), "damping": "relative", "samples": "positions"}
CONTENDERS: Mapping[str, Contender] = {
    "muon": Contender("soframe:muon"),
    "soap-muon, max_ratio=2": Contender("soframe:soap-muon", method=_SHORT, options=every(10)),
    "soap-normuon, max_ratio=2": Contender(
        "soframe:soap-normuon", method=_SHORT, options=every(10)
    ),
    "soap-muon, max_ratio=2, q k v apart": Contender(
        "soframe:soap-muon", method=_SHORT, options={**every(10), **_APART}
    ),
    "soap-normuon, max_ratio=2, q k v apart": Contender(
        "soframe:soap-normuon", method=_SHORT, options={**every(10), **_APART}
    ),
    "muon, q k v apart": Contender("soframe:muon", options=_APART),
    "normuon, q k v apart": Contender("soframe:normuon", options=_APART),
    "soap-muon": Contender("soframe:soap-muon", method=USUAL, options=every(5)),
    "soap-muon, max_ratio=4": Contender(
        "soframe:soap-muon", method={**USUAL, "max_ratio": 4.0}, options=every(5)
    ),
    "normuon": Contender("soframe:normuon"),
    **{
        f"muon, momentum {momentum:g}": Contender(
            "soframe:muon", method={"momentum": momentum}, lrs=lrs
        )
        for momentum, lrs in _MOMENTA_OF_MUON.items()
    },
    **{
        f"soap-normuon, light, momentum {momentum:g}": Contender(
            "soframe:soap-normuon",
            method={**_SHORT, "steps": 3, "momentum": momentum},
            options=_LIGHT,
            lrs=lrs,
        )
        for momentum, lrs in _MOMENTA.items()
    },
    "soap-normuon, bases every 5, momentum 0.8": Contender(
        "soframe:soap-normuon",
        method={**_SHORT, "steps": 3, "momentum": 0.8},
        options={**every(5), **_APART},
        rate_of="soap-normuon, light, momentum 0.8",
    ),
    # Their auxiliary AdamW has the averages of soframe's.
    "muon, plain": Contender("muon", options={"adamw_betas": (0.9, 0.999)}, rate_of="muon"),
    "muon, pytorch_optimizer": Contender(
        "muon", options={"published": True, "adamw_betas": (0.9, 0.999)}, rate_of="muon"
    ),
    "soap, all parameters": Contender("soframe:soap", options=every(10), lrs=_SOAP),
    "soap, pytorch_optimizer, all parameters": Contender("soap", betas=(0.95, 0.95), lrs=_SOAP),
    "soap": Contender("soframe:soap", options=every(10), modules=WITHIN, lrs=_SOAP),
    # Without the correction of momentum's start: its first steps are short.
    "soap, momentum first": Contender(
        "soframe:momentum+soap",
        {**_AVERAGED, "soap": {"betas": (0.0, 0.95)}},
        every(10),
        modules=WITHIN,
        lrs=_SOAP,
    ),
    "soap, pytorch_optimizer": Contender("soap", betas=(0.95, 0.95), modules=WITHIN, lrs=_SOAP),
    "kl-soap": Contender("soframe:kl-soap", options=every(10), modules=WITHIN, lrs=_SOAP),
    "newton-muon": Contender("soframe:newton-muon", options=every(10)),
    "kfac-muon": Contender("soframe:kfac-muon", options=_CALLS),
    # Updates without a length of their own get Adam's.
    "kfac, at Adam's length": Contender(
        "soframe:kfac+momentum+graft", _AVERAGED, _CALLS, modules=WITHIN, lrs=_ADAM
    ),
    "ekfac, at Adam's length": Contender(
        "soframe:ekfac+momentum+graft", _AVERAGED, _CALLS, modules=WITHIN, lrs=_ADAM
    ),
    "shampoo, at Adam's length": Contender(
        "soframe:momentum+shampoo+graft",
        {**_AVERAGED, "shampoo": {"graft": None}},
        every(10),
        modules=WITHIN,
        lrs=_ADAM,
    ),
    "kl-shampoo": Contender(
        "soframe:momentum+kl-shampoo", _AVERAGED, every(10), modules=WITHIN, lrs=_SOAP
    ),
    "adamw, all parameters": Contender("adamw", lrs=(0.0005, 0.001, 0.002, 0.004, 0.008)),
    # All of its defaults, so nothing to tune.
    "stochastic trust region, all parameters": Contender("stochastic-trust-region", lrs=(0.7,)),
}


@dataclass(frozen=True)
class Runs:
    """Trains runs, and keeps them.

    Attributes:
        folder: Where they are kept.
        processes: How many are trained at a time; each has one thread.
    """

    folder: Path
    processes: int

    def losses(self, configs: Sequence[RunConfig]) -> list[float]:
        """Return the last loss of each run."""
        # The text is the interpreter's own standard library.
        found = runs.kept(
            configs, self.folder, at_once=self.processes, word=sys.version, tell=runs.tell
        )
        return [one.last.loss for one in found]


def tune(names: Sequence[str], own: Runs) -> None:
    """Try every learning rate of every contender that is not in the file yet."""
    for name in dict.fromkeys(CONTENDERS[name].rate_of or name for name in names):
        tried = TUNED.scores(f"{STEPS} steps").get(name, {})
        lrs = [lr for lr in CONTENDERS[name].lrs if f"{lr:g}" not in tried]
        configs = [CONTENDERS[name].config(lr, STEPS, TUNING_SEED) for lr in lrs]
        pairs = zip(lrs, own.losses(configs), strict=True)
        TUNED.keep(f"{STEPS} steps", [(name, lr, loss) for lr, loss in pairs])


def last_losses(
    name: str, lr: float, seeds: Sequence[int], target: float, own: Runs
) -> dict[int, list[float]]:
    """Train a contender for so many steps that a loss lies between two lengths, where it does.

    Args:
        name: The contender.
        lr: Its learning rate.
        seeds: Of its runs.
        target: The loss.
        own: Trains them.

    Returns:
        Length -> the last loss of each seed.
    """
    losses: dict[int, list[float]] = {}

    def reaches(length: int) -> bool:
        configs = [CONTENDERS[name].config(lr, length, seed) for seed in seeds]
        losses[length] = own.losses(configs)
        return statistics.mean(losses[length]) <= target

    index = LENGTHS.index(FIRST)
    if reaches(FIRST):
        while index > 0 and reaches(LENGTHS[index - 1]):
            index -= 1
    elif reaches(STEPS):
        while not reaches(LENGTHS[index + 1]):
            index += 1
    elif statistics.mean(losses[STEPS]) <= target + FAR or reaches(LENGTHS[-1]):
        longer = LENGTHS[LENGTHS.index(STEPS) + 1 :]
        next((length for length in longer if reaches(length)), None)
    return losses


def report(
    names: Sequence[str],
    seeds: Sequence[int],
    own: Runs,
    cycles: int,
    *,
    reference: str = "muon",
) -> dict[str, Any]:
    """Train and time all contenders.

    Args:
        names: Contenders; the reference is always one.
        seeds: Of the reported runs.
        own: Trains them.
        cycles: Of timing: turns of each contender.
        reference: Whose last loss is the target.

    Returns:
        The target, and by contender its learning rate, the losses by length, steps, the
        milliseconds of a step, and ratios to the reference's.
    """
    names = list(dict.fromkeys((reference, *names)))
    tuned = {name: CONTENDERS[name].rate_of or name for name in names}
    best = TUNED.best({name: CONTENDERS[name].lrs for name in tuned.values()}, f"{STEPS} steps")
    lrs = {name: best[of] for name, of in tuned.items()}
    configs = [CONTENDERS[reference].config(lrs[reference], STEPS, seed) for seed in seeds]
    losses = {reference: {STEPS: own.losses(configs)}}
    target = statistics.mean(losses[reference][STEPS])
    for name in names[1:]:
        losses[name] = last_losses(name, lrs[name], seeds, target, own)
    timed = [CONTENDERS[name].config(lrs[name], 1000, TUNING_SEED) for name in names]
    each = runs.turns(ALONE, timed, cycles, period=_TURN, turn=_TURN)
    times = dict(zip(names, each, strict=True))
    rows = {}
    for name in names:
        means = {length: statistics.mean(each) for length, each in losses[name].items()}
        steps = float(STEPS) if name == reference else steps_to(target, means)
        ratio, spread = runs.ratios(times[name], times[reference])
        rows[name] = {
            "lr": lrs[name],
            "losses": losses[name],
            "steps": steps,
            "milliseconds": 1e3 * statistics.median(times[name]),
            "step_ratio": ratio,
            "step_ratio_spread": spread,
            "steps_ratio": None if steps is None else steps / STEPS,
            "seconds_ratio": None if steps is None else ratio * steps / STEPS,
        }
    return {
        "target": target,
        "reference": reference,
        "seeds": list(seeds),
        "torch": torch.__version__,
        "rows": rows,
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    title = f"Byte-level GPT, to the held-out loss {found['target']:.3f} of {found['reference']}"
    trained = {int(length) for row in found["rows"].values() for length in row["losses"]}
    lengths = [f"loss after\n{length}" for length in sorted(trained)]
    columns = ["method", "lr", *lengths, "steps", "ratio"]
    columns += ["a step's seconds,\nratio", "seconds,\nratio"]
    rows = []
    for name, row in found["rows"].items():
        cells = [
            f"{statistics.mean(row['losses'][n]):.3f}" if n in row["losses"] else "-"
            for n in sorted(trained)
        ]
        reached = row["steps"] is not None
        low, high = row["step_ratio_spread"]
        rows.append(
            [
                name,
                f"{row['lr']:g}",
                *cells,
                f"{row['steps']:.0f}" if reached else "not reached",
                f"{row['steps_ratio']:.2f}" if reached else "-",
                f"{row['step_ratio']:.2f} ({low:.2f}-{high:.2f})",
                f"{row['seconds_ratio']:.2f}" if reached else "-",
            ]
        )
    return display.table(f"{title}; ratios are to the first row", columns, rows)


def best_so_far(name: str) -> float:
    """Return the best learning rate of a contender among those that have been tried.

    Args:
        name: The contender.

    Raises:
        ValueError: If none has been tried.
    """
    of = CONTENDERS[name].rate_of or name
    tried = TUNED.scores(f"{STEPS} steps").get(of)
    if not tried:
        raise ValueError(f"{of!r} has no learning rate that was tried: add --tune")
    return TUNED.best({of: [float(lr) for lr in tried]}, f"{STEPS} steps")[of]


def apart(steps: int, names: Sequence[str], seed: int) -> dict[str, tuple[float, float]]:
    """Train contenders on the same batches, at the learning rate of the first.

    Args:
        steps: How many, of a run of `STEPS`.
        names: Contenders.
        seed: Of their runs.

    Returns:
        For each the distance of its weights from the first's, over the distance that these have
        moved, and its held-out loss.
    """
    lr = best_so_far(names[0])
    ends = {}
    with numerics(threads=1):
        for name in names:
            one = WorkloadRun(ALONE, CONTENDERS[name].config(lr, STEPS, seed))
            start = torch.nn.utils.parameters_to_vector(one.model.parameters()).detach()
            one.take(steps)
            moved = torch.nn.utils.parameters_to_vector(one.model.parameters()).detach() - start
            ends[name] = (moved, one.evaluate().loss)
            one.close()
    first = ends[names[0]][0]
    return {
        name: (float((moved - first).norm() / first.norm()), loss)
        for name, (moved, loss) in ends.items()
    }


def losses_after(
    steps: int,
    names: Sequence[str],
    seeds: Sequence[int],
    own: Runs,
    lr: float | None = None,
) -> dict[str, list[float]]:
    """Train contenders for one number of steps.

    Args:
        steps: How many.
        names: Contenders.
        seeds: Of their runs.
        own: Trains them.
        lr: Their learning rate; None for the best of those that have been tried for each.

    Returns:
        By contender and learning rate the last loss of each seed.

    Raises:
        ValueError: If none has been tried for one of them.
    """
    found = {}
    for name in names:
        rate = best_so_far(name) if lr is None else lr
        configs = [CONTENDERS[name].config(rate, steps, seed) for seed in seeds]
        found[f"{name}, lr {rate:g}"] = own.losses(configs)
    return found


def trials_table() -> Table:
    """Return the trials of tuning as a table, the least loss first."""
    title = f"Byte-level GPT, held-out losses of tuning after {STEPS} steps"
    rows = []
    for name, scores in TUNED.scores(f"{STEPS} steps").items():
        finite = {float(lr): float("inf") if x is None else x for lr, x in scores.items()}
        best = min(finite, key=finite.__getitem__)
        others = [f"{lr:g}: {finite[lr]:.3f}" for lr in sorted(finite) if lr != best]
        rows.append((finite[best], name, f"{best:g}", ", ".join(others)))
    cells = []
    for place, (loss, name, lr, others) in enumerate(sorted(rows), start=1):
        cells.append([str(place), name, lr, f"{loss:.3f}", others])
    columns = ("place", "method", "lr", "loss", "lr: loss of the others")
    return display.table(title, columns, cells, left=2)


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the last losses of runs against their steps, and against their seconds.

    Args:
        found: The report.
        path: Where to write the figure.
    """
    figure = require("matplotlib.figure").Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (name, row) in enumerate(found["rows"].items()):
        lengths = sorted(row["losses"])
        losses = [statistics.mean(row["losses"][length]) for length in lengths]
        if min(losses) > found["target"] + NEAR:
            continue
        style = {"marker": "o^sDvP"[number % 6], "markersize": 4, "linewidth": 1.2}
        seconds = [length * row["step_ratio"] for length in lengths]
        left.plot(lengths, losses, label=name, **style)
        right.plot(seconds, losses, **style)
    left.set_xlabel("steps of a run")
    left.set_ylabel("held-out loss at its end")
    right.set_xlabel(f"seconds of a run, in steps of {found['reference']}")
    for axes in (left, right):
        axes.axhline(found["target"], color="#888888", linewidth=0.8)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(path, dpi=90)


def main(
    only: Annotated[str, typer.Option(help="Contenders, separated by semicolons.")] = "",
    tune_first: Annotated[bool, typer.Option("--tune", help="Tune them first.")] = False,
    tune_only: Annotated[bool, typer.Option("--tune-only", help="And no report.")] = False,
    trials: Annotated[bool, typer.Option(help="Rank what tuning found, no more.")] = False,
    seeds: Annotated[str, typer.Option(help="Of the report, separated by commas.")] = "0,1,2",
    after: Annotated[
        int | None, typer.Option(min=1, help="Train for so many steps alone, to no target.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Of --after; the best that was tried if none.")
    ] = None,
    steps_apart: Annotated[
        int | None, typer.Option("--apart", min=1, help="Compare weights after so many steps.")
    ] = None,
    reference: Annotated[str, typer.Option(help="Whose last loss is the target.")] = "muon",
    cycles: Annotated[int, typer.Option(min=1, help="Of 20 steps that are timed.")] = 6,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    output: Annotated[Path, typer.Option(help="Of the figures.")] = Path("runs/methods.json"),
    ended: Annotated[
        Path,
        typer.Option("--runs", help="The folder of runs that have ended: they are not repeated."),
    ] = Path("runs/methods/runs"),
    figure: Annotated[Path | None, typer.Option("--plot", help="A figure to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Train until the reference's loss is reached, and print the steps and seconds."""
    screen = console(width=120)
    if trials:
        screen.print(trials_table())
        return
    names = [name.strip() for name in only.split(";")] if only else list(CONTENDERS)
    if unknown := [name for name in (*names, reference) if name not in CONTENDERS]:
        raise typer.BadParameter(f"no contender {unknown[0]!r}; there are: {'; '.join(CONTENDERS)}")
    own = Runs(ended, processes)
    if tune_first or tune_only:
        tune(names, own)
    if tune_only:
        return
    numbers = [int(seed) for seed in seeds.split(",")]
    if steps_apart is not None:
        for name, (distance, loss) in apart(steps_apart, names, numbers[0]).items():
            screen.print(f"{name}: {distance:.1e} of the way apart, held-out loss {loss:.4f}")
        return
    if after is not None:
        losses = losses_after(after, names, numbers, own, lr)
        for name, each in losses.items():
            seeds_said = ", ".join(f"{loss:.3f}" for loss in each)
            screen.print(f"{name}: {seeds_said}; mean {statistics.mean(each):.3f}")
        return
    found = report(names, numbers, own, cycles, reference=reference)
    write_json(output, found)
    if figure is not None:
        plot(found, figure)
    if as_json:
        print_json(found)
        return
    screen.print(table(found))


if __name__ == "__main__":
    run_command(main)
