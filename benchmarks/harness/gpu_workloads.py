"""What steps are timed on, on a GPU: GPT-2 and ResNet-50, and who takes part.

Tokens and images are random and fixed by a seed, and learning rates are tiny: nothing is learned.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import soframe
from harness.contenders import (
    DAMPING,
    TURNS,
    Contender,
    clock_of,
    contender,
    interval,
)
from harness.gpt2 import GPT2, Sizes
from harness.networks import NETWORKS, Network
from harness.peers import import_kfac_pytorch
from harness.step_times import aligned, figures, phase_table, quartiles, table
from soframe.experiments.resnet import Residual, convolution

LR = 1e-5  # so small that no method leaves what it began with
SOLVE_EVERY = 10  # steps of GPT-2
LONGEST_SIDE = 8192  # with a factor, of Shampoo by either library
MEGABYTE = 2**20


class Trainee(Protocol):
    """What takes part in a workload, set up and in training."""

    def warm_up(self) -> None:
        """Take steps that are not timed, until periodic work has been done twice."""

    def turn(self) -> None:
        """Take the steps of an interval, and note their times."""

    def close(self) -> None:
        """End what it does beside its steps."""


class Training:
    """GPT-2 in training; a turn is an interval of solves.

    Args:
        model: Its own, on the device.
        optimizers: All take a step after each backward pass.
        batches: One for each step of an interval: windows of a token more than the context.

    Attributes:
        ms: Of a step, in each turn.
        host_ms: Likewise, until Python was done with it and had only to wait for the device.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batches: Tensor
    ) -> None:
        self.model, self.optimizers, self.batches = model, optimizers, batches
        self.clock = clock_of(batches.device)
        self.ms: list[float] = []
        self.host_ms: list[float] = []
        self._taken = 0

    def step(self) -> None:
        """Take a step on the next batch."""
        self.zero_grad()
        windows = self.batches[self._taken % len(self.batches)]
        device = windows.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = self.model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self._taken += 1

    def zero_grad(self) -> None:
        """Give the memory of gradients back."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def warm_up(self) -> None:
        """See `Trainee.warm_up`: an interval and one step."""
        for _ in range(len(self.batches) + 1):
            self.step()
        self.zero_grad()

    def turn(self) -> None:
        """See `Trainee.turn`."""
        start = self.clock()
        for _ in self.batches:
            self.step()
        host = time.perf_counter() - start
        whole = self.clock() - start
        self.zero_grad()
        self.ms.append(1e3 * whole / len(self.batches))
        self.host_ms.append(1e3 * host / len(self.batches))

    def close(self) -> None:
        """See `Trainee.close`."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, soframe.Optimizer):
                optimizer.close()


class Cycle:
    """A network whose kinds of steps are timed; a turn is one cycle of them.

    Args:
        contender: The network in training.
    """

    def __init__(self, contender: Contender) -> None:
        self.contender = contender

    def warm_up(self) -> None:
        """See `Trainee.warm_up`."""
        self.contender.warm_up()

    def turn(self) -> None:
        """See `Trainee.turn`."""
        for kind, count in TURNS:
            self.contender.turn(kind, count)

    def close(self) -> None:
        """See `Trainee.close`."""
        if isinstance(self.contender.preconditioner, soframe.Optimizer | soframe.Preconditioner):
            self.contender.preconditioner.close()


@dataclass(frozen=True)
class Workload:
    """What contenders are compared on.

    Attributes:
        title: What its table is called.
        contenders: Set one up each; the first is what ratios are to.
        rows: Makes a row of each of those that took part, by its name.
        text: Makes tables of a title and rows.
    """

    title: str
    contenders: dict[str, Callable[[], Trainee]]
    rows: Callable[[dict[str, Any]], list[dict[str, Any]]]
    text: Callable[[str, list[dict[str, Any]]], str]


@dataclass(frozen=True)
class Preset:
    """How large the workloads are.

    Attributes:
        sizes: Of GPT-2.
        windows: Of a batch.
        network: The other workload's.
    """

    sizes: Sizes
    windows: int
    network: Network


def images(batch: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random images and classes."""
    return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))


def tiny_resnet() -> nn.Module:
    """Return a network of the layers that ResNet-50 has."""
    layers = [convolution(3, 4, 3, 1), nn.ReLU(), Residual(4, [(8, 3, 2), (8, 1, 1)])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


PRESETS = {
    "real": Preset(
        Sizes(),
        16,
        replace(
            NETWORKS["resnet50"],
            title="ResNet-50, 64 x 224 x 224",
            batch=partial(images, 64, 224, 1000),
        ),
    ),
    "tiny": Preset(
        Sizes(vocabulary=64, context=8, width=16, layers=1, heads=2),
        2,
        replace(
            NETWORKS["resnet50"],
            title="a tiny ResNet, 2 x 8 x 8",
            model=tiny_resnet,
            batch=partial(images, 2, 8, 10),
        ),
    ),
}


# -- GPT-2 ------------------------------------------------------------------------------------

Optimizers = Callable[[GPT2], list[torch.optim.Optimizer]]


def fused_adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's fastest AdamW."""
    return torch.optim.AdamW(params, lr=LR, fused=params[0].device.type == "cuda")


def adamw(model: GPT2) -> list[torch.optim.Optimizer]:
    """Return AdamW for everything."""
    return [fused_adamw(list(model.parameters()))]


def torch_muon(model: GPT2) -> list[torch.optim.Optimizer]:
    """Return torch's Muon for the matrices of the layers, and AdamW for the others."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [torch.optim.Muon(matrices, lr=LR), fused_adamw(others)]


def soframe_method(method: str, model: GPT2, **settings: Any) -> list[torch.optim.Optimizer]:
    """Return soframe's optimizer by a method; what that does not suit is its AdamW's.

    Args:
        method: The method.
        model: The model.
        **settings: Further ones.
    """
    return [
        soframe.Optimizer(
            model,
            method=method,
            lr=LR,
            samples="positions",
            statistics_every=1,
            solve_every=SOLVE_EVERY,
            **settings,
        )
    ]


def pytorch_optimizer_soap(model: GPT2) -> list[torch.optim.Optimizer]:
    """Return pytorch_optimizer's SOAP for everything, as soframe's takes everything."""
    peer = importlib.import_module("pytorch_optimizer")
    return [peer.SOAP(model.parameters(), lr=LR, precondition_frequency=SOLVE_EVERY)]


def distributed_shampoo(model: GPT2) -> list[torch.optim.Optimizer]:
    """Return Meta's Shampoo for what soframe's Shampoo takes, and AdamW for the embedding.

    The work is that of soframe's: no momentum, no grafting, matrices whole.
    """
    peer = importlib.import_module("distributed_shampoo")
    short = [p for p in model.parameters() if max(p.shape) <= LONGEST_SIDE]
    optimizers: list[torch.optim.Optimizer] = [
        peer.DistributedShampoo(
            short,
            lr=LR,
            betas=(0.0, 0.999),
            epsilon=1e-6,
            max_preconditioner_dim=LONGEST_SIDE,
            precondition_frequency=SOLVE_EVERY,
            start_preconditioning_step=SOLVE_EVERY,
            # Else it makes vectors of matrices that are small enough.
            distributed_config=peer.SingleDeviceDistributedConfig(
                target_parameter_dimensionality=2
            ),
        )
    ]
    long = [p for p in model.parameters() if max(p.shape) > LONGEST_SIDE]
    return [*optimizers, fused_adamw(long)] if long else optimizers


GPT2_CONTENDERS: dict[str, Optimizers] = {
    "adamw": adamw,
    "torch-muon": torch_muon,
    "soframe-muon": partial(soframe_method, "muon"),
    "soframe-shampoo": partial(soframe_method, "shampoo"),
    "soframe-soap": partial(soframe_method, "soap"),
    "soframe-soap-muon": partial(soframe_method, "soap-muon"),
    "soframe-kfac": partial(soframe_method, "kfac"),
    "soframe-kfac-inverse": partial(soframe_method, "kfac", solver="inverse"),
    "soframe-soap-background": partial(soframe_method, "soap", background=SOLVE_EVERY - 1),
    "soframe-soap-muon-background": partial(
        soframe_method, "soap-muon", background=SOLVE_EVERY - 1
    ),
    "pytorch-optimizer-soap": pytorch_optimizer_soap,
    "distributed-shampoo": distributed_shampoo,
}


def gpt2(preset: Preset, windows: int | None, device: torch.device) -> Workload:
    """Return the workload.

    Args:
        preset: Of the model.
        windows: Of a batch; None for the preset's.
        device: The device.
    """
    sizes, windows = preset.sizes, windows or preset.windows
    generator = torch.Generator(device).manual_seed(0)
    shape = (SOLVE_EVERY, windows, sizes.context + 1)
    batches = torch.randint(sizes.vocabulary, shape, generator=generator, device=device)
    prototype = GPT2(sizes)

    def set_up(optimizers: Optimizers) -> Training:
        model = copy.deepcopy(prototype).to(device)
        return Training(model, optimizers(model), batches)

    parameters = sum(p.numel() for p in prototype.parameters())
    precision = "bfloat16 autocast" if device.type == "cuda" else "float32"
    title = f"GPT-2 of {parameters / 1e6:.3g} million, {windows} x {sizes.context}, {precision}"
    contenders: dict[str, Callable[[], Trainee]] = {
        name: partial(set_up, optimizers) for name, optimizers in GPT2_CONTENDERS.items()
    }
    return Workload(f"{title}, solves every {SOLVE_EVERY}", contenders, gpt2_rows, gpt2_text)


def gpt2_rows(trained: dict[str, Training]) -> list[dict[str, Any]]:
    """See `Workload.rows`."""
    reference = trained.get("adamw")
    rows = []
    for name, one in trained.items():
        row: dict[str, Any] = {"name": name, "ms": quartiles(one.ms), "turns": one.ms}
        row["host ms"] = quartiles(one.host_ms)[1]
        if reference is not None:
            pairs = list(zip(one.ms, reference.ms, strict=True))
            row["ratio"] = quartiles([own / base for own, base in pairs])
        rows.append(row)
    return rows


def gpt2_text(title: str, rows: list[dict[str, Any]]) -> str:
    """See `Workload.text`."""
    head = ["", "ms a step", "host ms", ": adamw", "peak MB", "held MB"]
    lines = [head]
    for row in rows:
        cells = [row["name"], spread(row["ms"], 1), f"{row['host ms']:.1f}"]
        cells.append(spread(row["ratio"], 2) if "ratio" in row else "")
        cells += [f"{row[key]:.0f}" if key in row else "" for key in ("memory", "held")]
        lines.append(cells)
    return aligned(title, lines)


def spread(values: Sequence[float], digits: int) -> str:
    """Return quartiles as text."""
    low, middle, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


# -- ResNet-50 --------------------------------------------------------------------------------

RESNET_NAMES = {
    "sgd": "sgd",
    "kfac-pytorch-inverse": "kfac-pytorch, inverse",
    "kfac-pytorch-eigen": "kfac-pytorch, eigen",
    "soframe-kfac-inverse": "soframe, inverse",
    "soframe-kfac-eigen": "soframe, eigen",
    "soframe-shampoo": "soframe, shampoo",
}
"""What they are to `harness.contenders`, but for the last, and to `harness.step_times`."""


def resnet50(preset: Preset, device: torch.device, kfac_path: Path | None) -> Workload:
    """Return the workload.

    Args:
        preset: Of the network.
        device: The device.
        kfac_path: A folder with kfac-pytorch.
    """
    network = preset.network
    torch.manual_seed(0)
    prototype = network.model()

    def set_up(name: str) -> Cycle:
        if name == "soframe, shampoo":
            return Cycle(shampoo(network, prototype, device))
        if name.startswith("kfac-pytorch"):
            import_kfac_pytorch(kfac_path)
        return Cycle(contender(name, network, prototype, device, {}))

    contenders: dict[str, Callable[[], Trainee]] = {
        name: partial(set_up, inner) for name, inner in RESNET_NAMES.items()
    }
    title = f"{network.title}, float32, damping {DAMPING}"
    return Workload(title, contenders, resnet_rows, resnet_text)


def shampoo(network: Network, prototype: nn.Module, device: torch.device) -> Contender:
    """Return soframe's Shampoo, whose factors hold the gradient of every step."""
    model = copy.deepcopy(prototype).to(device)
    torch.manual_seed(1)
    inputs, targets = (tensor.to(device) for tensor in network.batch())
    optimizer = soframe.Optimizer(
        model,
        method="shampoo",
        lr=LR,
        statistics_every=interval("statistics", "solve"),
        solve_every=interval("solve"),
    )

    def step() -> None:
        optimizer.zero_grad()
        network.loss(model(inputs), targets).backward()
        optimizer.step()

    return Contender("soframe, shampoo", model, step, clock_of(device), optimizer)


def resnet_rows(trained: dict[str, Cycle]) -> list[dict[str, Any]]:
    """See `Workload.rows`; bare times without SGD, which everything is held to."""
    if "sgd" not in trained:
        return [{"name": name, "turns": one.contender.times} for name, one in trained.items()]
    names = {inner: name for name, inner in RESNET_NAMES.items()}
    rows = figures({RESNET_NAMES[name]: one.contender.times for name, one in trained.items()})
    for row in rows:
        row["name"] = names[row["name"]]
        row["turns"] = trained[row["name"]].contender.times
    return rows


def resnet_text(title: str, rows: list[dict[str, Any]]) -> str:
    """See `Workload.text`."""
    if not rows or rows[0]["name"] != "sgd":
        return f"\n{title}: nothing to compare with"
    lines = [["", "peak MB", "held MB"]]
    measured = [row for row in rows if "memory" in row]
    lines += [[row["name"], f"{row['memory']:.0f}", f"{row['held']:.0f}"] for row in measured]
    bare = [{key: value for key, value in row.items() if key != "memory"} for row in rows]
    parts = [table(title, bare), phase_table("What a part adds", rows)]
    return "\n".join([*parts, aligned("Memory", lines)] if len(lines) > 1 else parts)


KNOWN = {"gpt2": list(GPT2_CONTENDERS), "resnet50": list(RESNET_NAMES)}
"""The names of the contenders of each workload, the reference first."""
