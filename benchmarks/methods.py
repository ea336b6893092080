"""Methods on the byte-level GPT: steps and seconds to the loss that tuned Muon ends with.

    python benchmarks/methods.py                     # report: stored settings, seeds 0, 1, 2
    python benchmarks/methods.py --tune              # first tune what is not tuned yet, all alike
    python benchmarks/methods.py --only "muon; soap-muon" --seeds 0

Orthogonal methods train the matrices within the model; AdamW, of one learning rate for all, trains
embeddings, vectors and the head. Methods whose name ends with "all parameters" train these too.
Learning rates fall along a line to zero; the stochastic trust region has none. Tuning gives each
method as many learning rates to try, on a seed of its own. The report trains Muon, or another
``--reference``, for `STEPS` steps; the target is the mean of its last held-out losses over the
seeds. The others train for other numbers of steps, each time with a line of that length, as many of
`LENGTHS` as it takes to have the target between two; the steps to the target are read off between
these, from means over the seeds. Seconds are these steps times those of a step; steps are timed in
one process of one thread, where the contenders take turns, in seconds of the processor, which on an
idle machine are those of the clock.

Every run that ends is kept in ``--runs``, under all of its settings, and is not repeated: a report
that was interrupted goes on where it was. Delete that file once code has changed. ``--trials``
ranks what tuning has found, and trains nothing. ``--after 100`` compares losses after so many steps
at the best learning rate that has been tried so far, or ``--lr``, and looks for no target.
``--apart 40`` says how far apart contenders are after so many steps of the same run:
implementations of one method.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.rates import TriedRates
from harness.runs import steps_to
from rich.progress import Progress
from rich.table import Table

from soframe.experiments.compare import console
from soframe.experiments.config import TRUST_REGIONS, RunConfig
from soframe.experiments.launch import Worker
from soframe.experiments.requirements import MissingLibraryError, require
from soframe.experiments.train import Run, numerics, train
from soframe.experiments.tuning import TUNING_SEED

STEPS = 300
LENGTHS = (210, 225, 240, 270, 300, 360, 450, 600)
NEAR = 0.1
"""How far above the target a method may end that is drawn."""
FIRST = 240
"""Which of them is tried first."""
FAR = 0.3
"""How far above the target a method ends after `STEPS` that is tried at the greatest length."""
AUXILIARY_LR = 0.008
TUNED = TriedRates(Path(__file__).parent / "harness" / "learning_rates" / "byte-gpt.json")
_ALONE = Worker(rank=0, world_size=1, send=lambda message: None)
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
        lrs: What tuning tries.
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
_SHORT: Mapping[str, Any] = {"max_ratio": 2.0}
_APART: Mapping[str, Any] = {"cut": {"qkv": 3}}
_LIGHT: Mapping[str, Any] = {"statistics_every": 2, "solve_every": 20, **_APART}
"""Half of the statistics and of the bases; three Newton-Schulz iterations go with it, of five."""
_MOMENTA_OF_MUON = {0.9: (0.02, 0.03, 0.04), 0.85: (0.03, 0.04, 0.06), 0.8: (0.04, 0.06)}
_MOMENTA = {0.9: (0.03, 0.04, 0.06), 0.85: (0.04, 0.06, 0.08), 0.8: (0.04, 0.06, 0.08)}
"""Momenta besides the usual 0.95, and the learning rates that are tried with each."""
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
    "soap-muon": Contender("soframe:soap-muon", options=every(5)),
    "soap-muon, max_ratio=4": Contender(
        "soframe:soap-muon", method={"max_ratio": 4.0}, options=every(5)
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
    # What has no length of its own is given Adam's.
    "kfac, at Adam's length": Contender(
        "soframe:kfac+momentum+graft", _AVERAGED, _CALLS, modules=WITHIN, lrs=_ADAM
    ),
    "ekfac, at Adam's length": Contender(
        "soframe:ekfac+momentum+graft", _AVERAGED, _CALLS, modules=WITHIN, lrs=_ADAM
    ),
    "shampoo, at Adam's length": Contender(
        "soframe:momentum+shampoo+graft", _AVERAGED, every(10), modules=WITHIN, lrs=_ADAM
    ),
    "kl-shampoo": Contender(
        "soframe:momentum+kl-shampoo", _AVERAGED, every(10), modules=WITHIN, lrs=_SOAP
    ),
    "adamw, all parameters": Contender("adamw", lrs=(0.0005, 0.001, 0.002, 0.004, 0.008)),
    # All of its defaults: there is nothing to tune.
    "stochastic trust region, all parameters": Contender("stochastic-trust-region", lrs=(0.7,)),
}


class Runs:
    """The last losses of runs that have ended, in a file.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def losses(self, configs: Sequence[RunConfig], processes: int, what: str) -> list[float]:
        """Train the runs that have not been, and keep each as it ends.

        Args:
            configs: The runs.
            processes: How many at a time; each has one thread.
            what: What the bar says.

        Returns:
            The last loss of each.
        """
        todo = [config for config in configs if _key(config) not in self.known]
        screen = console(to_stderr=True)
        pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        with pool, Progress(console=screen, disable=not screen.is_terminal) as bar:
            task = bar.add_task(what, total=len(todo))
            for config, loss in zip(todo, pool.map(final_loss, todo), strict=True):
                self.known[_key(config)] = loss
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(self.known, indent=1) + "\n", encoding="utf-8")
                bar.advance(task)
        return [self.known[_key(config)] for config in configs]


def _key(config: RunConfig) -> str:
    """Return what a run is kept under: what it is, and a digest of all of its settings."""
    settings = json.dumps(config.as_dict(), sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
    return f"{config.optimizer} lr={config.lr:g} {config.steps} steps seed={config.seed} {digest}"


def final_loss(config: RunConfig) -> float:
    """Train, and return the last held-out loss."""
    return train(_ALONE, config).rows[-1].loss


def seconds_of_steps(
    names: Sequence[str], lrs: Mapping[str, float], cycles: int
) -> dict[str, list[float]]:
    """Time steps of each in turns.

    Args:
        names: Contenders.
        lrs: Their learning rates.
        cycles: How many turns of each are timed.

    Returns:
        For each the mean seconds of a step, cycle by cycle.
    """
    with numerics(threads=1):
        runs = {
            name: Run(_ALONE, CONTENDERS[name].config(lrs[name], 1000, TUNING_SEED))
            for name in names
        }
        times: dict[str, list[float]] = {name: [] for name in names}
        for cycle in range(cycles + 1):
            for name, one in runs.items():
                before = len(one.step_seconds)
                for _ in range(_TURN):
                    one._step(next(one.batches))
                if cycle:  # the first warms up
                    times[name].append(statistics.mean(one.step_seconds[before:]))
        for one in runs.values():
            one.close()
    return times


def tune(names: Sequence[str], runs: Runs, processes: int) -> None:
    """Try every learning rate of every contender that is not in the file yet."""
    for name in dict.fromkeys(CONTENDERS[name].rate_of or name for name in names):
        tried = TUNED.scores(f"{STEPS} steps").get(name, {})
        lrs = [lr for lr in CONTENDERS[name].lrs if f"{lr:g}" not in tried]
        configs = [CONTENDERS[name].config(lr, STEPS, TUNING_SEED) for lr in lrs]
        losses = runs.losses(configs, processes, f"tuning {name}")
        pairs = zip(lrs, losses, strict=True)
        TUNED.keep(f"{STEPS} steps", [(name, lr, loss) for lr, loss in pairs])


def last_losses(
    name: str, lr: float, seeds: Sequence[int], target: float, runs: Runs, processes: int
) -> dict[int, list[float]]:
    """Train a contender for so many steps that a loss lies between two lengths, where it does.

    Args:
        name: The contender.
        lr: Its learning rate.
        seeds: Of its runs.
        target: The loss.
        runs: Those that have ended.
        processes: How many at a time.

    Returns:
        Length -> the last loss of each seed.
    """
    losses: dict[int, list[float]] = {}

    def reaches(length: int) -> bool:
        configs = [CONTENDERS[name].config(lr, length, seed) for seed in seeds]
        losses[length] = runs.losses(configs, processes, f"{name}, {length} steps")
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
    runs: Runs,
    processes: int,
    cycles: int,
    *,
    reference: str = "muon",
) -> dict[str, Any]:
    """Train and time all contenders.

    Args:
        names: Contenders; the reference is always one.
        seeds: Of the reported runs.
        runs: Those that have ended.
        processes: How many runs at a time.
        cycles: See `seconds_of_steps`.
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
    losses = {reference: {STEPS: runs.losses(configs, processes, reference)}}
    target = statistics.mean(losses[reference][STEPS])
    for name in names[1:]:
        losses[name] = last_losses(name, lrs[name], seeds, target, runs, processes)
    times = seconds_of_steps(names, lrs, cycles)
    rows = {}
    for name in names:
        means = {length: statistics.mean(each) for length, each in losses[name].items()}
        steps = float(STEPS) if name == reference else steps_to(target, means)
        ratios = [a / b for a, b in zip(times[name], times[reference], strict=True)]
        ratio = statistics.median(ratios)
        rows[name] = {
            "lr": lrs[name],
            "losses": losses[name],
            "steps": steps,
            "milliseconds": 1e3 * statistics.median(times[name]),
            "step_ratio": ratio,
            "step_ratio_spread": [min(ratios), max(ratios)],
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
    result = Table(title=title, caption="ratios are to the first row")
    result.add_column("method")
    trained = {int(length) for row in found["rows"].values() for length in row["losses"]}
    lengths = [f"loss after\n{length}" for length in sorted(trained)]
    for header in ("lr", *lengths, "steps", "ratio", "a step's seconds,\nratio", "seconds,\nratio"):
        result.add_column(header, justify="right")
    for name, row in found["rows"].items():
        cells = [
            f"{statistics.mean(row['losses'][n]):.3f}" if n in row["losses"] else "-"
            for n in sorted(trained)
        ]
        reached = row["steps"] is not None
        result.add_row(
            name,
            f"{row['lr']:g}",
            *cells,
            f"{row['steps']:.0f}" if reached else "not reached",
            f"{row['steps_ratio']:.2f}" if reached else "-",
            f"{row['step_ratio']:.2f} ({row['step_ratio_spread'][0]:.2f}"
            f"-{row['step_ratio_spread'][1]:.2f})",
            f"{row['seconds_ratio']:.2f}" if reached else "-",
        )
    return result


def best_so_far(name: str) -> float:
    """Return the best learning rate of a contender among those that have been tried.

    Args:
        name: The contender.

    Raises:
        ValueError: If there is none.
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
        For each how far its weights are from those of the first, over how far these have moved, and
        its held-out loss.
    """
    lr = best_so_far(names[0])
    ends = {}
    with numerics(threads=1):
        for name in names:
            one = Run(_ALONE, CONTENDERS[name].config(lr, STEPS, seed))
            start = torch.nn.utils.parameters_to_vector(one.model.parameters()).detach()
            one.take(steps)
            moved = torch.nn.utils.parameters_to_vector(one.model.parameters()).detach() - start
            ends[name] = (moved, one._evaluate(steps).loss)
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
    runs: Runs,
    processes: int,
    lr: float | None = None,
) -> dict[str, list[float]]:
    """Train contenders for one number of steps.

    Args:
        steps: How many.
        names: Contenders.
        seeds: Of their runs.
        runs: Those that have ended.
        processes: How many at a time.
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
        found[f"{name}, lr {rate:g}"] = runs.losses(configs, processes, name)
    return found


def trials_table() -> Table:
    """Return what tuning has found as a table, the least loss first."""
    result = Table(title=f"Byte-level GPT, held-out losses of tuning after {STEPS} steps")
    for header in ("place", "method", "lr", "loss", "lr: loss of the others"):
        result.add_column(header, justify="left" if header == "method" else "right")
    rows = []
    for name, scores in TUNED.scores(f"{STEPS} steps").items():
        finite = {float(lr): float("inf") if x is None else x for lr, x in scores.items()}
        best = min(finite, key=finite.__getitem__)
        others = [f"{lr:g}: {finite[lr]:.3f}" for lr in sorted(finite) if lr != best]
        rows.append((finite[best], name, f"{best:g}", ", ".join(others)))
    for place, (loss, name, lr, others) in enumerate(sorted(rows), start=1):
        result.add_row(str(place), name, lr, f"{loss:.3f}", others)
    return result


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the last losses of runs against their steps, and against their seconds.

    Args:
        found: The report.
        path: Where to write the figure.
    """
    (module,) = require("matplotlib.figure")
    figure = module.Figure(figsize=(9.0, 3.8), layout="constrained")
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
        Path, typer.Option("--runs", help="Runs that have ended, which are not repeated.")
    ] = Path("runs/methods-runs.json"),
    figure: Annotated[Path | None, typer.Option("--plot", help="A figure to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Train until the reference's loss is reached, and say in how many steps and seconds."""
    screen = console()
    screen.width = max(screen.width, 120)
    if trials:
        screen.print(trials_table())
        return
    names = [name.strip() for name in only.split(";")] if only else list(CONTENDERS)
    if unknown := [name for name in (*names, reference) if name not in CONTENDERS]:
        raise typer.BadParameter(f"no contender {unknown[0]!r}; there are: {'; '.join(CONTENDERS)}")
    if tune_first or tune_only:
        tune(names, Runs(ended), processes)
    if tune_only:
        return
    numbers = [int(seed) for seed in seeds.split(",")]
    if steps_apart is not None:
        for name, (distance, loss) in apart(steps_apart, names, numbers[0]).items():
            screen.print(f"{name}: {distance:.1e} of the way apart, held-out loss {loss:.4f}")
        return
    if after is not None:
        losses = losses_after(after, names, numbers, Runs(ended), processes, lr)
        for name, each in losses.items():
            seeds_said = ", ".join(f"{loss:.3f}" for loss in each)
            screen.print(f"{name}: {seeds_said}; mean {statistics.mean(each):.3f}")
        return
    found = report(names, numbers, Runs(ended), processes, cycles, reference=reference)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if figure is not None:
        plot(found, figure)
    if as_json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    screen.print(table(found))


if __name__ == "__main__":
    try:
        typer.run(main)
    except (FileNotFoundError, MissingLibraryError, ValueError) as error:
        sys.exit(f"error: {error}")
