"""Predicted beside measured seconds: how well a measured profile prices sizes that it has not seen.

    python -m benchmarks.planned                          # all sections
    python -m benchmarks.planned collectives --ranks 4 --json

`steps` takes whole steps of three strategies on two models and on three of recipes, with
DistributedDataParallel on Gloo processes, beside the plan from a profile that the same processes
measure before. Strategies take turns, cycle by cycle: statistics at every step, a solve at every
fifth. Steps of one process (`--ranks 1`) are timed by the processor.
`collectives` measures each collective on Gloo processes at powers of two from 4 KiB to 16 MiB,
`operators` products and factorisations on one process at sides from 16 to 1024. A curve of every
other size predicts the sizes between: `error` is |predicted / measured - 1|, its median and its
largest over these sizes. All sizes are measured in turn, round by round; seconds are medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from experiments import display
from experiments.launch import Worker, launch
from soframe.comm import SingleProcess, TorchDistributed
from soframe.planning import measure
from soframe.planning.hardware import Curve
from soframe.planning.planner import Option, plan
from soframe.planning.task import Task
from soframe.strategies import CommOpt, MemOpt, Sharded, Strategy

CPU = torch.device("cpu")
BYTES = [2**power for power in range(12, 25)]
SIDES = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
DTYPES = ("float32",)

Rows = dict[str, dict[str, Any]]
Points = list[tuple[float, float]]

HOUR = 3600.0


# -- sections --------------------------------------------------------------------------------------


def collectives(options: argparse.Namespace) -> Rows:
    found: Rows = {}
    for ranks in options.ranks:
        curves = launch(of_collectives, ranks, timeout=HOUR)(options.budget)[0]
        for name, points in curves.items():
            found[f"{ranks} ranks, {name}"] = held_out(points)
    return found


def of_collectives(worker: Worker, budget: float) -> dict[str, Points]:
    del worker
    backend = TorchDistributed()
    series = measure.collectives(backend, CPU, BYTES)
    times = measure.seconds(series, backend, CPU, budget)
    return {
        one.key + (" of pairs" if len(one.groups) > 1 else ""): list(points.items())
        for one, points in times.items()
    }


def operators(options: argparse.Namespace) -> Rows:
    torch.set_num_threads(1)
    series = [
        *measure.products(CPU, DTYPES, SIDES)[:1],
        *measure.factorisations(CPU, DTYPES, SIDES),
    ]
    times = measure.seconds(series, SingleProcess(), CPU, options.budget)
    return {one.key: held_out(list(points.items())) for one, points in times.items()}


def steps(options: argparse.Namespace) -> Rows:
    found: Rows = {}
    for ranks in options.ranks:
        rows = launch(of_steps, ranks, timeout=HOUR)(options.budget, options.rounds)[0]
        found.update({f"{ranks} ranks, {name}": row for name, row in rows.items()})
    return found


def of_steps(worker: Worker, budget: float, rounds: int) -> Rows:
    rows: Rows = {}
    # One process waits for no other: its own time does not depend on what else the machine does.
    clock = time.perf_counter
    if worker.world_size == 1:
        clock = time.process_time
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, (make, inputs) in MODELS.items():
        if worker.rank == 0:
            print(f"{name}, {worker.world_size} ranks", file=sys.stderr, flush=True)
        task = Task.of(make(), (inputs,), method="kfac")
        sides = sorted({factor.size for work in task.work for factor in work.factors})
        hardware = measure.measure(CPU, backend=TorchDistributed(), sides=sides, budget=budget)
        options = [Option(one, statistics_every=1, solve_every=CYCLE) for one in STRATEGIES]
        planned = {
            str(row.option.strategy): row.timing.mean
            for row in plan(task, ranks=worker.world_size, hardware=hardware, options=options).rows
        }
        runs = [(one, run(make, one)) for one in STRATEGIES]
        seconds: dict[str, list[float]] = {}
        for turn in range(rounds + 1):
            for one, step in runs:
                dist.barrier()
                start = clock()
                for _ in range(CYCLE):
                    step(inputs)
                dist.barrier()
                if turn:  # the first is for warming up
                    took = (clock() - start) / CYCLE
                    seconds.setdefault(str(one), []).append(took)
        pairs = [
            {"size": one, "seconds": statistics.median(seconds[one]), "predicted": planned[one]}
            for one in seconds
        ]
        rows[name] = errors(pairs)
    return rows


def run(make: Callable[[], nn.Module], strategy: Strategy) -> Callable[[Tensor], None]:
    """Return a function that takes a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    preconditioner = soframe.Preconditioner(
        model, strategy=strategy, optimizer=optimizer, statistics_every=1, solve_every=CYCLE
    )

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        preconditioner.step()
        optimizer.step()

    return step


def convolutions() -> nn.Module:
    """Return convolutions on images of 16 x 16."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 10, bias=False),
    )


def dense() -> nn.Module:
    """Return linear layers of several widths."""
    widths = (300, 400, 200, 500, 100)
    pairs = zip(widths, widths[1:], strict=False)  # noqa: RUF007
    layers = [(nn.Linear(into, out), nn.Tanh()) for into, out in pairs]
    return nn.Sequential(*(module for both in layers for module in both))


def recipe(name: str) -> nn.Module:
    """Return the network of a recipe that trains on a laptop."""
    module = importlib.import_module(f"experiments.recipes.{name}")
    model: nn.Module = module.model(module.Settings())
    return model


CYCLE = 5
STRATEGIES: tuple[Strategy, ...] = (CommOpt(), MemOpt(), Sharded(group=None, deferred=True))
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolutions": (convolutions, torch.rand(16, 3, 16, 16)),
    "dense": (dense, torch.rand(128, 300)),
    "U-Net": (partial(recipe, "unet"), torch.rand(8, 1, 32, 32)),
    "detector": (partial(recipe, "detector"), torch.rand(16, 1, 32, 32)),
    "BERT": (partial(recipe, "bert_bytes"), torch.randint(256, (16, 32))),
}

SECTIONS: Mapping[str, Callable[[argparse.Namespace], Rows]] = {
    "steps": steps,
    "collectives": collectives,
    "operators": operators,
}


# -- predictions -----------------------------------------------------------------------------------


def held_out(points: Points) -> dict[str, Any]:
    """Predict every other size, but the first and the last, by a curve of the rest."""
    if len(points) < 3:
        raise ValueError("the budget ended before a third size: pass a larger --budget")
    curve = Curve(tuple(points[::2]))
    sizes = [
        {"size": size, "seconds": seconds, "predicted": curve(size)}
        for size, seconds in points[1 : len(points) - 1 : 2]
    ]
    return errors(sizes)


def errors(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of predictions of seconds."""
    found = [abs(one["predicted"] / one["seconds"] - 1) for one in pairs]
    return {"median": statistics.median(found), "largest": max(found), "held out": pairs}


def show(found: Mapping[str, Rows]) -> None:
    for section, rows in found.items():
        lines = []
        for name, row in rows.items():
            times = [1e3 * one["seconds"] for one in row["held out"]]
            lines.append(
                [
                    name,
                    str(len(times)),
                    f"{min(times):.3f}",
                    f"{max(times):.3f}",
                    f"{row['median']:.1%}",
                    f"{row['largest']:.1%}",
                ]
            )
        columns = (
            "curve",
            "sizes",
            "shortest\nms",
            "longest\nms",
            "error\nmedian",
            "error\nlargest",
        )
        display.console().print(display.table(section, columns, lines))
        if section == "steps":
            show_steps(rows)
        print(f"{section}: median error {overall(rows):.1%}")


def show_steps(rows: Rows) -> None:
    for name, row in rows.items():
        ordered = sorted(row["held out"], key=lambda one: one["seconds"])
        chosen = min(ordered, key=lambda one: one["predicted"])
        ratio = chosen["seconds"] / ordered[0]["seconds"]
        print(f"{name}: the strategy that is planned to be the fastest takes {ratio:.2f} of it")
        for one in ordered:
            print(
                f"  {one['size'].split('(')[0]:12} measured {1e3 * one['seconds']:8.2f} ms, "
                f"planned {1e3 * one['predicted']:8.2f}"
            )


def overall(rows: Rows) -> float:
    """Return the median error over all sizes of a section."""
    every = [one for row in rows.values() for one in row["held out"]]
    return statistics.median(abs(one["predicted"] / one["seconds"] - 1) for one in every)


def main() -> int:
    parser = display.parser(__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; by default all")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="of collectives and steps"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of steps")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, about, of a world")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {name: SECTIONS[name](options) for name in options.sections or SECTIONS}
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
