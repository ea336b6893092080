"""Derivatives along directions: by the tape, and by differentiating the gradient.

    python benchmarks/derivatives.py
    python benchmarks/derivatives.py --net curves --rounds 30

What is timed is what a step of `soframe.TrustRegion` needs of the model: forward, backward and the
curvature along k directions. Both ways take turns, and so do all nets; each ratio is the median of
those of the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.derivatives.forward import Forward, Outputs
from soframe.derivatives.replay import Replay
from soframe.derivatives.tape import Tape
from soframe.experiments.compare import console
from soframe.experiments.requirements import require
from soframe.experiments.train import numerics
from soframe.experiments.workloads import workload
from soframe.trust_region.quadratic import curvature_along

SAMPLES = {"curves": 2000, "digits-autoencoder": 1797, "digits-cnn": 512, "byte-gpt": 8}
"""Of each workload: all where the trust region trains on all."""

NETS = (*SAMPLES, "norms")
DIRECTIONS = (3, 6)

Closure = Callable[[], Tensor]


def norms() -> nn.Module:
    """Return a net of 8 x 8 images with batch norm and layer norm."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(256, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def problem(name: str) -> tuple[nn.Module, Closure, bool]:
    """Return a net, its closure, and whether its loss is a squared error."""
    if name == "norms":
        torch.manual_seed(0)
        model, x, y = norms(), torch.rand(512, 1, 8, 8), torch.randint(10, (512,))
        return model, lambda: F.cross_entropy(model(x), y), False
    own = workload(name)
    model = own.model(0, torch.float32)
    train = own.data(0, torch.float32).train
    x, y = train.inputs[: SAMPLES[name]], train.targets[: SAMPLES[name]]
    isotropic = own.likelihood == "squared-error"
    return model, lambda: own.losses(model(x), y).mean(), isotropic


def curvature(
    model: nn.Module, closure: Closure, count: int, *, isotropic: bool, reuse: bool
) -> Tensor:
    """Return what a step needs of a net: its curvature, after a backward pass."""
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    directions = [
        [torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(count)
    ]
    model.zero_grad()
    outputs, tape, replay = Outputs(model), Tape(reuse=reuse), Replay(model)
    found, loss = outputs.of(closure, tape)
    outputs.close()
    gradients = torch.autograd.grad(loss, found, create_graph=True)
    forward = Forward(closure, replay, found, gradients, tape)
    forward.backward()
    if tape.holds() != reuse:
        raise RuntimeError(f"the tape cannot be followed: {tape.problem}")
    return curvature_along([forward], parameters, directions, isotropic=isotropic)


def measure(nets: tuple[str, ...], rounds: int) -> list[dict[str, object]]:
    """Return for each net and number of directions what both ways take, in ms, and the ratio."""
    problems = {name: problem(name) for name in nets}
    took: dict[tuple[str, int, bool], list[float]] = {}
    differs: dict[tuple[str, int], float] = {}
    for turn in range(-1, rounds):
        for name, (model, closure, isotropic) in problems.items():
            for count in DIRECTIONS:
                each = []
                for reuse in (True, False):
                    start = time.perf_counter()
                    found = curvature(model, closure, count, isotropic=isotropic, reuse=reuse)
                    if turn >= 0:
                        took.setdefault((name, count, reuse), []).append(
                            1e3 * (time.perf_counter() - start)
                        )
                    each.append(found)
                differs[name, count] = float((each[0] - each[1]).norm() / each[1].norm())
    rows: list[dict[str, object]] = []
    for name in nets:
        for count in DIRECTIONS:
            tape, twin = took[name, count, True], took[name, count, False]
            ratio = statistics.median(b / a for a, b in zip(tape, twin, strict=True))
            times = {"tape": statistics.median(tape), "twin": statistics.median(twin)}
            row = {"net": name, "directions": count, **times, "ratio": ratio}
            rows.append({**row, "difference": differs[name, count]})
    return rows


def main(
    net: Annotated[str | None, typer.Option(help=f"One of {', '.join(NETS)}; all.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of all nets.")] = 12,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
) -> None:
    """Time the curvature along directions by the tape and by its twin."""
    if net is not None and net not in NETS:
        raise ValueError(f"--net must be one of {list(NETS)}, not {net!r}")
    with numerics(threads):
        rows = measure(NETS if net is None else (net,), rounds)
    (tables,) = require("rich.table")
    table = tables.Table(title=f"{threads} thread(s), torch {torch.__version__}")
    for column in ("net", "directions", "tape, ms", "twin, ms", "twin to tape", "difference"):
        table.add_column(column, justify="left" if column == "net" else "right")
    for row in rows:
        numbers = (f"{row['tape']:.1f}", f"{row['twin']:.1f}", f"{row['ratio']:.2f}")
        table.add_row(str(row["net"]), str(row["directions"]), *numbers, f"{row['difference']:.0e}")
    console().print(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
