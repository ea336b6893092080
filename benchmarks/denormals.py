"""What denormal numbers cost the trust region, and what flushing them in its own arithmetic saves.

    python benchmarks/denormals.py
    python benchmarks/denormals.py --from-step 100 --threads 2

Products of numbers near zero, which saturated units have, are denormal, and many processors compute
with those in microcode. CURVES is trained to `--from-step`; from there three copies go on, in turns
of a step: in one nothing is flushed, in one soframe's own arithmetic is (the default,
`flush_denormals`), in one all of the process is (`torch.set_flush_denormal(True)`). And then: how
many numbers of the curvature are denormal, and what they cost this processor.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import soframe
from soframe.experiments.compare import console
from soframe.experiments.requirements import require
from soframe.experiments.train import numerics
from soframe.experiments.workloads import workload

NOTHING = "nothing"
MODES = {NOTHING: (False, False), "soframe's own": (True, False), "all": (True, True)}
"""Of each the setting ``flush_denormals``, and the process's mode."""


class Training:
    """A model of a workload and its trust region, on all examples in every step.

    Args:
        name: The workload.
        flush: The setting of the trust region.
        rows: Examples; all by default.
    """

    def __init__(self, name: str, flush: bool, rows: int | None = None) -> None:
        own = workload(name)
        torch.manual_seed(0)
        self.model: nn.Module = own.model(0, torch.float32)
        examples = own.data(0, torch.float32).train
        self._x, self._y, self._losses = examples.inputs[:rows], examples.targets[:rows], own.losses
        self.optimizer = soframe.TrustRegion(
            self.model, own.likelihood, full_batch=True, flush_denormals=flush
        )

    def step(self) -> float:
        """Take a step and return the loss before."""
        return float(self.optimizer.step(self._loss))

    def _loss(self) -> Tensor:
        return self._losses(self.model(self._x), self._y).mean()

    def state(self) -> dict[str, Any]:
        """Return a copy of all that training goes on from."""
        made = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**copy.deepcopy(made), "random": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, of which copies are taken."""
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])


def denormals(optimizer: soframe.TrustRegion) -> tuple[int, int]:
    """Return how many numbers of factors and second-order data are denormal, and how many are."""
    found = total = 0
    for block in optimizer.preconditioner.blocks:
        solved = [tensor for data in block.second_order.values() for tensor in data.values()]
        for tensor in (*block.running.values(), *solved):
            tiny = torch.finfo(tensor.dtype).tiny
            found += int(((tensor != 0) & (tensor.abs() < tiny)).sum())
            total += tensor.numel()
    return found, total


def slowdown(size: int = 256, turns: int = 50) -> float:
    """Return how many times as long a product of matrices takes if one of them is denormal."""
    other = torch.rand(size, size)
    took: dict[float, list[float]] = {1.0: [], 1e-39: []}
    for _ in range(turns):
        for value, each in took.items():
            one = torch.full((size, size), value)
            begin = time.perf_counter()
            one @ other
            each.append(time.perf_counter() - begin)
    ordinary, slow = (statistics.median(each) for each in took.values())
    return slow / ordinary


def times(
    name: str, from_step: int, steps: int, rows: int | None = None
) -> tuple[dict[str, list[float]], tuple[int, int]]:
    """Return the milliseconds of steps under each mode, and `denormals` where none are flushed.

    Args:
        name: The workload.
        from_step: Steps before any is timed.
        steps: How many are timed of each.
        rows: Examples; all by default.
    """
    torch.set_flush_denormal(True)
    start = Training(name, True, rows)
    for _ in range(from_step):
        start.step()
    state = start.state()
    runs = {mode: Training(name, flush, rows) for mode, (flush, _) in MODES.items()}
    for run in runs.values():
        run.load(state)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(steps):
        for mode, run in runs.items():
            torch.set_flush_denormal(MODES[mode][1])
            begin = time.perf_counter()
            run.step()
            found[mode].append(1e3 * (time.perf_counter() - begin))
    return found, denormals(runs[NOTHING].optimizer)


def main(
    name: Annotated[str, typer.Argument(help="A workload that is an autoencoder.")] = "curves",
    from_step: Annotated[int, typer.Option(min=0, help="From which step on.")] = 0,
    steps: Annotated[int, typer.Option(min=2, help="To be timed.")] = 30,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time steps with and without denormals."""
    with numerics(threads):
        found, (small, numbers) = times(name, from_step, steps)
        torch.set_flush_denormal(False)
        slower = slowdown()
    flushed = found["all"]
    rows = []
    for mode, each in found.items():
        ratios = [own / other for own, other in zip(each, flushed, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"flushed": mode, "ms": statistics.median(each), "mean ms": statistics.fmean(each)}
        rows.append({**row, "ratio": middle, "quartiles": (low, high)})
    if as_json:
        about = {"denormals": small, "numbers": numbers, "slowdown": slower}
        print(json.dumps({"rows": rows, **about}, indent=1))
        return
    (tables,) = require("rich.table")
    title = f"steps {from_step + 1} to {from_step + steps} on {name}, {threads} threads"
    table = tables.Table(title=f"{title}, torch {torch.__version__}")
    for column in ("flushed", "ms, median", "ms, mean", "to all flushed"):
        table.add_column(column, justify="left" if column == "flushed" else "right")
    for row in rows:
        low, high = row["quartiles"]
        ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
        table.add_row(row["flushed"], f"{row['ms']:.1f}", f"{row['mean ms']:.1f}", ratio)
    console().print(table)
    print(f"{small} of {numbers} numbers of the curvature are denormal")
    print(f"a product with a matrix of denormals takes {slower:.2f} times as long, unflushed")


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
