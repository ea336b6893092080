"""The overhead of a step: steps of a model so narrow that arithmetic hardly counts.

    python -m benchmarks.small_steps
    python -m benchmarks.small_steps --kfac-path kfac-pytorch --json
    python -m benchmarks.small_steps --width 0            # CURVES itself, 2000 rows
    python -m benchmarks.small_steps --profile "trust region"

An autoencoder of eight layers, as deep as CURVES's. Every contender trains its own copy and all
take turns of 30 steps. A step is counted in milliseconds (the median of turns), in operators that
torch dispatches and in calls of functions, of Python and of C; the last two do not depend on how
fast a machine is. ``--profile`` lists the functions in which a contender's steps spend their time.
"""

from __future__ import annotations

import copy
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import soframe
from experiments.display import console
from experiments.libraries import (
    KFAC_PYTORCH_MISSING,
    MissingLibraryError,
    import_kfac_pytorch,
    require,
)
from experiments.muon import muon_with_adamw, split
from experiments.train import numerics
from experiments.workloads import workload

TURN = 30
"""Steps: a multiple of every interval at which statistics are taken or factors solved."""

Step = Callable[[], object]


class Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches.

    Attributes:
        count: How many so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(step: Step, steps: int = TURN) -> float:
    """Return how many operators a step dispatches, as a mean over steps."""
    with Operators() as counted:
        for _ in range(steps):
            step()
    return counted.count / steps


def calls(step: Step, steps: int = TURN) -> float:
    """Return the number of functions that a step calls, including C functions.

    Garbage from before the step, whose finalizers would be counted, is collected first; garbage
    collection is off meanwhile.
    """
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return found / steps


def problem(width: int, layers: int = 8, rows: int = 64) -> tuple[nn.Module, Tensor]:
    """Return a model and its inputs, which are its targets.

    Args:
        width: Of every layer; 0 for CURVES, with all of its images.
        layers: How many.
        rows: Of the inputs.
    """
    if width == 0:
        curves = workload("curves").make(0, torch.float32)
        return curves.model, curves.train[0]
    torch.manual_seed(0)
    deep = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*deep[:-1]), torch.rand(rows, width)


def contenders(model: nn.Module, x: Tensor, kfac_path: Path | None = None) -> dict[str, Step]:
    """Return the steps of all contenders; the first only runs forward and backward.

    Args:
        model: Each contender trains a copy.
        x: Inputs and targets.
        kfac_path: A folder with kfac-pytorch; None for the installed one.
    """
    found: dict[str, Step] = {"forward and backward": _first_order(model, x, lambda m: None)}
    found["SGD"] = _first_order(
        model, x, lambda m: torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9)
    )
    found["AdamW"] = _first_order(
        model, x, lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True)
    )
    found["Muon, single precision"] = _first_order(
        model, x, lambda m: muon_with_adamw(m, 1e-3, 0.95)
    )
    try:
        package = require("pytorch_optimizer")
        found["SOAP"] = _first_order(model, x, lambda m: package.SOAP(m.parameters(), lr=1e-3))
        found["Muon, pytorch_optimizer"] = _first_order(
            model, x, lambda m: package.Muon(_muon_groups(m), lr=1e-3)
        )
    except MissingLibraryError as error:
        print(f"without SOAP and its Muon: {error}", file=sys.stderr)
    try:
        import_kfac_pytorch(kfac_path)
    except ImportError as error:
        script = "benchmarks.small_steps"
        print(KFAC_PYTORCH_MISSING.format(error=error, script=script), file=sys.stderr)
    else:
        found["SGD, kfac-pytorch 1/10"] = _first_order(model, x, _sgd, _kfac_pytorch(1, 10))
        found["SGD, kfac-pytorch 10/30"] = _first_order(model, x, _sgd, _kfac_pytorch(10, 30))
    found["SGD, soframe 1/10"] = _first_order(model, x, _sgd, _soframe(1, 10))
    found["SGD, soframe 10/30"] = _first_order(model, x, _sgd, _soframe(10, 30))
    found["trust region"] = _trust_region(model, x)
    return found


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().sum() / (2 * len(x))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)


def _muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, others = split(model)
    return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]


def _kfac_pytorch(statistics_every: int, solve_every: int) -> Callable[[nn.Module, Any], Any]:
    from kfac.preconditioner import KFACPreconditioner

    every = {"factor_update_steps": statistics_every, "inv_update_steps": solve_every}
    return lambda model, optimizer: KFACPreconditioner(
        model, lr=optimizer.param_groups[0]["lr"], **every
    )


def _soframe(statistics_every: int, solve_every: int) -> Callable[[nn.Module, Any], Any]:
    every = {"statistics_every": statistics_every, "solve_every": solve_every}
    return lambda model, optimizer: soframe.Preconditioner(
        model, optimizer=optimizer, solver="eigen", **every
    )


def _first_order(
    model: nn.Module,
    x: Tensor,
    make: Callable[[nn.Module], torch.optim.Optimizer | None],
    precondition: Callable[[nn.Module, Any], Any] = lambda model, optimizer: None,
) -> Step:
    own = copy.deepcopy(model)
    optimizer = make(own)
    preconditioner = precondition(own, optimizer)

    def step() -> None:
        own.zero_grad()
        _loss(own, x).backward()
        if preconditioner is not None:
            preconditioner.step()
        if optimizer is not None:
            optimizer.step()

    return step


def _trust_region(model: nn.Module, x: Tensor) -> Step:
    own = copy.deepcopy(model)
    optimizer = soframe.TrustRegion(own, "squared-error", full_batch=True)
    return lambda: optimizer.step(lambda: _loss(own, x))


def times(steps: dict[str, Step], turns: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each turn; all take turns, and one before, to warm up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, turns):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(TURN):
                step()
            if turn >= 0:
                found[name].append(1e3 * (time.perf_counter() - start) / TURN)
    return found


def profile(step: Step, turns: int) -> None:
    """Print the functions in which steps spend their time, by their own."""
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(turns * TURN):
            step()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(20)


def main(
    width: Annotated[int, typer.Option(help="Of every layer; 0: CURVES, with all rows.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Of 30 steps, for each.")] = 20,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    kfac_path: Annotated[Path | None, typer.Option(help="A folder with kfac-pytorch.")] = None,
    profiled: Annotated[
        str | None, typer.Option("--profile", help="Where this contender's time goes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time and count steps of a deep, narrow autoencoder."""
    with numerics(threads):
        steps = contenders(*problem(width), kfac_path)
        if profiled is not None:
            if profiled not in steps:
                raise ValueError(f"--profile must be one of {list(steps)}, not {profiled!r}")
            profile(steps[profiled], turns)
            return
        took = times(steps, turns)
        plain, *_ = took.values()
        rows = []
        for name, each in took.items():
            ratios = [own / other for own, other in zip(each, plain, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if turns > 1 else ratios * 3
            row = {"name": name, "ms": statistics.median(each), "ratio": middle}
            row |= {"quartiles": (low, high), "operators": operators(steps[name])}
            rows.append({**row, "calls": calls(steps[name])})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    what = "CURVES, 2000 rows" if width == 0 else f"8 layers of {width}, 64 rows"
    table = Table(title=f"a step: {what}, {threads} threads, torch {torch.__version__}")
    for column in ("", "ms", "to forward and backward", "operators", "calls"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        low, high = row["quartiles"]
        ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
        cells = (f"{row['ms']:.2f}", ratio, f"{row['operators']:.0f}", f"{row['calls']:.0f}")
        table.add_row(row["name"], *cells)
    console().print(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
