"""ResNet-50 in a fixed part of one GPU's memory: the largest batches, planned and found.

    python -m benchmarks.gpu_memory --gib 8
    python -m benchmarks.gpu_memory --gib 8 --json memory.json

SGD with momentum, K-FAC, and K-FAC with its factors on the host train under
`torch.cuda.set_per_process_memory_fraction`. The largest batch of which a step with statistics and
a solve fits is found by bisection; the planned one is what activations have left. Images a second
are of ten steps, one of them with statistics and a solve. A plan knows neither the workspaces of
libraries nor gaps in memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import soframe
from benchmarks.simulation import largest_batch
from experiments.display import aligned
from soframe.planning.hardware import Hardware
from soframe.planning.planner import Option, plan
from soframe.planning.task import Task
from soframe.planning.workloads import WORKLOADS
from soframe.strategies.kaisa import CommOpt

MODEL = WORKLOADS["resnet50"]
CONTENDERS: dict[str, soframe.Statistics | None] = {
    "SGD": None,
    "K-FAC": soframe.Statistics(),
    "K-FAC, factors on the host": soframe.Statistics(offload=True),
}
STEPS = 10


def most(fits: Callable[[int], bool], first: int) -> int:
    """Return the largest number that fits, by bisection from a first guess; 0 if none does."""
    low, high = 0, max(1, first)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def train(
    model: nn.Module, statistics: soframe.Statistics | None, images: torch.Tensor, steps: int
) -> float:
    """Take steps, the last of them with statistics and a solve; return their seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    own = None
    if statistics is not None:
        own = soframe.Preconditioner(
            model,
            optimizer=optimizer,
            statistics=statistics,
            statistics_every=lambda step: 1 if step % steps in (0, steps - 1) else steps,
            solve_every=lambda step: 1 if step % steps in (0, steps - 1) else steps,
        )
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def turn() -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            if own is not None:
                own.step()
            optimizer.step()
        if images.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    turn()  # states and second-order data are made
    return turn()


def planned(statistics: soframe.Statistics | None, cap: int) -> int:
    """Return the largest batch that a plan leaves under a cap in bytes."""
    settings = {} if statistics is None else {"statistics": statistics}
    one, two = (Task.of(MODEL.model(), MODEL.inputs(batch), **settings) for batch in (1, 2))
    sample = two.activations - one.activations
    weights = sum(p.numel() * p.element_size() for p in one.parameters)
    fixed = 3 * weights + one.activations - sample  # with gradients and momentum
    if statistics is not None:
        of_one = plan(one, ranks=1, hardware=Hardware.load("h100-ib"), options=[Option(CommOpt())])
        fixed += of_one.rows[0].memory["total"]
    return largest_batch(cap, fixed, sample)


def found(
    statistics: soframe.Statistics | None, first: int, device: torch.device
) -> tuple[int, float]:
    """Return the largest batch that fits, and its images a second."""

    def seconds(batch: int, steps: int) -> float | None:
        try:
            model = MODEL.model().to_empty(device=device)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.01)
            for buffer in model.buffers():
                buffer.zero_()
            return train(model, statistics, torch.randn(batch, 3, 224, 224, device=device), steps)
        except torch.OutOfMemoryError:
            return None

    def fits(batch: int) -> bool:
        enough = seconds(batch, 1) is not None
        gc.collect()
        torch.cuda.empty_cache()
        return enough

    batch = most(fits, first)
    spent = seconds(batch, STEPS) if batch else None
    return batch, 0.0 if spent is None else STEPS * batch / spent


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the batches and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=8.0, help="memory that torch may use")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU: python -m benchmarks.fixed_memory counts memory on a CPU")
    device, cap = torch.device("cuda", 0), int(args.gib * 2**30)
    about = torch.cuda.get_device_properties(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / about.total_memory), device)
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    for name, statistics in CONTENDERS.items():
        guess = planned(statistics, cap)
        batch, rate = found(statistics, guess, device)
        rows.append({"name": name, "planned": guess, "batch": batch, "images a second": rate})
    head = ["", "planned batch", "batch", "images/s"]
    cells = [
        [r["name"], str(r["planned"]), str(r["batch"]), f"{r['images a second']:.0f}"] for r in rows
    ]
    title = f"ResNet-50 in {args.gib:g} GiB of a {about.name}, torch {torch.__version__}"
    print(aligned(title, [head, *cells]))
    if args.json:
        result = {"device": about.name, "torch": torch.__version__, "cap": cap, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
