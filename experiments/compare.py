"""Comparisons for a paper: optimizers x strategies x seeds x numbers of ranks on one workload.

The output folder has every run and every trial in a file of its own, so that an interrupted
comparison goes on; and the results as JSON, Markdown, LaTeX, CSV and plots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import soframe
from experiments import display, runs, tables, train, tuning
from experiments.config import PRECONDITIONED, RunConfig, method_of
from experiments.environment import environment, sources
from experiments.records import MARK, RunRecord, ranks, write_json
from experiments.tables import Group, Table
from experiments.workloads import workload

STRATEGIES = ("comm-opt",)
SUFFIXES = ("json", "md", "tex", "csv", "svg", "pdf", "png")


@dataclass(frozen=True)
class Plan:
    """A comparison.

    Attributes:
        workload: The workload's name, see `experiments.workloads.workload`.
        optimizers: Names of optimizers.
        strategies: Strategies of the optimizers that have one: a row for each.
        seeds: Seeds of each row.
        processes: Numbers of ranks: a row for each.
        seconds: Seconds of training of a run and of a trial: of processor time on one rank, else by
            the clock.
        steps: Steps of a run and of a trial, instead.
        trials: Trials of tuning for each optimizer; 0 for settings that are known already.
        evaluate_every: Steps between evaluations; the workload's if None.
        output: The folder of runs, trials and results.
    """

    workload: str
    optimizers: tuple[str, ...]
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    processes: tuple[int, ...]
    seconds: float | None
    steps: int | None
    trials: int
    evaluate_every: int | None
    output: Path

    def __post_init__(self) -> None:
        size = workload(self.workload).batch_size  # a file also registers methods of its own
        for seed in self.seeds:
            tuning.require_other_seed(seed)
        if (self.seconds is None) == (self.steps is None):
            raise ValueError("give a budget in seconds or in steps, not both")
        if self.strategies != STRATEGIES and not any(map(has_strategy, self.optimizers)):
            raise ValueError(
                "--strategies is of kfac, trust-region and soframe:METHOD, which are not among "
                "--optimizers"
            )
        # Wrong names and sizes are errors before the first trial.
        for name in self.optimizers:
            for way in self.ways(name):
                RunConfig(self.workload, name, lr=1.0, **self.fields, **way)
        for count in self.processes:
            if size and size % count:
                raise ValueError(f"a batch of {size} cannot be split evenly over {count} processes")

    @property
    def name(self) -> str:
        """The name of the files of results."""
        return self.workload.rpartition("/")[2].removesuffix(".py").replace(":", "-")

    @property
    def budget(self) -> str:
        """The length of a run, in words."""
        return tuning.budget(self.seconds, self.steps)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `RunConfig` that runs and trials have in common."""
        every = self.evaluate_every
        return {"seconds": self.seconds, "steps": self.steps, "evaluate_every": every}

    def ways(self, optimizer: str) -> list[dict[str, Any]]:
        """Return the fields of `RunConfig` for each row of an optimizer."""
        return [{"strategy": s} for s in self.strategies] if has_strategy(optimizer) else [{}]

    @property
    def word(self) -> str:
        """See `experiments.runs.digest`."""
        return f"soframe {soframe.__version__} {workload(self.workload).digest} {sources()}"


def has_strategy(optimizer: str) -> bool:
    """Whether an optimizer distributes work by a strategy."""
    return optimizer in (*PRECONDITIONED, "trust-region") or method_of(optimizer) is not None


def compare(plan: Plan, screen: Console) -> tuple[Table, dict[str, Any]]:
    """Tune, train and write the results.

    Args:
        plan: The comparison.
        screen: Shows progress.

    Returns:
        The table, and the content of the JSON.
    """
    tuned = {name: _settle(plan, name, screen) for name in plan.optimizers}
    contenders: list[tuple[str, RunConfig]] = []
    for name, (settings, mark, _) in tuned.items():
        for way in plan.ways(name):
            config = tuning.configure(plan.workload, name, settings, **plan.fields, **way)
            contenders.append((mark, config))
    groups = []
    for processes in plan.processes:
        # Processor time leaves out other work on the machine, and waiting for other ranks too.
        clock = "cpu" if processes == 1 else "wall"
        configs: list[RunConfig] = []
        for seed in plan.seeds:
            fields = {"seed": seed, "stop_at_target": False, "clock": clock}
            configs += [config.but(**fields) for _, config in contenders]
        records = runs.kept(
            configs,
            plan.output / "runs",
            train=partial(_trained, processes, screen),
            processes=processes,
            word=plan.word,
            on_kept=partial(_say_kept, screen, plan.output / "runs"),
        )
        for index, (mark, _) in enumerate(contenders):
            groups.append(Group(tuple(records[index :: len(contenders)]), mark))
    return _report(plan, groups, {name: outcome for name, (_, _, outcome) in tuned.items()})


def _say_kept(screen: Console, folder: Path, number: int) -> None:
    screen.print(
        f"{number} run(s) are taken from {folder}, of the same settings, sources and versions",
        soft_wrap=True,
    )


def _settle(
    plan: Plan, optimizer: str, screen: Console
) -> tuple[Mapping[str, Any], str, tuning.Tuned | None]:
    """Return settings, their origin in words, and the outcome of the trials, if there are any."""
    if not plan.trials or tuning.space_of(plan.workload, optimizer) is None:
        return *tuning.settled(plan.workload, optimizer), None
    with display.trials(screen, optimizer, plan.trials) as (tell, watch):
        keep = partial(
            runs.kept,
            folder=plan.output / "trials",
            train=partial(map, partial(train.train, replace(train.ALONE, send=watch))),
            word=plan.word,
        )
        outcome = tuning.tune(
            plan.workload,
            optimizer,
            targets=workload(plan.workload).targets,
            trials=plan.trials,
            trained=lambda config: keep([config])[0],
            on_trial=tell,
            **plan.fields,
        )
    return outcome.best.settings, outcome.mark, outcome


def _trained(processes: int, screen: Console, configs: Sequence[RunConfig]) -> Iterator[RunRecord]:
    """Train in fresh processes, one run at a time, with a progress bar for each."""
    for number, config in enumerate(configs, 1):
        label = f"{number}/{len(configs)} {config.label}, seed {config.seed}, ranks {processes}"
        with display.bars(screen, [label]) as watch:
            record = train.run(config, processes=processes, on_progress=partial(watch, label))
        yield replace(record, environment=environment(config.threads))


def _report(
    plan: Plan,
    groups: Sequence[Group],
    outcomes: Mapping[str, tuning.Tuned | None],
) -> tuple[Table, dict[str, Any]]:
    """Write all files, and return the table and the content of the JSON."""
    problem = workload(plan.workload)
    table = tables.summary(problem, groups, plan.budget)
    paths = {suffix: plan.output / f"{plan.name}.{suffix}" for suffix in SUFFIXES}
    rows: list[dict[str, Any]] = []
    for group in groups:
        for record in group.records:
            marked = replace(record, settings_from=group.tuning)
            rows.append({"label": group.label, "tuned": marked.tuned, **marked.as_dict()})
    first = groups[0].records[0]
    source = None
    if problem.source:
        source = {"path": str(problem.source), "sha256": problem.digest}
    content = {
        "workload": plan.workload,
        "source": source,
        "title": problem.title,
        "loss": problem.loss_name,
        "budget": plan.budget,
        "seeds": plan.seeds,
        "processes": plan.processes,
        "targets": first.targets,
        "environment": environment(first.config.threads),
        "tuning": {name: asdict(outcome) for name, outcome in outcomes.items() if outcome},
        "table": table.as_dict(),
        "runs": rows,
        "files": {suffix: str(path) for suffix, path in paths.items()},
    }
    write_json(paths["json"], content)
    paths["md"].write_text(table.markdown(), encoding="utf-8")
    paths["tex"].write_text(table.latex(plan.name), encoding="utf-8")
    paths["csv"].write_text(tables.tidy(groups), encoding="utf-8")
    figure = display.loss_bands(problem, _named(groups), _title(plan, problem.title))
    for suffix in ("svg", "pdf", "png"):
        display.save(figure, paths[suffix])
    return table, content


def _named(groups: Sequence[Group]) -> dict[str, Sequence[RunRecord]]:
    """Return runs by their name in the legend, with the origin of the settings."""
    several = len({group.processes for group in groups}) > 1
    named: dict[str, Sequence[RunRecord]] = {}
    for label, group in zip(tables.labels(groups, MARK), groups, strict=True):
        name = label
        if several:
            name += f", {ranks([group.processes])}"
        named[f"{name} ({group.tuning})"] = group.records
    return named


def _title(plan: Plan, title: str) -> str:
    where = f"{title}, {ranks(plan.processes)}"
    if len(plan.seeds) == 1:
        return f"{where}, seed {plan.seeds[0]}"
    return f"{where}: mean and range of {len(plan.seeds)} seeds"
