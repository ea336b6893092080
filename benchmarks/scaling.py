"""How the parts of a step grow with width, depth, batch and ranks, against operation counts.

    python -m benchmarks.scaling                             # a table, and a plot in runs/scaling
    python -m benchmarks.scaling --axes width ranks --rounds 5 --json

A byte-level GPT (width 128, 2 layers, 8 x 64 tokens on every rank) is timed as in
`benchmarks/steps.py`; along each axis one of its numbers changes. The times that preconditioning,
factors and solves add to a step of SGD are plotted against their multiply-adds by count. Ranks are
processes over Gloo on this machine, with DistributedDataParallel and the batch of a rank unchanged:
more of them than cores share the cores.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import PHASES, Network, contender, figures, gpt, race
from experiments import display
from experiments.display import save
from experiments.launch import Worker, launch
from soframe.strategies.placement import Placement

PARTS = ("plain", *PHASES)
OWN = "soframe, own"


@dataclass(frozen=True)
class Point:
    """A transformer, its batch, and how many ranks train it."""

    width: int = 128
    depth: int = 2
    batch: int = 8
    ranks: int = 1
    length: int = 64

    @property
    def network(self) -> Network:
        return gpt(self.width, self.depth, self.batch, self.length)


AXES: dict[str, Sequence[int]] = {
    "width": (32, 64, 128, 256, 512),
    "depth": (1, 2, 4, 8),
    "batch": (2, 4, 8, 16, 32),
    "ranks": (1, 2, 4),
}
BASE = Point()


def operations(placement: Placement, rows: int, attention: float = 0.0) -> dict[str, float]:
    """Count the operations of a step on the rank with the most.

    Every layer sees the same number of rows, as in a transformer.

    Returns:
        ``"plain"``: forward and backward pass, three products for each layer. ``"apply"``: a
            product with the inverse of each factor. ``"factors"``: one triangle for each factor.
            ``"solve"``: a Cholesky factorisation, n^3 / 6, and the inverse from it, n^3 / 3.
    """
    plain = 3 * attention
    parts = {part: [0.0] * placement.world_size for part in PHASES}
    for work, place in zip(placement.work, placement.blocks, strict=True):
        groups, out, into = work.shape
        plain += 3 * rows * groups * out * into
        for index, factor in enumerate(work.factors):
            parts["solve"][place.owners[index]] += groups * factor.size**3 / 2
            for rank in place.gradient_workers:
                parts["apply"][rank] += groups * out * into * factor.size
            for rank in place.contributing(index):
                parts["factors"][rank] += rows * groups * factor.size**2 / 2
    return {"plain": plain, **{part: max(counts) for part, counts in parts.items()}}


def measure(worker: Worker, point: Point, strategy: str, rounds: int) -> dict[str, Any]:
    """Measure one point on one rank: ms of every part, and its multiply-adds."""
    warnings.filterwarnings("ignore", category=UserWarning)
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model  # noqa: E731
    if worker.world_size > 1:
        wrap = DistributedDataParallel
    torch.manual_seed(0)
    model = point.network.model()
    own = {"solver": "inverse", "strategy": strategy}
    device = torch.device("cpu")
    contenders = [
        contender(name, point.network, model, device, own, wrap=wrap) for name in ("sgd", OWN)
    ]
    race(contenders, 0.0, rounds)  # without a limit of time, the same on every rank
    sgd, row = figures({one.name: one.times for one in contenders})
    placement = contenders[1].preconditioner.placement
    attention = 2.0 * point.depth * point.batch * point.length**2 * point.width
    counts = operations(placement, point.batch * point.length, attention)
    return {"ms": {"plain": sgd["precondition"], **row["phases"]}, "operations": counts}


def along(axis: str, strategy: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """The points of an axis; times are the slowest rank's."""
    found = []
    for value in AXES[axis]:
        point = replace(BASE, **{axis: value})
        run = launch(measure, point.ranks, threads=threads if point.ranks == 1 else 1)
        by_rank = run(point, strategy, rounds)
        ms = {part: max(one["ms"][part] for one in by_rank) for part in PARTS}
        found.append({**asdict(point), "ms": ms, "operations": by_rank[0]["operations"]})
        print(f"scaling: {axis} {value}", file=sys.stderr, flush=True)
    return found


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The exponent of a power law through positive values, by least squares of logarithms."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y > 0]
    if len(pairs) < 2:
        return float("nan")
    logs = torch.tensor(pairs, dtype=torch.float64).log()
    return statistics.linear_regression(*logs.T.tolist()).slope


def table(found: dict[str, list[dict[str, Any]]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    for axis, points in found.items():
        shown = Table(title=f"along {axis}", title_justify="left", box=box.SIMPLE_HEAD)
        shown.add_column(axis, justify="right")
        for part in PARTS:
            shown.add_column(f"{part}\nms", justify="right")
            shown.add_column("\nns per 1000", justify="right")
        for point in points:
            cells = [str(point[axis])]
            for part in PARTS:
                ms, count = point["ms"][part], point["operations"][part]
                cells += [f"{ms:.1f}", f"{1e9 * ms / count:.1f}"]
            shown.add_row(*cells)
        cells = ["exponent"]
        for part in PARTS:
            xs = [point[axis] for point in points]
            times = [point["ms"][part] for point in points]
            counts = [point["operations"][part] for point in points]
            cells += [f"{slope(xs, times):.2f}", f"({slope(xs, counts):.2f})"]
        shown.add_section()
        shown.add_row(*cells)
        Console(width=110).print(shown)


def plot(found: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(found), 3.8), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (axis, points) in zip(panels, found.items(), strict=True):
        xs = [point[axis] for point in points]
        for part, color in zip(PARTS, ("#000000", "#E69F00", "#0072B2", "#D55E00"), strict=True):
            ms = [point["ms"][part] for point in points]
            counts = [point["operations"][part] for point in points]
            axes.plot(xs, ms, "o-", color=color, label="SGD's step" if part == "plain" else part)
            # The counts, through the times' geometric mean.
            shift = [m / c for m, c in zip(ms, counts, strict=True) if m > 0]
            scale = statistics.geometric_mean(shift) if shift else 0.0
            axes.plot(xs, [scale * count for count in counts], ":", color=color)
        axes.set(xscale="log", yscale="log", xlabel=axis)
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.minorticks_off()
        axes.grid(visible=True, linewidth=0.5, color="#DDDDDD")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms; dotted: by operation count")
    panels[0].legend(frameon=False, fontsize=9)
    return save(figure, path)


def main() -> int:
    parser = display.parser(__doc__)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--strategy", default="mem-opt", help="on several ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of torch, on one rank")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling/scaling.png"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {
        axis: along(axis, options.strategy, options.rounds, options.threads)
        for axis in options.axes
    }
    if options.json:
        where = {"torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({**where, "threads": options.threads, "axes": found}, indent=1))
        return 0
    table(found)
    print(plot(found, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
