"""Counts the operators and waits of training steps at full size, on a machine without a GPU.

    python -m benchmarks.launches gpt2 kfac
    python -m benchmarks.launches gpt2 muon soap --lines 40
    python -m benchmarks.launches gpt2 kfac --layers 3
    python -m benchmarks.launches resnet50 kfac --json launches.json

``gpt2`` is GPT-2 of 124 million parameters with 16 sequences of 1024 tokens, in bfloat16 by
autocast, and the whole step is soframe's (`soframe.Optimizer`, K-FAC with damped inverses).
``resnet50`` is ResNet-50 with 64 images in single precision, and a `soframe.Preconditioner` with
damped inverses before SGD.

Steps are of three kinds: ``plain``, ``statistics``, and ``solve``, which takes statistics too where
the method has any of calls (SOAP refreshes its bases there). Counted is everything but the forward
and the backward pass of the model; the statistics that hooks take within them are counted, as the
phase ``accumulate``. The first step, which creates states, is not counted. Bytes are those of the
tensors that operators read and write: what a product reads twice, or keeps in a cache, is not seen.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fake_gpu import counting

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soframe
from benchmarks.fake_gpu.counting import COUNTS, FAKE, fake, phase
from experiments.display import aligned
from experiments.models import GPT, Sizes, next_token_loss
from soframe.planning.workloads import resnet
from soframe.tracing.phases import Phases

LR = 1e-5
PASSES = ("forward", "backward")
KINDS = ("solve", "plain", "statistics", "solve")
"""The kinds of the steps that are taken; the first of them is not counted."""
SCHEDULE: dict[str, Any] = {
    "statistics_every": lambda step: 4 if KINDS[step % 4] == "plain" else 1,
    "solve_every": lambda step: 4 if KINDS[step % 4] != "solve" else 1,
}

Loss = Callable[[], Tensor]


def gpt2_loss(layers: int | None = None) -> tuple[nn.Module, Loss]:
    """Return GPT-2, or only so many layers of it, and its loss."""
    sizes = Sizes() if layers is None else Sizes(layers=layers)
    with FAKE:
        model = counting.moved(GPT(sizes, fused=True))
    tokens = fake((16, sizes.context + 1), torch.long)

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return next_token_loss(model, tokens[:, :-1], tokens[:, 1:])

    return model, loss


def resnet50_loss(layers: int | None = None) -> tuple[nn.Module, Loss]:
    """Return ResNet-50 and its loss.

    Raises:
        ValueError: If it is to have another number of layers.
    """
    if layers is not None:
        raise ValueError("ResNet-50 has the layers that it has")
    with FAKE:
        model = counting.moved(resnet())
    images, labels = fake((64, 3, 224, 224)), fake((64,), torch.long)
    return model, lambda: F.cross_entropy(model(images), labels)


def gpt2_optimizers(model: nn.Module, method: str) -> list[Any]:
    """Return soframe's optimizer."""
    solver = {"solver": "inverse"} if method == "kfac" else {}
    return [
        soframe.Optimizer(
            model,
            method=method,
            lr=LR,
            statistics=soframe.Statistics(samples="positions"),
            **solver,
            **SCHEDULE,
        )
    ]


def resnet50_optimizers(model: nn.Module, method: str) -> list[Any]:
    """Return a preconditioner, and SGD."""
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, foreach=True)
    solver = "inverse" if method == "kfac" else None
    return [
        soframe.Preconditioner(model, method, solver, optimizer=sgd, damping=0.003, **SCHEDULE),
        sgd,
    ]


NETWORKS = {
    "gpt2": (gpt2_loss, gpt2_optimizers),
    "resnet50": (resnet50_loss, resnet50_optimizers),
}


def step(parameters: Sequence[Tensor], loss: Loss | None, optimizers: Sequence[Any]) -> None:
    """Take a step; without a loss the gradients are simply there."""
    for parameter in parameters:
        parameter.grad = None if loss is not None else fake(parameter.shape)
    if loss is not None:
        with phase("forward"):
            value = loss()
        with phase("backward"):
            value.backward()
    with phase("step"):
        for optimizer in optimizers:
            optimizer.step()


def counted(network: str, method: str, layers: int | None = None) -> dict[str, Any]:
    """Return the counts of each kind of step, by phase and by line."""
    build, contender = NETWORKS[network]
    model, loss = build(layers)
    parameters = list(model.parameters())
    steps: dict[str, Any] = {}
    with counting.Gpu():
        optimizers = contender(model, method)
        # Statistics of calls come from hooks in the passes; without any, passes need not run.
        captures = method == "kfac"
        has_statistics = method not in ("adamw", "muon")
        for number, kind in enumerate(KINDS):
            COUNTS.clear()
            step(parameters, loss if captures else None, optimizers)
            if number > 0 and (has_statistics or kind != "statistics"):
                steps[kind] = outcome()
    return {"network": network, "method": method, "steps": steps}


def outcome() -> dict[str, Any]:
    """Return what has been counted outside of the passes."""
    operators = {key: n for key, n in COUNTS.operators.items() if key[0] not in PASSES}
    waits = {key: n for key, n in COUNTS.waits.items() if key[0] not in PASSES}
    phases: Counter[str] = Counter()
    for (name, _, _), number in operators.items():
        phases[name] += number
    moved = sum(n for key, n in COUNTS.bytes.items() if key[0] not in PASSES)
    ordered = sorted(operators.items(), key=lambda item: -item[1])
    return {
        "operators": sum(operators.values()),
        "waits": sum(waits.values()),
        "GB": round(moved / 1e9, 1),
        "phases": dict(phases.most_common()),
        "lines": [[number, *key] for key, number in ordered],
        "waits_by_line": [[number, *key] for key, number in waits.items()],
    }


def text(counts: dict[str, Any], lines: int) -> str:
    """Return a table of the kinds of steps by phase, and the lines with the most operators."""
    steps = counts["steps"]
    names = sorted({name for one in steps.values() for name in one["phases"]})
    rows = [["", *steps]]
    rows += [[name, *(str(one["phases"].get(name, 0)) for one in steps.values())] for name in names]
    rows += [
        [key, *(str(one[key]) for one in steps.values())] for key in ("operators", "waits", "GB")
    ]
    parts = [aligned(f"{counts['network']}, {counts['method']}: operators", rows)]
    for kind, one in steps.items():
        by_line = [["", "phase", "line", "operator"]]
        by_line += [[str(cell) for cell in row] for row in one["lines"][:lines]]
        by_line += [[str(n), name, line, "(wait)"] for n, name, line in one["waits_by_line"]]
        parts.append(aligned(kind, by_line))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("methods", nargs="+", metavar="method")
    parser.add_argument("--layers", type=int, help="how many layers GPT-2 has; by default all 12")
    parser.add_argument("--lines", type=int, default=20, help="how many lines of each step")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    counting.install()
    Phases.__call__ = lambda self, name: phase(name)  # type: ignore[method-assign]
    results = [counted(given.network, method, given.layers) for method in given.methods]
    print("\n\n".join(text(one, given.lines) for one in results))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
