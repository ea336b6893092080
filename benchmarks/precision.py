"""Learning with TensorFloat-32 in statistics and updates, emulated, beside full float32.

    python -m benchmarks.precision
    python -m benchmarks.precision soap "kfac, eigen" --seeds 5

Trains an autoencoder and a classifier on the digits of scikit-learn, three times from each seed:
with ``Statistics(precision="full")``, with ``"fast"``, and with ``"full"`` from weights that differ
by one part in ten thousand, which shows how far two runs of one precision part. Losses are of all
digits after the last step; a ratio is the geometric mean over seeds, with its standard error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soframe
from benchmarks.fake_gpu.tensor_float import TensorFloat, gpu_with_tensor_float
from experiments.data import digits
from experiments.display import aligned
from soframe.kernels.precision import Precision

EVERY: dict[str, Any] = {"statistics_every": 1, "solve_every": 5}
METHODS: dict[str, dict[str, Any]] = {
    "kfac, inverse": {"method": "kfac", "solver": "inverse", "kl_clip": 0.1},
    "kfac, eigen": {"method": "kfac", "solver": "eigen", "kl_clip": 0.1},
    "soap": {"method": "soap", "lr": 0.003, "auxiliary": "adamw"},
    "soap-muon": {"method": "soap-muon", "lr": 0.02, "auxiliary": "adamw", "auxiliary_lr": 3e-3},
}
NUDGE = 1e-4


def network(task: str) -> nn.Module:
    """Return a model for one of the tasks."""
    widths = [64, 96, 64, 10] if task == "classifier" else [64, 64, 16, 64, 64]
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(
    task: str, chosen: str, precision: Precision, seed: int, steps: int, nudge: float = 0.0
) -> float:
    """Return the loss after training."""
    torch.manual_seed(seed)
    model = network(task)
    pixels, labels = digits()
    pixels = pixels.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge * torch.randn(parameter.shape, generator=generator))
    statistics = soframe.Statistics(precision=precision)
    optimizer = soframe.Optimizer(model, statistics=statistics, **EVERY, **METHODS[chosen])

    def loss(rows: Tensor) -> Tensor:
        outputs = model(pixels[rows])
        if task == "classifier":
            return F.cross_entropy(outputs, labels[rows])
        return (outputs - pixels[rows]).square().sum(1).mean() / 2

    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        with TensorFloat():
            loss(torch.randint(len(pixels), (128,), generator=batches)).backward()
            optimizer.step()
    optimizer.close()
    with torch.no_grad():
        return loss(torch.arange(len(pixels))).item()


def ratio(some: Sequence[float], others: Sequence[float]) -> str:
    """Return the geometric mean of ratios, with its standard error."""
    logs = [math.log(one / other) for one, other in zip(some, others, strict=True)]
    error = statistics.stdev(logs) / len(logs) ** 0.5
    return f"{math.exp(statistics.mean(logs)):.3f} +- {error:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    lines = [["", "full", "fast : full", "nudged : full"]]
    with gpu_with_tensor_float():
        for task in ("classifier", "autoencoder"):
            for chosen in options.methods or METHODS:
                seeds = range(options.seeds)
                full = [train(task, chosen, "full", seed, options.steps) for seed in seeds]
                fast = [train(task, chosen, "fast", seed, options.steps) for seed in seeds]
                near = [train(task, chosen, "full", seed, options.steps, NUDGE) for seed in seeds]
                mean = f"{statistics.mean(full):.4f}"
                lines.append([f"{task}, {chosen}", mean, ratio(fast, full), ratio(near, full)])
                print(lines[-1], flush=True)
    print(aligned(f"loss after {options.steps} steps, {options.seeds} seeds", lines))


if __name__ == "__main__":
    main()
