"""Which directions help the trust region: its methods alone and together, on problems of the suite.

    python benchmarks/directions.py autoencoder transformer --seeds 0,1
    python benchmarks/directions.py cnn --methods kfac,muon@10      # a model at every tenth step

The trust regions of a problem and a seed take turns in one process, beside tuned AdamW, whose
lowest loss is the target. Reported are medians over seeds: a method's steps and processor time to
the target over K-FAC's, or the lowest loss where one of the two never gets there.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import suite
from harness.suite import Curve
from harness.suite_problems import PROBLEMS

from soframe.experiments.train import numerics

METHODS = "kfac,kfac+soap,kfac+muon,soap,muon"
ADAMW = "adamw"


def settings_of(text: str) -> dict[str, Any]:
    """Return settings: ``"kfac+soap@10"`` is a list of two, with a model at every tenth step."""
    methods, _, every = text.partition("@")
    parts = methods.split("+")
    found: dict[str, Any] = {"method": parts[0] if len(parts) == 1 else parts}
    return {**found, "model_every": int(every)} if every else found


def race(
    problem: str, seed: int, methods: list[str], seconds: float, output: Path
) -> dict[str, Curve]:
    """Let trust regions and AdamW take turns; what was run is kept."""
    file = output / f"{problem}-{seed}-{seconds:g}.json"
    read = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = {name: Curve.of(curve) for name, curve in read.items()}
    runs = {
        name: suite.run(problem, suite.TRUST_REGION, seed, seconds, settings_of(name))
        for name in methods
        if name not in found
    }
    if ADAMW not in found:
        trials = suite.Results(problem, suite_seconds(), output).trials
        setting = suite.best_of(ADAMW, trials)
        runs[ADAMW] = suite.run(problem, ADAMW, seed, suite_seconds(), setting)
    while runs:
        for name, steps in list(runs.items()):
            end = time.process_time() + 0.25
            while time.process_time() < end:
                curve = next(steps, None)
                if curve is None:
                    del runs[name]
                    break
                found[name] = curve
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: curve.as_dict() for name, curve in found.items()})
    file.write_text(text + "\n", encoding="utf-8")
    return found


def suite_seconds() -> float:
    """Of a peer's run in the suite, for which AdamW is tuned."""
    return 2.0


def shown(curves: list[dict[str, Curve]], name: str, base: str) -> str:
    """Return one cell: ratios of steps and of time to the target, or the lowest losses."""
    own = [each[name] for each in curves]
    if any(curve.error for curve in own):
        return str(own[0].error)[:60]
    ratios = []
    for each in curves:
        target = each[ADAMW].lowest
        mine, theirs = each[name].reached(target), each[base].reached(target)
        if mine is None or theirs is None:
            lowest = ", ".join(f"{curve.lowest:.3g}" for curve in own)
            spent = ", ".join(f"{curve.seconds / curve.steps * 1e3:.3g}" for curve in own)
            return f"lowest {lowest}; ms a step {spent}"
        ratios.append((mine[1] / theirs[1], mine[0] / theirs[0]))
    steps, seconds = (statistics.median(column) for column in zip(*ratios, strict=True))
    return f"steps x{steps:.2f}, time x{seconds:.2f}"


def main(
    problems: Annotated[list[str], typer.Argument(help=f"From: {', '.join(PROBLEMS)}.")],
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1",
    methods: Annotated[str, typer.Option(help="Separated by commas; A+B@N.")] = METHODS,
    seconds: Annotated[float, typer.Option(help="Of the processor, for each run.")] = 4.0,
    output: Annotated[Path, typer.Option(help="Of what was run.")] = Path("runs/directions"),
) -> None:
    """Run what is missing, and print how every method fared against the first."""
    if unknown := set(problems) - set(PROBLEMS):
        raise typer.BadParameter(f"no problem {min(unknown)!r} here")
    names = methods.split(",")
    with numerics(1):
        for problem in problems:
            curves = [
                race(problem, seed, names, seconds, output) for seed in map(int, seeds.split(","))
            ]
            targets = ", ".join(f"{each[ADAMW].lowest:.3g}" for each in curves)
            print(f"{problem} (AdamW's losses {targets})", flush=True)
            for name in names:
                print(f"  {name}: {shown(curves, name, names[0])}", flush=True)


if __name__ == "__main__":
    typer.run(main)
