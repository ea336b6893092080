"""Methods on the byte-level GPT: steps and seconds to the loss that tuned Muon ends with.

    python benchmarks/methods.py                     # report: stored settings, seeds 0, 1, 2
    python benchmarks/methods.py --tune              # tune all alike first
    python benchmarks/methods.py --only "muon; soap-muon" --seeds 0

Every contender trains the matrices within the model; AdamW, of one learning rate for all, trains
embeddings, vectors and the head. Learning rates fall along a line to zero. Tuning gives each the
same learning rates to try, on a seed of its own. The report trains Muon for `STEPS` steps; the
target is the mean of its last held-out losses over the seeds. The others train for fewer steps,
`LENGTHS`, each time with a line of that length; the steps to the target are read off between two
lengths, from means over the seeds. Seconds are these steps times the mean of a step; steps are
timed in one process, where the contenders take turns.
"""

from __future__ import annotations

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
from rich.progress import Progress
from rich.table import Table

from soframe.experiments.compare import console
from soframe.experiments.config import RunConfig
from soframe.experiments.launch import Worker
from soframe.experiments.requirements import MissingLibraryError
from soframe.experiments.train import Run, numerics, train
from soframe.experiments.tuning import TUNING_SEED

STEPS = 300
LENGTHS = (180, 210, 240, 300)
AUXILIARY_LR = 0.008
TUNED = Path(__file__).parent / "harness" / "tuned" / "byte-gpt-methods.json"
_ALONE = Worker(rank=0, world_size=1, send=lambda message: None)
_CYCLES = 6  # of ten steps, in which every contender is timed


@dataclass(frozen=True)
class Contender:
    """A method with its settings.

    Attributes:
        optimizer: See `RunConfig`.
        method: Arguments of the method.
        options: Arguments of the optimizer.
        lrs: What tuning tries.
    """

    optimizer: str
    method: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lrs: Sequence[float] = (0.01, 0.02, 0.03, 0.04)

    def config(self, lr: float, steps: int, seed: int) -> RunConfig:
        """Return a run of so many steps."""
        options = dict(self.options)
        if self.optimizer == "muon":
            options["adamw_lr"] = AUXILIARY_LR
        if self.optimizer.startswith("soframe:") and self.optimizer != "soframe:adamw":
            options["auxiliary_lr"] = AUXILIARY_LR
        return RunConfig(
            "byte-gpt",
            self.optimizer,
            lr=lr,
            momentum=0.95,
            betas=(0.9, 0.95),
            method=self.method,
            options=options,
            schedule="linear",
            steps=steps,
            seed=seed,
            stop_at_target=False,
            evaluate_every=steps,
        )


def every(steps: int) -> dict[str, int]:
    """Return options of methods that gather at every step, and solve at every so many."""
    return {"statistics_every": 1, "solve_every": steps}


_ADAM = (0.002, 0.004, 0.008)
CONTENDERS: Mapping[str, Contender] = {
    "muon": Contender("soframe:muon"),
    "adamw": Contender("adamw", lrs=_ADAM),
    "soap": Contender("soframe:soap", options=every(10), lrs=(0.005, 0.01, 0.02)),
    "normuon": Contender("soframe:normuon"),
    "newton-muon": Contender("soframe:newton-muon", options=every(10)),
    "soap-muon": Contender("soframe:soap-muon", options=every(5)),
    "soap-muon, short sides": Contender(
        "soframe:soap-muon", method={"max_ratio": 4.0}, options=every(5)
    ),
    "soap-normuon, short sides": Contender(
        "soframe:soap-normuon", method={"max_ratio": 4.0}, options=every(5)
    ),
}


def final_loss(config: RunConfig) -> float:
    """Train, and return the last held-out loss."""
    return train(_ALONE, config).rows[-1].loss


def final_losses(configs: Sequence[RunConfig], processes: int, what: str) -> list[float]:
    """Train several runs, in some processes at a time.

    Args:
        configs: The runs.
        processes: How many at a time; each has one thread.
        what: What the bar says.

    Returns:
        The last loss of each.
    """
    screen = console(to_stderr=True)
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    with pool, Progress(console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=len(configs))
        found = []
        for loss in pool.map(final_loss, configs):
            found.append(loss)
            bar.advance(task)
    return found


def seconds_of_steps(names: Sequence[str], lrs: Mapping[str, float]) -> dict[str, list[float]]:
    """Time ten steps of each in turns.

    Args:
        names: Contenders.
        lrs: Their learning rates.

    Returns:
        For each the mean seconds of a step, cycle by cycle.
    """
    with numerics(threads=1):
        runs = {
            name: Run(_ALONE, CONTENDERS[name].config(lrs[name], 1000, TUNING_SEED))
            for name in names
        }
        times: dict[str, list[float]] = {name: [] for name in names}
        for cycle in range(_CYCLES + 1):
            for name, one in runs.items():
                before = len(one.step_seconds)
                for _ in range(10):
                    one._step(next(one.batches))
                if cycle:  # the first warms up
                    times[name].append(statistics.mean(one.step_seconds[before:]))
        for one in runs.values():
            one.close()
    return times


def steps_to(target: float, losses: Mapping[int, float]) -> float | None:
    """Return the length of a run that ends with a loss, between those that were tried.

    Args:
        target: The loss.
        losses: Length -> last loss.

    Returns:
        The length; the shortest that was tried if it is below; None if none is.
    """
    lengths = sorted(losses)
    if losses[lengths[0]] <= target:
        return float(lengths[0])
    for short, long in zip(lengths, lengths[1:], strict=False):  # noqa: RUF007
        if losses[long] <= target < losses[short]:
            part = (losses[short] - target) / (losses[short] - losses[long])
            return short + part * (long - short)
    return None


def tune(names: Sequence[str], processes: int) -> None:
    """Try every learning rate of every contender once, and keep the losses."""
    pairs = [(name, lr) for name in names for lr in CONTENDERS[name].lrs]
    configs = [CONTENDERS[name].config(lr, STEPS, TUNING_SEED) for name, lr in pairs]
    known = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    for (name, lr), loss in zip(pairs, final_losses(configs, processes, "tuning"), strict=True):
        known.setdefault(name, {})[f"{lr:g}"] = loss
    TUNED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def best_lrs(names: Sequence[str]) -> dict[str, float]:
    """Return the learning rates that tuning found best."""
    known = json.loads(TUNED.read_text())
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"{missing[0]!r} was never tuned: run with --tune --only {missing[0]!r}")
    return {name: float(min(known[name], key=known[name].get)) for name in names}


def report(names: Sequence[str], seeds: Sequence[int], processes: int) -> dict[str, Any]:
    """Train and time all contenders.

    Args:
        names: Contenders; Muon is always one.
        seeds: Of the reported runs.
        processes: How many runs at a time.

    Returns:
        The target, and by contender its learning rate, the losses by length, steps, the
        milliseconds of a step, and ratios to Muon's.
    """
    names = list(dict.fromkeys(("muon", *names)))
    lrs = best_lrs(names)
    runs = [
        (name, length, seed)
        for name in names
        for length in ((STEPS,) if name == "muon" else LENGTHS)
        for seed in seeds
    ]
    configs = [CONTENDERS[name].config(lrs[name], length, seed) for name, length, seed in runs]
    losses: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    for (name, length, _), loss in zip(
        runs, final_losses(configs, processes, "training"), strict=True
    ):
        losses[name].setdefault(length, []).append(loss)
    times = seconds_of_steps(names, lrs)
    target = statistics.mean(losses["muon"][STEPS])
    rows = {}
    for name in names:
        means = {length: statistics.mean(each) for length, each in losses[name].items()}
        steps = float(STEPS) if name == "muon" else steps_to(target, means)
        ratios = [a / b for a, b in zip(times[name], times["muon"], strict=True)]
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
    return {"target": target, "seeds": list(seeds), "torch": torch.__version__, "rows": rows}


def table(found: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    result = Table(title=f"Byte-level GPT, to the held-out loss {found['target']:.3f}")
    result.add_column("method")
    lengths = [f"loss after\n{length}" for length in LENGTHS]
    for header in ("lr", *lengths, "steps", "of\nMuon's", "ms a step,\nof Muon's", "seconds,\nof"):
        result.add_column(header, justify="right")
    for name, row in found["rows"].items():
        cells = [
            f"{statistics.mean(row['losses'][n]):.3f}" if n in row["losses"] else "-"
            for n in LENGTHS
        ]
        reached = row["steps"] is not None
        result.add_row(
            name,
            f"{row['lr']:g}",
            *cells,
            f"{row['steps']:.0f}" if reached else "not reached",
            f"{row['steps_ratio']:.2f}" if reached else "-",
            f"{row['step_ratio']:.2f}",
            f"{row['seconds_ratio']:.2f}" if reached else "-",
        )
    return result


def main(
    only: Annotated[str, typer.Option(help="Contenders, separated by semicolons.")] = "",
    tune_first: Annotated[bool, typer.Option("--tune", help="Tune them first.")] = False,
    tune_only: Annotated[bool, typer.Option("--tune-only", help="And no report.")] = False,
    seeds: Annotated[str, typer.Option(help="Of the report, separated by commas.")] = "0,1,2",
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    output: Annotated[Path, typer.Option(help="Of the figures.")] = Path("runs/methods.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Train until Muon's loss is reached, and say in how many steps and seconds."""
    names = [name.strip() for name in only.split(";")] if only else list(CONTENDERS)
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise typer.BadParameter(f"no contender {unknown[0]!r}; there are: {'; '.join(CONTENDERS)}")
    if tune_first or tune_only:
        tune(names, processes)
    if tune_only:
        return
    found = report(names, [int(seed) for seed in seeds.split(",")], processes)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    screen = console()
    screen.width = max(screen.width, 120)
    screen.print(table(found))


if __name__ == "__main__":
    try:
        typer.run(main)
    except (FileNotFoundError, MissingLibraryError, ValueError) as error:
        sys.exit(f"error: {error}")
