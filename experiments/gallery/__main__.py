"""Race the gallery: ``python -m experiments.gallery``, two to five minutes of a processor.

Every method, and `BASELINES` of soframe, trains one small problem with as many learning rates,
`FACTORS` times its `RATES`, which follow from the length of its updates, on a seed of their own;
while the best is the lowest or the highest, a further one. The rate of the best last loss trains
on the seeds of the report. With ``--workload FILE`` the problem is the file's, and the methods that
it registers race, too. Runs are kept in the output folder, so that the same command goes on.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import soframe
from experiments import display, runs, tables, train
from experiments.config import RunConfig
from experiments.environment import sources
from experiments.records import RunRecord
from experiments.tuning import TUNING_SEED
from experiments.workloads import workload

BASELINES = ("adamw", "kfac", "muon", "shampoo", "soap", "soap-muon")
RATIO = 4.0
"""A rate over the next lower one."""
FACTORS = tuple(RATIO**power for power in range(-1, 4))
FURTHER = 3
"""Rates that are tried at most beyond the first ones."""
SEEDS = (0, 1, 2)
USUAL = 0.003
"""The rate of updates whose entries have a root mean square of about one, as Adam's."""
RATES = {
    **dict.fromkeys(("dion", "mousse", "muon", "muon-squared", "muon-vs", "soap-muon"), 0.02),
    **dict.fromkeys(("adamuon", "mars-muon", "muon-eq"), 0.015),
    **dict.fromkeys(("ikfac", "jorge", "kfac", "mkor", "polargrad"), 0.03),
    "racs": 0.06,
    "splus": 0.1,
}
OPTIONS: dict[str, dict[str, Any]] = {"mkor": {"statistics_every": 1}}


def contenders() -> list[str]:
    """Return `BASELINES` and all methods that are registered from outside of soframe."""
    names = set(BASELINES)
    for name, method in soframe.available("method").items():
        if not method.__module__.startswith("soframe."):
            names.add(name)
    return sorted(names - {"lora-pro"})  # which needs adapters


def configurations(name: str, problem: str, steps: int) -> list[RunConfig]:
    """Return the runs of tuning of a method, one for each rate."""
    return [
        RunConfig(
            problem,
            f"soframe:{name}",
            lr=factor * RATES.get(name, USUAL),
            schedule="cosine",
            options={"auxiliary": "adamw", **OPTIONS.get(name, {})},
            steps=steps,
            seed=TUNING_SEED,
            stop_at_target=False,
            clock="cpu",
        )
        for factor in FACTORS
    ]


def best(records: Sequence[RunRecord]) -> tables.Group:
    """Return the run of the best rate, with the rate, marked if it is the least or the largest."""
    finite = [record for record in records if not record.diverged] or list(records)
    chosen = min(finite, key=lambda record: record.last.loss)
    rates = [record.config.lr for record in records]
    edge = chosen.config.lr in (min(rates), max(rates))
    return tables.Group((chosen,), f"lr {chosen.config.lr:g}{' (end)' if edge else ''}")


def tuned(first: Sequence[RunConfig], trained: Callable[..., list[RunRecord]]) -> tables.Group:
    """Return the best run of these, or of further ones while the best is at an end."""
    records = trained(first)
    for _ in range(FURTHER):
        config = best(records).records[0].config
        rates = [record.config.lr for record in records]
        if config.lr == max(rates):
            rate = config.lr * RATIO
        elif config.lr == min(rates):
            rate = config.lr / RATIO
        else:
            break
        records += trained([config.but(lr=rate)])
    return best(records)


def mean_loss(group: tables.Group) -> float:
    """Return the mean of the last losses, infinite if one is not finite."""
    if len(group.converged) < len(group.records):
        return math.inf
    return statistics.fmean(record.last.loss for record in group.records)


def apart(groups: Sequence[tables.Group]) -> str:
    """Return in words how many pairs of methods have losses that their seeds do not mix."""
    ranges = []
    for group in groups:
        losses = [record.last.loss for record in group.records]
        ranges.append((min(losses), max(losses)))
    pairs = list(itertools.combinations(ranges, 2))
    count = sum(first[1] < second[0] or second[1] < first[0] for first, second in pairs)
    return (
        f"Of {len(pairs)} pairs of methods {count} have ranges over the seeds that do not overlap."
    )


def race(
    problem: Annotated[str, typer.Option("--workload")] = "problem:norms",
    steps: int = 100,
    output: Path = Path("runs/gallery"),
) -> None:
    """Train all methods, print the table, and write it as Markdown and LaTeX."""
    screen = display.console()
    task = workload(problem)  # a file also registers methods of its own

    def trained(missing: Sequence[RunConfig]) -> Iterator[RunRecord]:
        for config in missing:
            record = train.train(train.ALONE, config)
            screen.print(f"{config.label}, lr {config.lr:g}: {record.last.loss:.4g}")
            yield record

    word = f"soframe {soframe.__version__} {task.digest} {sources()}"
    kept = partial(runs.kept, folder=output / "runs", train=trained, processes=1, word=word)
    groups = []
    for name in contenders():
        group = tuned(configurations(name, problem, steps), kept)
        config = group.records[0].config
        records = kept([config.but(seed=seed) for seed in SEEDS])
        groups.append(tables.Group(tuple(records), group.tuning))
    groups.sort(key=mean_loss)
    table = tables.summary(task, groups, f"{steps} steps")
    table = replace(table, notes=(*table.notes, apart(groups)))
    screen.print(table.terminal())
    screen.print(apart(groups))
    for suffix, text in (("md", table.markdown()), ("tex", table.latex("gallery"))):
        (output / f"gallery.{suffix}").write_text(text, encoding="utf-8")
        screen.print(output / f"gallery.{suffix}")


if __name__ == "__main__":
    typer.run(race)
