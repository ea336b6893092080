"""Simulation: second-order steps on up to 4,096 ranks, planned from shapes; nothing runs.

    python -m benchmarks.simulation                         # three models on h100-ib
    python -m benchmarks.simulation --only resnet50 --ranks 8,64 --json
    python -m benchmarks.simulation --figure docs/benchmarks/simulation.png
    python -m benchmarks.simulation --fixed                 # the largest batches in a GPU's memory

Every strategy of K-FAC, statistics every 10 and solves every 100 steps, is planned by
`soframe.planning` with SGD's step in the same model of cost beside it: the passes, and gradients
that are averaged while the backward pass runs. With weak scaling each rank has the workload's own
batch, with strong scaling all ranks together have `GLOBAL` samples. Where these are more than fit a
device they stand for several passes, whose time is that of one over all of them.

With ``--fixed``, KAISA's question (Pauloski et al., SC 2021): each optimizer has the largest batch
that a device's memory leaves it, on 64 ranks. Weights, gradients, the optimizer's state, the
activations of a float32 pass and the most bytes of the preconditioner are added up, although solves
come when activations are gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from experiments import display
from experiments.display import console, print_json
from experiments.libraries import require
from soframe.planning.hardware import Hardware
from soframe.planning.planner import Option, Plan, Row, plan
from soframe.planning.task import Task
from soframe.planning.workloads import WORKLOADS
from soframe.strategies.base import Strategy
from soframe.strategies.kaisa import CommOpt, HybridOpt, MemOpt
from soframe.strategies.sharded import Sharded

MODELS = ("resnet50", "bert-large", "gpt2-xl")
RANKS = (8, 64, 512, 4096)
GLOBAL = 4096  # samples of a step with strong scaling: one for each of the most ranks
STRATEGIES = ("comm-opt", "hybrid-opt", "mem-opt", "sharded, all ranks", "sharded, 4 ranks")
COLORS = ("#0072B2", "#009E73", "#56B4E9", "#D55E00", "#E69F00")

FIXED_MODELS = {"resnet50": 1, "bert-large": 2}
"""Models of fixed memory, with the states of a weight: a momentum, or Adam's two."""
FIXED_HARDWARE = ("v100-ib", "a100-ib")
FIXED_RANKS = 64


def options(ranks: int) -> dict[str, list[Option]]:
    """Return the options of each strategy: of ``"hybrid-opt"`` for 2, 4, 8... gradient workers."""
    hybrid = [
        HybridOpt(gradient_workers=2**n) for n in range(1, ranks.bit_length()) if 2**n < ranks
    ]
    all_ranks = Sharded(group=None, deferred=True)
    each: Sequence[Sequence[Strategy]] = [[CommOpt()], hybrid, [MemOpt()], [all_ranks], [Sharded()]]
    return {
        name: [Option(strategy) for strategy in some]
        for name, some in zip(STRATEGIES, each, strict=True)
    }


def best(planned: Plan, some: Sequence[Option]) -> Row:
    """Return the fastest of some options."""
    return next(row for row in planned.rows if row.option in some)


def simulate(model: str, ranks: int, batch: int, hardware: Hardware) -> dict[str, Any]:
    """Plan every strategy.

    Args:
        model: A workload.
        ranks: The number of ranks.
        batch: Samples of a rank.
        hardware: The hardware.

    Returns:
        Seconds of SGD's step; for each strategy its option, the seconds of a step, their ratio to
        SGD's, the bytes of the fullest rank and whether statistics are of all ranks' data; the
        fastest strategy, the fastest of those with all data, and the seconds of planning.
    """
    begin = time.process_time()
    workload, named = WORKLOADS[model], options(ranks)
    task = Task.of(workload.model(), workload.inputs(batch))
    every = [option for some in named.values() for option in some]
    planned = plan(task, ranks=ranks, hardware=hardware, options=every, amp=True)
    rows = {name: best(planned, some) for name, some in named.items()}

    def fastest(names: Sequence[str]) -> str:
        return min(names, key=lambda name: rows[name].timing.mean)

    return {
        "ranks": ranks,
        "batch": batch,
        "sgd": planned.plain,
        "strategies": {
            name: {
                "option": row.option.call(),
                "gradient workers": getattr(row.option.strategy, "gradient_workers", None),
                "seconds": row.timing.mean,
                "ratio": row.timing.mean / planned.plain,
                "memory": row.memory["total"],
                "held": row.memory["held"],
                "exact": row.exact,
            }
            for name, row in rows.items()
        },
        "fastest": fastest(list(rows)),
        "fastest exact": fastest([name for name, row in rows.items() if row.exact]),
        "planning": time.process_time() - begin,
    }


def scaling(model: str, numbers: Sequence[int], hardware: Hardware) -> dict[str, list[Any]]:
    """Simulate weak and strong scaling; the latter ends at one sample a rank."""
    batches = {
        "weak": [(ranks, WORKLOADS[model].batch) for ranks in numbers],
        "strong": [(ranks, GLOBAL // ranks) for ranks in numbers if ranks <= GLOBAL],
    }
    points = {pair for some in batches.values() for pair in some}
    found = {pair: simulate(model, *pair, hardware) for pair in sorted(points)}
    return {kind: [found[pair] for pair in some] for kind, some in batches.items()}


def largest_batch(cap: int, fixed: int, per_sample: int) -> int:
    """Return the most samples that fit; 0 if none does."""
    return max(0, (cap - fixed) // per_sample)


def fixed_memory(model: str, hardware: Hardware, ranks: int = FIXED_RANKS) -> list[dict[str, Any]]:
    """Plan each strategy with the largest batch that a device's memory leaves it.

    Args:
        model: A workload.
        hardware: The hardware, whose memory is the cap.
        ranks: The number of ranks.

    Returns:
        For SGD or Adam and each strategy, hybrid-opt with the gradient workers of the most samples
        a second: the bytes of curvature at the peak, the batch of a rank, the samples a second of
        all ranks, and, if the batch is not 0, the seconds of a step.

    Raises:
        ValueError: If the memory of the hardware is unknown.
    """
    if hardware.memory is None:
        raise ValueError(f"the profile {hardware.name!r} has no memory")
    cap, workload, named = hardware.memory, WORKLOADS[model], options(ranks)
    one, two = (Task.of(workload.model(), workload.inputs(batch)) for batch in (1, 2))
    per_sample = two.activations - one.activations
    weights = sum(p.numel() * p.element_size() for p in one.parameters)
    fixed = (2 + FIXED_MODELS[model]) * weights + one.activations - per_sample

    def rated(name: str, option: Option, *, alone: bool = False) -> dict[str, Any]:
        def planned(task: Task) -> Plan:
            return plan(task, ranks=ranks, hardware=hardware, options=[option])

        curvature = 0 if alone else planned(one).rows[0].memory["total"]
        batch = largest_batch(cap, fixed + curvature, per_sample)
        found = {"optimizer": name, "curvature": curvature, "batch": batch, "samples a second": 0.0}
        if batch:
            full = planned(Task.of(workload.model(), workload.inputs(batch)))
            found["seconds"] = full.plain if alone else full.rows[0].timing.mean
            found["samples a second"] = ranks * batch / found["seconds"]
        return found

    first = rated({1: "SGD", 2: "Adam"}[FIXED_MODELS[model]], Option(CommOpt()), alone=True)
    of_strategies = [[rated(name, option) for option in some] for name, some in named.items()]
    return [first, *(max(some, key=itemgetter("samples a second")) for some in of_strategies)]


def time_table(model: str, kind: str, points: Sequence[Mapping[str, Any]], name: str) -> Table:
    """Return the times of a model."""
    title = f"Simulation: {model}, {kind} scaling on {name}: ms a step, and of SGD's"
    headers = ("ranks", "batch", "SGD", *STRATEGIES, "workers", "planning, s")
    rows = []
    for point in points:
        cells = []
        for strategy, row in point["strategies"].items():
            mark = "*" * (strategy == point["fastest"]) + "+" * (strategy == point["fastest exact"])
            cells.append(f"{mark}{1e3 * row['seconds']:.4g} {row['ratio']:.2f}")
        workers = point["strategies"]["hybrid-opt"]["gradient workers"]
        start = str(point["ranks"]), str(point["batch"]), f"{1e3 * point['sgd']:.4g}"
        rows.append([*start, *cells, str(workers), f"{point['planning']:.1f}"])
    columns = [header.replace(", ", ",\n") for header in headers]
    table = display.table(title, columns, rows, left=0)
    table.caption = (
        "* fastest, + with statistics of all ranks; workers: hybrid-opt's gradient workers"
    )
    return table


def memory_table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Table:
    """Return the memory of all models, which does not depend on the batch."""
    title = "Simulation: GB of curvature on the fullest rank, at the peak of a step"
    cells = []
    for model, kinds in found.items():
        for point in kinds["weak"]:
            rows = point["strategies"].values()
            sizes = [f"{row['memory'] / 1e9:.2f}" for row in rows]
            cells.append([model, str(point["ranks"]), *sizes])
    return display.table(title, ["model", "ranks", *STRATEGIES], cells)


def fixed_table(model: str, hardware: Hardware, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the largest batches of a model."""
    assert hardware.memory is not None
    title = f"Simulation: {model}, {FIXED_RANKS} ranks of {hardware.memory / 1e9:.0f} GB, "
    first = rows[0]["optimizer"]
    columns = ["optimizer", "GB of curvature", "a rank's batch", "ms a step", "samples/s"]
    lines = []
    for row in rows:
        cells = ["-", "-", "-"]
        if row["batch"]:
            rate = row["samples a second"]
            cells = [f"{1e3 * row['seconds']:.4g}", f"{rate:,.0f}"]
            cells.append(f"{rate / rows[0]['samples a second']:.3f}")
        lines.append([row["optimizer"], f"{row['curvature'] / 1e9:.2f}", str(row["batch"]), *cells])
    return display.table(title + hardware.name, [*columns, f"of {first}'s"], lines)


def draw(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], name: str) -> Any:
    """Draw ratios to SGD's step against ranks: a column for each model."""
    made = require("matplotlib.figure").Figure(
        figsize=(3.2 * len(found) + 0.4, 5.6), layout="constrained"
    )
    grid = made.subplots(2, len(found), squeeze=False, sharex=True)
    for column, (model, kinds) in enumerate(found.items()):
        for axes, (kind, points) in zip(grid[:, column], kinds.items(), strict=True):
            for strategy, color in zip(STRATEGIES, COLORS, strict=True):
                ratios = [point["strategies"][strategy]["ratio"] for point in points]
                ranks = [point["ranks"] for point in points]
                axes.plot(ranks, ratios, "o-", markersize=4, color=color, label=strategy)
            axes.set_xscale("log", base=2)
            axes.axhline(1.0, color="#999999", linewidth=0.8, linestyle=":")
            axes.set_title(f"{model}, {kind} scaling", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
        grid[-1, column].set_xlabel("ranks")
    for axes in grid[:, 0]:
        axes.set_ylabel("a step, of SGD's")
    grid[0, 0].legend(frameon=False, fontsize=8)
    made.suptitle(f"Simulation on {name}: planned steps, none was run", fontsize=11)
    return made


def main(
    only: Annotated[str, typer.Option(help="Workloads, by commas.")] = ",".join(MODELS),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = ",".join(map(str, RANKS)),
    profile: Annotated[str, typer.Option("--hardware", help="A profile.")] = "h100-ib",
    fixed: Annotated[bool, typer.Option("--fixed", help="Fixed memory, on 64 ranks.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw the ratios into an image.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Simulate K-FAC's strategies on many ranks."""
    if fixed:
        caps = {name: Hardware.load(name) for name in FIXED_HARDWARE}
        batches = {
            (model, name): fixed_memory(model, hardware)
            for model in FIXED_MODELS
            for name, hardware in caps.items()
        }
        if as_json:
            print_json([{"model": m, "hardware": n, "rows": r} for (m, n), r in batches.items()])
            return
        for (model, name), rows in batches.items():
            console(width=120).print(fixed_table(model, caps[name], rows))
        return
    hardware, numbers = Hardware.load(profile), [int(part) for part in ranks.split(",")]
    found = {model: scaling(model, numbers, hardware) for model in only.split(",")}
    if figure is not None:
        draw(found, hardware.name).savefig(figure, dpi=150)
    if as_json:
        source = hardware.source
        print_json({"simulation": found, "hardware": hardware.name, "source": source})
        return
    for model, kinds in found.items():
        for kind, points in kinds.items():
            console(width=120).print(time_table(model, kind, points, hardware.name))
    console(width=120).print(memory_table(found))


if __name__ == "__main__":
    typer.run(main)
