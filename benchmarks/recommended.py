"""The recommended call of four models, planned: memory of a GPU, and time of a step.

    python -m benchmarks.recommended

Plans on the profile h100-ib, on one rank and on eight, with the method, the strategy and the
background solves of `soframe.recommend`; nothing runs. docs/choose.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from torch import nn

import soframe
from benchmarks.adapters import RANK, LoRA
from experiments.display import table
from experiments.recipes import vit
from soframe.planning.hardware import Hardware
from soframe.planning.planner import Option, plan
from soframe.planning.task import Task
from soframe.planning.workloads import WORKLOADS
from soframe.strategies import CommOpt, MemOpt

STRATEGIES = {"comm-opt": CommOpt(), "mem-opt": MemOpt()}


def gpt2() -> nn.Module:
    return WORKLOADS["gpt2"].model()


def adapted() -> nn.Module:
    """GPT-2 with adapters on queries and values, as in Hu et al., 2021."""
    model = gpt2().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("query", "value")):
            parent, _, own = name.rpartition(".")
            with torch.device("meta"):
                setattr(model.get_submodule(parent), own, LoRA(module, RANK))  # type: ignore[arg-type]
    return model


def images(batch: int) -> torch.Tensor:
    return torch.empty(batch, 3, 224, 224, device="meta")


def small_vit() -> nn.Module:
    with torch.device("meta"):
        return vit.model(vit.Settings())


TOKENS = torch.empty(8, 1024, dtype=torch.long, device="meta")
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "GPT-2 124M, 8 x 1024": (gpt2, TOKENS),
    "ViT-S/16, 64": (small_vit, images(64)),
    "ResNet-50, 32": (WORKLOADS["resnet50"].model, images(32)),
    "LoRA on GPT-2, rank 4, 8 x 1024": (adapted, TOKENS),
}


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a model, AdamW's GB, and for one rank and eight: GB held, at the peak, and the time."""
    hardware = Hardware.load("h100-ib")
    for name, (make, inputs) in MODELS.items():
        model = make()
        advice = soframe.recommend(model)
        task = Task.of(model, (inputs,), **advice.plan)
        option = Option(STRATEGIES[advice.strategy])
        moments = sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
        cells = [name, f"{moments / 1e9:.3f}"]
        for ranks in (1, 8):
            planned = plan(task, ranks=ranks, hardware=hardware, options=[option])
            (row,) = planned.rows
            held, peak = (row.memory[kind] / 1e9 for kind in ("held", "total"))
            ratio = row.timing.mean / planned.plain
            cells += [f"{held:.3f}", f"{peak:.3f}", f"{ratio:.2f}"]
        yield tuple(cells)


def main() -> None:
    heads = ["model, batch of a rank", "AdamW, GB"]
    heads += [f"{kind}, {ranks}" for ranks in (1, 8) for kind in ("held", "peak", "step")]
    Console().print(table("Planned for h100-ib, with soframe.recommend", heads, list(rows())))


if __name__ == "__main__":
    main()
