"""The default method with a learning rate and nothing else, beside Muon with everything tuned.

    python -m benchmarks.defaults                       # three transformers, seeds 0, 1, 2
    python -m benchmarks.defaults --workloads byte-gpt --seeds 0

`soframe.Optimizer(model, lr=lr)` on three transformers: the byte-level GPT, which its defaults were
found on, and a Llama and a ViT, which they were not. Muon's momentum and learning rate are tuned
for each, the default's learning rate alone, on a seed of their own; the auxiliary AdamW has a fifth
of the learning rate in both. Learning rates fall along a line to zero. The target is Muon's mean
held-out loss after `STEPS` steps; the default also trains for parts of these (`PARTS`), and the
steps to the target are read off between two lengths. Steps are timed in turns, in seconds of the
processor. Runs are kept in ``--runs``: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from experiments import display, runs
from experiments.config import RunConfig
from experiments.display import console, run_command
from experiments.records import write_json
from experiments.train import ALONE
from experiments.tuning import TUNING_SEED

STEPS = 240
PARTS = (0.75, 1.0)
WORKLOADS = ("byte-gpt", "byte-llama", "cluttered-vit")
MOMENTA = (0.85, 0.9, 0.95)
LRS = (0.02, 0.03, 0.04, 0.06)
MUON = [("soframe:muon", lr, {"momentum": m}) for m in MOMENTA for lr in LRS]
DEFAULT = [("soframe:soap-normuon", lr, {}) for lr in LRS]
_TURN = 20  # steps, after which the other is timed

Setting = tuple[str, float, dict[str, Any]]
"""An optimizer, its learning rate, and arguments of its method."""


def configuration(workload: str, setting: Setting, steps: int, seed: int) -> RunConfig:
    """Return a run of so many steps."""
    optimizer, lr, method = setting
    return RunConfig(
        workload,
        optimizer,
        lr=lr,
        method=method,
        schedule="linear",
        steps=steps,
        seed=seed,
        stop_at_target=False,
        evaluate_every=steps,
        clock="cpu",
    )


def race(workload: str, seeds: list[int], folder: Path, cycles: int) -> dict[str, Any]:
    """Tune both, train them over the seeds, and time their steps."""

    def losses(settings: list[Setting], steps: int, seeds: list[int]) -> list[float]:
        configs = [configuration(workload, one, steps, seed) for one in settings for seed in seeds]
        word = sys.version  # the text is the interpreter's own standard library
        return [one.last.loss for one in runs.kept(configs, folder, word=word, tell=runs.tell)]

    tried = {}
    for name, settings in (("muon", MUON), ("default", DEFAULT)):
        scores = losses(settings, STEPS, [TUNING_SEED])
        tried[name] = sorted(zip(scores, settings, strict=True), key=lambda pair: pair[0])
    muon, own = (tried[name][0][1] for name in ("muon", "default"))
    reached = losses([muon], STEPS, seeds)
    target = statistics.mean(reached)
    ends = {round(part * STEPS): losses([own], round(part * STEPS), seeds) for part in PARTS}
    steps = runs.steps_to(target, {length: statistics.mean(each) for length, each in ends.items()})
    timed = [configuration(workload, one, 1000, TUNING_SEED) for one in (muon, own)]
    times = runs.turns(ALONE, timed, cycles, period=_TURN, turn=_TURN)
    ratio, spread = runs.ratios(times[1], times[0])
    return {
        "workload": workload,
        "torch": torch.__version__,
        "tried": tried,
        "muon": {"setting": muon, "losses": reached},
        "default": {"setting": own, "losses": ends, "steps": steps},
        "step_ratio": ratio,
        "step_ratio_spread": spread,
    }


def table(found: list[dict[str, Any]]) -> Table:
    """Return the races as a table."""
    lengths = [round(part * STEPS) for part in PARTS]
    title = f"The default method and tuned Muon, {STEPS} steps; means over the seeds"
    losses = [f"loss after {length}" for length in lengths]
    columns = ["workload", "Muon: momentum, lr", "its loss", "default: lr", *losses]
    columns += ["steps, of Muon's", "a step, of Muon's", "time, of Muon's"]
    rows = []
    for one in found:
        muon, own = one["muon"], one["default"]
        steps, ratio, (least, most) = own["steps"], one["step_ratio"], one["step_ratio_spread"]
        part = None if steps is None else steps / STEPS
        at_most = "<= " * (steps is not None and steps <= lengths[0])
        cells = [
            one["workload"],
            f"{muon['setting'][2]['momentum']:g}, {muon['setting'][1]:g}",
            f"{statistics.mean(muon['losses']):.3f}",
            f"{own['setting'][1]:g}",
            *(f"{statistics.mean(own['losses'][length]):.3f}" for length in lengths),
            "not reached" if part is None else f"{at_most}{part:.2f}",
            f"{ratio:.2f} ({least:.2f} to {most:.2f})",
            "-" if part is None else f"{at_most}{part * ratio:.2f}",
        ]
        rows.append(cells)
    return display.table(title, columns, rows)


def main(
    workloads: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WORKLOADS),
    seeds: Annotated[str, typer.Option(help="Of the report, separated by commas.")] = "0,1,2",
    cycles: Annotated[int, typer.Option(min=1, help="Of 20 steps that are timed.")] = 6,
    folder: Annotated[
        Path, typer.Option("--runs", help="Of runs that have ended: they are not repeated.")
    ] = Path("runs/defaults/runs"),
    output: Annotated[Path, typer.Option(help="Of the figures.")] = Path("runs/defaults.json"),
) -> None:
    """Race the default method against tuned Muon, and print a table."""
    numbers = [int(seed) for seed in seeds.split(",")]
    found = [race(name, numbers, folder, cycles) for name in workloads.split(",")]
    write_json(output, found)
    screen = console(width=150)
    screen.print(table(found))


if __name__ == "__main__":
    run_command(main)
