"""The commands of `python -m experiments`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import compare as comparing
from experiments import demo as demonstration
from experiments import display, tuning
from experiments.config import OPTIMIZERS, OWN, RunConfig, method_of
from experiments.launch import WorkerError
from experiments.libraries import MissingLibraryError
from experiments.records import RunRecord
from experiments.train import run
from experiments.workloads import names, workload

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Seed = Annotated[int, typer.Option(help="Of weights, data order and data split.")]
Processes = Annotated[int, typer.Option(min=1, help="Processes that share each batch, over Gloo.")]
Strategies = Annotated[
    str, typer.Option(help="Of preconditioners, separated by commas: a row for each.")
]
WorkloadName = Annotated[
    str,
    typer.Option(
        "--workload", help=f"One of: {', '.join(names())}; recipe:NAME; or a Python file."
    ),
]
CHOICES = f"{', '.join(OPTIMIZERS)} or {OWN}METHOD"


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Print errors that a user can put right in one line; others keep their traceback."""
    try:
        yield
    except (ValueError, OSError, MissingLibraryError, WorkerError) as error:
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
    with _user_errors():
        # All plans first: wrong arguments are an error before the first run.
        plans = {
            name: demonstration.configurations(name, budget, seed) for name in demonstration.SHARES
        }
        parts = []
        for name, configs in plans.items():
            if not as_json:
                title = f"[bold]{workload(name).title}[/bold], {processes} process(es)"
                display.console().print(title)
            records = demonstration.marked(_run(configs, processes, as_json=as_json))
            sentences = demonstration.sentences(name, records)
            parts.append(_report(name, records, sentences, output, as_json=as_json))
    if as_json:
        display.print_json({"processes": processes, "seed": seed, "workloads": parts})
    else:
        display.console().print(f"In short: {parts[0]['summary'][0]}", highlight=False)


@app.command()
def train(
    workload_name: WorkloadName = "digits-autoencoder",
    optimizer: Annotated[str, typer.Option(help=f"{CHOICES}.")] = "kfac",
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate. Without it, all settings are those that tuning chose."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any field of RunConfig (experiments/config.py), or an argument: "
            "preconditioner.damping=0.01 with kfac, options.solve_every=5 or method.beta=0.9 "
            "with others.",
        ),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Budget of training seconds.")] = None,
    steps: Annotated[int | None, typer.Option(help="Budget in steps.")] = None,
    processes: Processes = 1,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train once."""
    with _user_errors():
        if lr is None:
            chosen = dict(tuning.chosen(workload_name, optimizer))
        else:
            method_of(optimizer)
            chosen = {"lr": lr}
        for setting in settings or ():
            name, equals, value = setting.partition("=")
            if not equals:
                raise ValueError(f"--set takes NAME=VALUE, not {setting!r}")
            chosen[name] = _parsed(value)
        if not (seconds or steps):
            seconds = 10.0
        budget = {"seconds": seconds, "steps": steps}
        config = tuning.configure(workload_name, optimizer, chosen, seed=seed, **budget)
        records = _run([config], processes, as_json=as_json)
    if as_json:
        display.print_json(records[0].as_dict())
    else:
        display.console().print(display.comparison(workload(workload_name), records))


def _parsed(text: str) -> Any:
    """Return a number, a word of JSON (true, null), or the text itself."""
    import json

    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@app.command()
def compare(
    workload_name: WorkloadName = "digits-autoencoder",
    optimizers: Annotated[
        str, typer.Option(help=f"Separated by commas: {CHOICES}.")
    ] = "sgd,adamw,kfac",
    strategies: Strategies = comparing.STRATEGIES[0],
    seeds: Annotated[
        str, typer.Option("--seeds", "--seed", help="Separated by commas: runs of each row.")
    ] = "0,1,2",
    processes: Annotated[
        str, typer.Option(help="Numbers of processes, separated by commas: a row for each.")
    ] = "1",
    seconds: Annotated[
        float | None, typer.Option(help="Training seconds of each run; 15 without --steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run instead.")] = None,
    tune: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TRIALS",
            help="Search for settings first: so many trials for each optimizer. Without it, "
            "settings are known from an earlier search, or are defaults, marked as untuned.",
        ),
    ] = 0,
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="The folder of runs and results; the same one resumes.")
    ] = Path("runs/compare"),
    as_json: AsJson = False,
) -> None:
    """Compare optimizers over several seeds: tables, curves and data for a paper.

    Results are written as JSON, Markdown, LaTeX, CSV, SVG, PDF and PNG. An interrupted command goes
    on where it stopped. docs/guides/comparing.md has an example.
    """
    with _user_errors():
        if seconds is None and steps is None:
            seconds = 15.0
        plan = comparing.Plan(
            workload_name,
            _parts(optimizers),
            _parts(strategies),
            _numbers("--seeds", seeds, 0),
            _numbers("--processes", processes, 1),
            seconds,
            steps,
            tune,
            evaluate_every,
            output,
        )
        screen = display.console(to_stderr=as_json, width=160)
        try:
            table, content = comparing.compare(plan, screen)
        except KeyboardInterrupt as interrupt:
            kept = f"finished runs are kept in {output}, and the same command goes on"
            typer.echo(f"interrupted: {kept}", err=True)
            raise typer.Exit(130) from interrupt
    if as_json:
        display.print_json(content)
        return
    screen.print(table.terminal())
    screen.print(" ".join(table.notes), highlight=False)
    if len({str(run["environment"]["commit"]) for run in content["runs"]}) > 1:
        screen.print("Attention: these runs are of several commits.")
    screen.print(f"Files: {', '.join(content['files'].values())}", soft_wrap=True, highlight=False)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    parts = _parts(text)
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        message = f"{option} takes numbers from {least}, separated by commas, not {text!r}"
        raise ValueError(message)
    return tuple(map(int, parts))


@app.command()
def tune(
    workload_name: Annotated[
        str, typer.Option("--workload", help="The demonstration's if left out.")
    ] = "digits-autoencoder,digits-cnn",
    optimizers: Annotated[str, typer.Option(help="Separated by commas.")] = "sgd,adamw,kfac",
    trials: Annotated[int, typer.Option(min=1, help="For each optimizer.")] = 16,
    seconds: Annotated[float, typer.Option(help="Of training, for each trial.")] = 10.0,
    output: Annotated[Path, typer.Option(help="The file of outcomes.")] = tuning.DEMO,
) -> None:
    """Search for settings, the same number of trials for each optimizer, and keep every trial."""
    with _user_errors():
        for name in workload_name.split(","):
            targets = workload(name).targets
            for optimizer in optimizers.split(","):
                typer.echo(f"{name}, {optimizer}")
                outcome = tuning.tune(
                    name, optimizer, targets=targets, seconds=seconds, trials=trials
                )
                outcome.save(output, name, optimizer)
                typer.echo(f"  best: {outcome.best}")


def _run(configs: Sequence[RunConfig], processes: int, *, as_json: bool) -> list[RunRecord]:
    """Train one after the other, with a progress bar for each."""
    labels = [config.label for config in configs]
    with display.bars(display.console(to_stderr=as_json), labels) as watch:
        return [
            run(config, processes=processes, on_progress=partial(watch, config.label))
            for config in configs
        ]


def _report(
    name: str, records: list[RunRecord], sentences: list[str], output: Path, *, as_json: bool
) -> dict[str, Any]:
    """Draw and print the runs of a workload, and return them as data."""
    problem, targets = workload(name), records[0].targets
    figure = display.loss_curves(problem, records, targets)
    plot = display.save(figure, output / f"{name}.png")
    if not as_json:
        screen = display.console()
        screen.print(display.comparison(problem, records))
        for sentence in sentences:
            screen.print(sentence, highlight=False)
        screen.print(f"Plot: {plot}\n", soft_wrap=True)
    runs = [{"label": record.label, **record.as_dict()} for record in records]
    return {
        "workload": name,
        "targets": targets,
        "runs": runs,
        "plot": str(plot),
        "summary": sentences,
    }


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m experiments")


if __name__ == "__main__":
    main()
