"""The `soframe` command, for tasks that need a model or a file of metrics, but no data.

Its libraries are optional, in the extra `cli`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:  # a traceback would hide what to install
    sys.exit(f"soframe: missing: {missing.name}. Install it with: pip install 'soframe[cli]'")

import torch

import soframe
from soframe import citations
from soframe.diagnostics import display
from soframe.diagnostics.metrics import scalars
from soframe.planning import inspection, planner
from soframe.planning.figure import front
from soframe.planning.hardware import Hardware, names
from soframe.planning.measure import measure as measure_hardware
from soframe.planning.task import Task
from soframe.planning.workloads import WORKLOADS
from soframe.registry import KINDS
from soframe.text import parse_bytes

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

AsJson = Annotated[
    bool, typer.Option("--json", help="Print machine-readable results, and nothing else.")
]
Kind = Annotated[str | None, typer.Option(help="The kind of model, as of soframe.recommend.")]
Ranks = Annotated[int, typer.Option("--ranks", "--world-size", min=1, help="The number of ranks.")]


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


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Print errors that a user can put right in one line; others keep their traceback."""
    try:
        # A user's module may print, and results may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Builds the model.")],
    ranks: Ranks = 1,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Which rank solves, keeps and sends what; by default as recommended, or comm-opt "
            "with --method."
        ),
    ] = None,
    kind: Kind = None,
    method: Annotated[
        str | None, typer.Option(help="The method of the plan, in place of the recommended one.")
    ] = None,
    solver: Annotated[str | None, typer.Option(help="The solver of the plan.")] = None,
    all_layers: Annotated[
        bool,
        typer.Option(
            "--all-layers",
            help='As with layers="all": norms, embeddings and others have blocks too.',
        ),
    ] = False,
    meta: Annotated[
        bool, typer.Option("--meta", help="Build the model without memory for its weights.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recommend a method for your model, and show a plan: every parameter, and every rank.

    The callable is imported and called without arguments. Nothing is trained, and the ranks exist
    on paper only.
    """
    with _user_errors():
        built = inspection.build_model(model, meta=meta)
        advice = soframe.recommend(built, ranks=ranks, kind=kind)
        settings = {"strategy": advice.strategy, **advice.plan}
        if method is not None:
            settings = {"strategy": "comm-opt", "method": method}
        if strategy is not None:
            settings["strategy"] = strategy
        if solver is not None:
            settings["solver"] = solver
        if all_layers:
            settings["layers"] = "all"
        report, placement = inspection.inspect(built, ranks=ranks, **settings)
    if as_json:
        plain = {name: value for name, value in vars(advice).items() if name != "plan"}
        _print_json({"recommendation": plain, **inspection.as_dict(report, placement)})
    else:
        typer.echo(f"{report}\n\n{placement}\n\n{advice}")


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:CALLABLE",
            help="Builds the model; or the name of a workload: see --list.",
        ),
    ] = None,
    ranks: Ranks = 1,
    hardware: Annotated[
        str, typer.Option(help="A profile by name, or a file that --measure wrote.")
    ] = "h100-ib",
    memory: Annotated[
        str | None, typer.Option(help="What a rank may hold for curvature, such as 2GiB.")
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="The shape of an input, such as 32x3x224x224, or 8x1024:int64."
        ),
    ] = None,
    kind: Kind = None,
    method: Annotated[
        str | None, typer.Option(help="The method, in place of the recommended one.")
    ] = None,
    auxiliary: Annotated[
        str | None, typer.Option(help="With --method: the method of the other parameters.")
    ] = None,
    solver: Annotated[str | None, typer.Option(help="The solver.")] = None,
    statistics_every: Annotated[
        int | None, typer.Option(min=1, help="The interval of statistics; else the method's.")
    ] = None,
    solve_every: Annotated[
        int | None, typer.Option(min=1, help="The interval of solves; else the method's.")
    ] = None,
    vary: Annotated[
        list[planner.Vary] | None, typer.Option(help="Vary a setting beside the strategy.")
    ] = None,
    amp: Annotated[bool, typer.Option("--amp", help="Passes in bfloat16.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw time against memory into an image.")
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(help="Measure this machine into a profile, and plan on it.")
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List workloads and hardware, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Price strategies for a model in time and memory, and choose one; nothing runs.

    Ranks and hardware exist on paper, weights need no memory, and 4,096 ranks fit a laptop.
    The exit code is 2 if no strategy fits.
    """
    if listing:
        _list_plans()
        return
    with _user_errors():
        if measure is not None:
            hardware = _measure(measure)
            if model is None:
                return
        built, inputs = inspection.problem(model or "", shapes)
        settings: dict[str, Any] = {"method": method, "auxiliary": auxiliary}
        recommended: soframe.Strategy | None = None
        if method is None:
            advice = soframe.recommend(built, kind=kind)
            settings = dict(advice.plan)
            recommended = KINDS["strategy"].build(advice.strategy, soframe.Strategy)
        options = planner.usual(ranks, statistics_every=statistics_every, solve_every=solve_every)
        planned = planner.plan(
            Task.of(built, inputs, solver=solver, **settings),
            ranks=ranks,
            hardware=Hardware.load(hardware),
            memory_limit=None if memory is None else parse_bytes(memory),
            options=planner.varied(options, vary or []),
            amp=amp,
            recommended=recommended,
        )
        if figure is not None:
            _draw(front(planned), figure)
    _show(planned, as_json=as_json)


def _measure(path: Path) -> str:
    measure_hardware("cuda" if torch.cuda.is_available() else "cpu").save(path)
    typer.echo(f"profile: {path}", err=True)
    return str(path)


def _draw(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _show(planned: planner.Plan, *, as_json: bool) -> None:
    if as_json:
        _print_json(planned.as_dict())
    else:
        typer.echo(str(planned))
    if not planned.fitting:
        typer.echo(f"error: {planned.misfit}", err=True)
        sys.exit(2)


def _list_plans() -> None:
    workloads = [("workload", name, workload.note) for name, workload in WORKLOADS.items()]
    profiles = [("hardware", name, Hardware.load(name).source) for name in names()]
    _print_table(("kind", "name", "source"), [workloads, profiles])


@app.command()
def metrics(
    file: Annotated[Path, typer.Argument(help="The return value of metrics(), as JSON.")],
    figure: Annotated[
        Path | None, typer.Option(help="Draw spectra, condition numbers and ages into an image.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the metrics of a preconditioner: by block, by factor and by phase.

    With --json the numbers for loggers, by name.
    """
    with _user_errors():
        read = display.read(file)
        if figure is not None:
            _draw(display.figure(read), figure)
    if as_json:
        _print_json(scalars(read))
        return
    screen = _console()
    for table in display.tables(read):
        screen.print(table)
    if figure is not None:
        screen.print(f"Plot: {figure}", soft_wrap=True)


@app.command()
def components(as_json: AsJson = False) -> None:
    """List the registered components by kind, including plug-ins."""
    registered: dict[str, dict[str, str]] = {}
    for kind in KINDS:
        classes = soframe.available(kind)
        registered[kind] = {_name(key): _name(c) for key, c in classes.items()}
    if as_json:
        _print_json(registered)
        return
    sections = []
    for kind, entries in registered.items():
        sections.append([(kind, *entry) for entry in sorted(entries.items())])
    _print_table(("kind", "name", "class"), sections)


@app.command()
def cite(
    name: Annotated[list[str] | None, typer.Argument(help="Components, such as kfac.")] = None,
    module: Annotated[
        list[str] | None,
        typer.Option("--import", help="A module that registers components, imported first."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print BibTeX of components and of soframe; without a name, list what can be cited."""
    with _user_errors():
        for imported in module or ():
            inspection.import_module(imported)
        cited = citations.cite(*name or ())
    if as_json and name:
        _print_json({key: citations.fields(entry) for key, entry in cited.items()})
    elif as_json:
        _print_json(citations.papers())
    elif name:
        typer.echo("\n\n".join(cited.values()))
    else:
        _print_table(("kind", "name", "papers"), map(_rows, citations.papers().items()))


def _rows(papers: tuple[str, dict[str, tuple[str, ...]]]) -> list[tuple[str, str, str]]:
    kind, known = papers
    return [(kind, name, ", ".join(keys) or "none") for name, keys in known.items()]


def _name(key: object) -> str:
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else str(key)


def _print_table(header: Sequence[str], sections: Iterable[Sequence[Sequence[str]]]) -> None:
    table = Table(*header)
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    _console().print(table)


def _console() -> Console:
    screen = Console()
    if not screen.is_terminal:
        screen.width = max(screen.width, 100)  # no terminal, no edge to wrap at
    return screen


def _print_json(value: Any) -> None:
    # NaN and infinity are no JSON: `allow_nan=False` raises instead of writing them.
    print(json.dumps(value, indent=1, allow_nan=False))


def main() -> None:
    """Run the command line; the entry point of the `soframe` script."""
    app(prog_name="soframe")
