"""The untuned trust regions on many problems, against tuned AdamW, SOAP and Muon.

    python -m benchmarks.suite                        # everything that is not in `--output` yet
    python -m benchmarks.suite pinn vae --fresh       # those two anew
    python -m benchmarks.suite --unseen               # also the problems kept for the end
    python -m benchmarks.suite pinn --tune            # tune the peers there anew

The target is tuned AdamW's final loss, on each seed; a ratio is an optimizer's time to it over
AdamW's own. Time is processor time of the steps, so that other work on the machine does not count.
AdamW's trial with the lowest loss is its setting, and that loss the target of the other peers'
trials, which are stored in `experiments/tuned/suite.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments import display, tuning
from experiments.config import TRUST_REGIONS, RunConfig
from experiments.problems import PROBLEMS, UNSEEN
from experiments.records import RunRecord, jsonable
from experiments.runs import digest, kept, race
from experiments.train import ALONE, WorkloadRun
from experiments.workloads import PROBLEM

TUNED = tuning.FOLDER / "suite.json"
TUNING_SEED = 100
EVALUATIONS = 40  # in a run's time, on mini-batches; with full batches every step

SPACES: dict[str, tuning.Space] = {
    "adamw": {"lr": (3e-4, 1e-1)},
    "soap": {"lr": (3e-4, 1e-1), "betas": [(0.95, 0.95)]},
    "muon": {"lr": (1e-3, 3e-1), "momentum": [0.95]},
}
PEERS = tuple(SPACES)
FIXED: dict[str, dict[str, Any]] = {"soap": {"betas": (0.95, 0.95)}, "muon": {"momentum": 0.95}}

#: Peers with the defaults of their library: three find their rate themselves, one needs no
#: schedule, and the last is an untuned AdamW. Peers without a schedule have the trust regions'
#: time, the other one has the tuned peers'.
UNTUNED = ("prodigy", "prodigy-cosine", "dadapt-adam", "schedule-free", "adamw-default")


def configuration(
    problem: str, name: str, seed: int, seconds: float, longer: float, tuned: Path = TUNED
) -> RunConfig:
    """Return a run.

    Args:
        problem: Of the suite.
        name: Of `TRUST_REGIONS`, `PEERS` or `UNTUNED`.
        seed: Of the run.
        seconds: Of a peer's run.
        longer: How many times that others have.
        tuned: The file of trials.
    """
    workload_name, settings = PROBLEM + problem, dict[str, Any]()
    if name in PEERS:
        settings = {**FIXED.get(name, {}), **tuning.load(tuned, problem, name).best.settings}
    elif name in TRUST_REGIONS:
        settings, seconds = dict(tuning.chosen(workload_name, name)), longer * seconds
    elif name == "prodigy-cosine":
        settings = {"lr": 1.0, "schedule_seconds": seconds}
    else:
        settings, seconds = {"lr": 1e-3 if name == "adamw-default" else 1.0}, longer * seconds
    optimizer = {"prodigy-cosine": "prodigy", "adamw-default": "adamw"}.get(name, name)
    fields = evaluations(problem, seconds) | {"seed": seed, "seconds": seconds, "clock": "cpu"}
    return tuning.configure(workload_name, optimizer, settings, **fields)


def evaluations(problem: str, seconds: float) -> dict[str, Any]:
    """Return when a run is evaluated."""
    if PROBLEMS[problem][-1] is None:
        return {"evaluate_every": 1}
    return {"evaluate_seconds": seconds / EVALUATIONS}


def tune(problem: str, seconds: float, trials: int, path: Path = TUNED) -> None:
    """Search for settings of the peers: AdamW's lowest loss, then for others the time to it."""
    for peer in PEERS:
        targets: tuple[float, ...] = ()
        if peer != "adamw":
            targets = (resolved(tuning.load(path, problem, "adamw").best.loss),)
        outcome = tuning.tune(
            PROBLEM + problem,
            peer,
            targets=targets,
            seconds=seconds,
            trials=trials,
            space=SPACES[peer],
            seed=TUNING_SEED,
            **evaluations(problem, seconds),
        )
        outcome.save(path, problem, peer)


def resolved(loss: float) -> float:
    """Return a loss, or the resolution of single precision if that is larger.

    For well separated classes every sample's loss rounds to zero: a mean of zero is only below one
    sample's rounding.
    """
    return max(loss, torch.finfo(torch.float32).eps) if loss >= 0 else loss


def entrants(problem: str, optimizers: Sequence[str]) -> list[str]:
    """Return the optimizers that take part: with full batches the stochastic one does not."""
    full = PROBLEMS[problem][-1] is None
    return [name for name in optimizers if not (full and name == "stochastic-trust-region")]


def refusal(config: RunConfig) -> str | None:
    """Return why an optimizer refuses a problem, if it does."""
    try:
        WorkloadRun(ALONE, config).close()
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Row:
    """One optimizer on one problem, over seeds.

    Attributes:
        problem: Its name.
        optimizer: Its name.
        ratios: For each seed the time to the target over AdamW's own; None if it was not reached.
        steps: The same ratios, in steps.
        lowest: For each seed the lowest loss.
        targets: For each seed AdamW's lowest loss, see `resolved`.
        error: The reason why it did not run, or None.
    """

    problem: str
    optimizer: str
    ratios: tuple[float | None, ...] = ()
    steps: tuple[int | None, ...] = ()
    lowest: tuple[float, ...] = ()
    targets: tuple[float, ...] = ()
    error: str | None = None

    def all_within(self, times: float) -> bool:
        """Whether every seed reached the target within so many times AdamW's time."""
        reached = [ratio is not None and ratio <= times for ratio in self.ratios]
        return all(reached) and self.error is None


def measure(
    problem: str,
    seeds: Sequence[int],
    optimizers: Sequence[str],
    configure: Callable[[str, str, int], RunConfig],
    folder: Path,
) -> list[Row]:
    """Train missing runs, the optimizers of a seed in turns, and return a row for each.

    `configure` returns the run of a problem, an optimizer and a seed.
    """
    names = entrants(problem, optimizers)
    errors = {name: refusal(configure(problem, name, seeds[0])) for name in names}
    running = [name for name in names if errors[name] is None]
    found: dict[str, list[RunRecord]] = {name: [] for name in running}
    for seed in seeds:
        configs = [configure(problem, name, seed) for name in running]
        records = kept(configs, folder, train=partial(race, turn=0.25))
        for name, record in zip(running, records, strict=True):
            found[name].append(record)
    targets = [resolved(record.best_loss) for record in found["adamw"]]
    rows = []
    for name in names:
        if name not in found:
            rows.append(Row(problem, name, error=errors[name]))
            continue
        pairs = list(zip(found[name], targets, strict=True))
        hits = [record.reached(target) for record, target in pairs]
        base = [
            record.reached(target) for record, target in zip(found["adamw"], targets, strict=True)
        ]
        ratios = [
            None if hit is None or own is None else hit.seconds / own.seconds
            for hit, own in zip(hits, base, strict=True)
        ]
        steps = tuple(None if hit is None else hit.step for hit in hits)
        lowest = tuple(record.best_loss for record in found[name])
        rows.append(Row(problem, name, tuple(ratios), steps, lowest, tuple(targets)))
    return rows


def main(
    problems: Annotated[
        list[str] | None, typer.Argument(help=f"From: {', '.join(PROBLEMS)}.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1",
    optimizers: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(
        (*TRUST_REGIONS, *PEERS)
    ),
    seconds: Annotated[float, typer.Option(help="Of the processor, for a peer's run.")] = 2.0,
    longer: Annotated[float, typer.Option(help="Times that, for the trust regions.")] = 2.0,
    unseen: Annotated[bool, typer.Option("--unseen", help="Also those kept for the end.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run the named optimizers anew.")] = False,
    tune_only: Annotated[bool, typer.Option("--tune", help="Tune the peers, no report.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="Of tuning, for each peer.")] = 12,
    output: Annotated[Path, typer.Option(help="The folder of runs.")] = Path("runs/suite"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train missing runs, and print the comparison."""
    names = optimizers.split(",")
    if unknown := set(names) - {*TRUST_REGIONS, *PEERS, *UNTUNED}:
        raise typer.BadParameter(f"no optimizer {min(unknown)!r} here")
    if unknown := set(problems or ()) - set(PROBLEMS):
        raise typer.BadParameter(f"no problem {min(unknown)!r} here")
    if "adamw" not in names:
        raise typer.BadParameter("adamw sets the targets")
    numbers = [int(seed) for seed in seeds.split(",")]

    def configure(problem: str, name: str, seed: int) -> RunConfig:
        return configuration(problem, name, seed, seconds, longer)

    made = []
    for problem in problems or [name for name in PROBLEMS if unseen or name not in UNSEEN]:
        if tune_only:
            tune(problem, seconds, trials)
            continue
        for name in names if fresh else ():
            for seed in numbers:
                path = output / f"{digest(configure(problem, name, seed), 1)}.json"
                path.unlink(missing_ok=True)
        made += measure(problem, numbers, names, configure, output)
        print(f"{problem}: done", flush=True)
    if as_json:
        print(json.dumps(jsonable([asdict(row) for row in made]), indent=1))
    elif made:
        show(made)


def show(made: list[Row]) -> None:
    """Print a table, and on how many problems the trust regions got there in time."""
    columns = ("problem", "optimizer", "time to AdamW's loss, of AdamW's", "steps", "lowest loss")
    rows = []
    for row in made:
        ratios = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in row.ratios)
        steps = ", ".join("-" if step is None else str(step) for step in row.steps)
        lowest = ", ".join(f"{loss:.4g}" for loss in row.lowest)
        rows.append([row.problem, row.optimizer, ratios, steps, (row.error or lowest)[:60]])
    screen = display.console(width=140)
    title = f"the suite, one thread, torch {torch.__version__}"
    screen.print(display.table(title, columns, rows, left=len(columns)))
    for name in TRUST_REGIONS:
        own = [row for row in made if row.optimizer == name]
        for times in (1.0, 1.5, 2.0) if own else ():
            count = sum(row.all_within(times) for row in own)
            screen.print(
                f"{name} within {times:g} times AdamW's time on every seed: {count} of {len(own)}"
            )


if __name__ == "__main__":
    typer.run(main)
