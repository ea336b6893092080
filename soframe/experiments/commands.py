"""The commands of `soframe`: what each option means, and what is printed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import soframe
from soframe.experiments import demo as demonstration
from soframe.experiments import metrics as measured
from soframe.experiments import plots, tables, tuning
from soframe.experiments.compare import (
    STRATEGIES,
    Comparison,
    Watch,
    bars,
    compare,
    console,
    jsonable,
)
from soframe.experiments.config import TRUST_REGIONS, RunConfig, method_of
from soframe.experiments.inspection import as_dict, build_model, inspect
from soframe.experiments.launch import WorkerError
from soframe.experiments.records import FIRST_ORDER, SECOND_ORDER, verdict
from soframe.experiments.train import run
from soframe.experiments.workloads import names, workload
from soframe.registry import KINDS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"soframe {soframe.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """soframe: second-order optimisation in PyTorch, distributed, every part pluggable."""


AsJson = Annotated[
    bool, typer.Option("--json", help="Print machine-readable results, and nothing else.")
]
Seed = Annotated[int, typer.Option(help="Of weights, data order and data split.")]
Processes = Annotated[int, typer.Option(min=1, help="Processes that share each batch, over Gloo.")]
WHICH_STRATEGY = "Which rank solves, keeps and sends what; `soframe components` lists all."
Strategy = Annotated[str, typer.Option(help=WHICH_STRATEGY)]
StrategyOfSecondOrder = Annotated[
    str,
    typer.Option(help=f"{WHICH_STRATEGY} Not of sgd, adamw and stochastic-trust-region."),
]


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turns what a user can put right into one line; everything else keeps its traceback."""
    try:
        yield
    except (ValueError, OSError, WorkerError) as error:  # a TimeoutError is an OSError
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def demo(
    budget: Annotated[float, typer.Option(help="Seconds for everything, about.")] = 105.0,
    processes: Processes = 2,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="The folder of the plots.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Train side by side: SGD, AdamW, K-FAC under each distribution strategy, and a trust region.

    Every optimizer runs with the settings that the same tuning protocol chose for it (the trust
    region with the library's defaults), and with the same budget of training seconds. A small
    transformer comes last, with AdamW, Muon and a composed method.
    """
    screen = console(to_stderr=as_json)

    def watch(title: str, labels: Sequence[str]) -> AbstractContextManager[Watch]:
        screen.print(f"[bold]{title}[/bold], {processes} process(es)")
        return bars(screen, labels)

    def show(part: demonstration.Part) -> None:
        if as_json:
            return
        _show(part.comparison, part.sentences)
        screen.print(f"Plot: {part.plot}\n", soft_wrap=True)

    with _user_errors():
        parts = demonstration.run(
            budget=budget, processes=processes, seed=seed, output=output, watch=watch, show=show
        )
    if as_json:
        _print_json(
            {
                "budget_seconds": budget,
                "processes": processes,
                "seed": seed,
                "workloads": [part.as_dict() for part in parts],
            }
        )


@app.command()
def train(
    workload_name: Annotated[
        str, typer.Option("--workload", help=f"One of: {', '.join(names())}.")
    ] = "digits-autoencoder",
    optimizer: Annotated[
        str,
        typer.Option(
            help="sgd, adamw, kfac, trust-region, stochastic-trust-region or soframe:METHOD."
        ),
    ] = "kfac",
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate. Without it, all settings are those that tuning chose."),
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd and kfac.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of all optimizers.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, cosine or linear.")] = None,
    schedule_steps: Annotated[int | None, typer.Option(help="Its length.")] = None,
    strategy: StrategyOfSecondOrder = "comm-opt",
    solver: Annotated[str | None, typer.Option(help="Of the factors, by name.")] = None,
    damping: Annotated[float | None, typer.Option(help="Added to the curvature.")] = None,
    decay: Annotated[float | None, typer.Option(help="Of the running factors.")] = None,
    kl_clip: Annotated[float | None, typer.Option(help="Bound on a step; 0 for none.")] = None,
    statistics_every: Annotated[
        int | None, typer.Option(help="Steps from one statistics step to the next.")
    ] = None,
    solve_every: Annotated[
        int | None, typer.Option(help="Steps from one solve to the next.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Budget of training seconds.")] = None,
    steps: Annotated[int | None, typer.Option(help="Budget in steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Over all processes.")] = None,
    processes: Processes = 1,
    seed: Seed = 0,
    tensorboard: Annotated[Path | None, typer.Option(help="A new folder for events.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train once.

    Settings that are not given are the ones that tuning chose; with --lr, those of the library.
    """
    changes = {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "schedule_steps": schedule_steps,
        "seconds": seconds if seconds or steps else 10.0,
        "steps": steps,
        "batch_size": batch_size,
    }
    options = {
        "solver": solver,
        "damping": damping,
        "decay": decay,
        "kl_clip": kl_clip,
        "statistics_every": statistics_every,
        "solve_every": solve_every,
    }
    with _user_errors():
        workload(workload_name)
        config = _configure(
            workload_name, optimizer, lr=lr, changes=_given(changes), options=_given(options)
        )
        config = config.but(strategy=strategy, seed=seed)
        _require_effect(config, changes)
        screen = console(to_stderr=as_json)
        with bars(screen, [config.label]) as watch:
            record = run(
                config,
                processes=processes,
                on_progress=lambda progress: watch(config.label, progress),
                tensorboard=tensorboard,
            )
    if as_json:
        _print_json(record.as_dict())
    else:
        _show(Comparison(workload_name, (record,)), ())


def _require_effect(config: RunConfig, changes: dict[str, Any]) -> None:
    """Refuse options that a run would not notice; `RunConfig` refuses those of its mappings."""
    if changes["momentum"] is not None and config.optimizer not in ("sgd", "kfac"):
        raise ValueError(f"--momentum is of sgd and kfac, and has no effect on {config.optimizer}")
    if changes["schedule_steps"] is not None and config.schedule == "constant":
        raise ValueError("--schedule-steps is of --schedule cosine or linear: pass one")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _configure(
    workload_name: str,
    optimizer: str,
    lr: float | None,
    changes: dict[str, Any],
    options: dict[str, Any],
) -> RunConfig:
    (name,) = tuning.optimizers([optimizer])
    if options.get("kl_clip") == 0:
        options["kl_clip"] = None
    field = "options" if name in TRUST_REGIONS or method_of(name) else "preconditioner"
    if name == "trust-region" and (refused := {"damping", "kl_clip"} & set(options)):
        raise ValueError(f"trust-region chooses its own {' and '.join(sorted(refused))}")
    if name == "stochastic-trust-region" and options:
        raise ValueError(
            f"{name} has no preconditioner, and so no {' or '.join(sorted(options))}: leave it out"
        )
    if lr is None:
        try:
            settings = dict(tuning.chosen(workload_name, name))
        except FileNotFoundError as error:
            raise ValueError(f"{error}; or pass --lr") from error
        settings |= {f"{field}.{option}": value for option, value in options.items()}
        return tuning.configure(workload_name, name, settings, **changes)
    arguments: dict[str, Any] = {field: options}
    return RunConfig(workload=workload_name, optimizer=name, **arguments, **changes)


@app.command("compare")
def compare_command(
    workload_name: Annotated[
        str, typer.Option("--workload", help=f"One of: {', '.join(names())}.")
    ] = "digits-autoencoder",
    optimizers: Annotated[
        str,
        typer.Option(
            help="Separated by commas, from: sgd, adamw, kfac, trust-region, "
            "stochastic-trust-region, soframe:METHOD."
        ),
    ] = "sgd,adamw,kfac",
    strategies: Annotated[
        str, typer.Option(help="Of K-FAC, separated by commas; one run for each.")
    ] = STRATEGIES[0],
    seconds: Annotated[float, typer.Option(help="Budget of training seconds for each run.")] = 15.0,
    processes: Processes = 1,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="The folder of the plot.")] = Path("runs/compare"),
    as_json: AsJson = False,
) -> None:
    """Compare tuned optimizers on one workload: a table and a plot."""
    with _user_errors():
        problem = workload(workload_name)
        chosen = tuning.optimizers(optimizers.split(","))
        ways = strategies.split(",")
        _require_once("--optimizers", chosen)
        _require_once("--strategies", ways)
        if strategies != STRATEGIES[0] and "kfac" not in chosen:
            raise ValueError(
                f"--strategies {strategies} is of kfac, which is not among --optimizers "
                f"{optimizers}: leave it out, or add kfac"
            )
        configs = [
            tuning.tuned(workload_name, name, seconds=seconds, seed=seed, strategy=strategy)
            for name in chosen
            for strategy in (ways if name == "kfac" else STRATEGIES[:1])
        ]
        screen = console(to_stderr=as_json)
        with bars(screen, [config.label for config in configs]) as watch:
            comparison = compare(configs, processes=processes, watch=watch)
        figure = plots.loss_curves(problem, comparison.records)
        plot = plots.save(figure, output / f"{workload_name}.png")
    ran = {config.optimizer for config in configs}
    said = [
        verdict(comparison.records, min(problem.targets), optimizer)
        for optimizer in SECOND_ORDER
        if optimizer in ran and ran & set(FIRST_ORDER)
    ]
    if as_json:
        _print_json({**comparison.as_dict(), "plot": str(plot), "summary": said})
        return
    _show(comparison, said)
    screen.print(f"Plot: {plot}", soft_wrap=True)


def _require_once(option: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{option} has {name!r} more than once, and every run is the same one")


@app.command("inspect")
def inspect_command(
    model: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Builds the model.")],
    world_size: Annotated[int, typer.Option(help="The number of ranks.")] = 1,
    strategy: Strategy = "comm-opt",
    method: Annotated[str, typer.Option(help="The curvature method.")] = "kfac",
    solver: Annotated[str, typer.Option(help="The solver.")] = "eigen",
    all_layers: Annotated[
        bool,
        typer.Option(
            "--all-layers",
            help='As with layers="all": norms, embeddings and others have blocks too.',
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a preconditioner would do with your model: every parameter, and every rank.

    The callable is imported and called without arguments. Nothing is trained, and the ranks exist
    on paper only.
    """
    with _user_errors():
        report, placement = inspect(
            build_model(model),
            world_size=world_size,
            strategy=strategy,
            method=method,
            solver=solver,
            all_layers=all_layers,
        )
    if as_json:
        _print_json(as_dict(report, placement))
        return
    typer.echo(f"{report}\n\n{placement}")


@app.command("metrics")
def metrics_command(
    file: Annotated[Path, typer.Argument(help="What metrics() returned, as JSON.")],
    figure: Annotated[
        Path | None, typer.Option(help="Draw spectra, condition numbers and ages into an image.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the metrics of a preconditioner: by block, by factor and by phase.

    With --json the numbers for loggers, by name.
    """
    with _user_errors():
        metrics = measured.read(file)
        if figure is not None:
            plots.save(measured.figure(metrics), figure)
    if as_json:
        _print_json(measured.scalars(metrics))
        return
    screen = console()
    for table in measured.tables(metrics):
        screen.print(table)
    if figure is not None:
        screen.print(f"Plot: {figure}", soft_wrap=True)


@app.command()
def components(as_json: AsJson = False) -> None:
    """List what is registered, by kind, installed plug-ins included."""
    registered = {
        kind: {_name(key): _name(component) for key, component in soframe.available(kind).items()}
        for kind in KINDS
    }
    if as_json:
        _print_json(registered)
        return
    table = Table("kind", "name", "class")
    for kind, entries in registered.items():
        for name, component in sorted(entries.items()):
            table.add_row(kind, name, component)
        table.add_section()
    console().print(table)


def _name(key: object) -> str:
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else str(key)


def _show(comparison: Comparison, sentences: Sequence[str]) -> None:
    screen = console()
    screen.print(tables.comparison(workload(comparison.workload), comparison.records))
    for sentence in sentences:
        screen.print(sentence, highlight=False)


def _print_json(value: object) -> None:
    json.dump(jsonable(value), sys.stdout, indent=1, allow_nan=False)
    print()
