"""A model whose layers are the stages of a pipeline, and its training, on ranks and on one process.

Everything is float64. Parts of the model have the names that its layers have in the whole of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.comm import TorchDistributed
from soframe.settings import grouped
from tests.compatibility.fully_sharded import load, weights
from tests.methods.stages import damping_for

SAMPLES, BATCHES, WIDTH, LAYERS = 8, 4, 4, 4
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
}


PLAN: dict[str, Any] = {
    "layers.[02].linear": ColwiseParallel(output_layouts=Replicate()),
    "layers.[13].linear": RowwiseParallel(input_layouts=Replicate()),
}
"""How layers are cut by their rows and by their columns, each by itself."""


class Layer(nn.Module):
    """A square linear layer, and a gain that K-FAC leaves out; every other one has a bias."""

    def __init__(self, number: int, *, rare: bool = False) -> None:
        super().__init__()
        self.rare = rare and number == 0
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=number % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.gain
        if self.rare and type(x) is Tensor and not x.is_meta and bool(x[0, 0] > 0):
            return scaled
        out: Tensor = self.linear(scaled.tanh())
        return out


class Part(nn.Module):
    """Some layers, one after the other, whose activations may be computed anew."""

    def __init__(self, layers: Mapping[str, nn.Module], *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(OrderedDict(layers))
        self._checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self._checkpoints else layer(x)
        return x


def make_net(*, rare: bool = False) -> Part:
    generator = torch.Generator().manual_seed(5)
    net = Part({str(number): Layer(number, rare=rare) for number in range(LAYERS)}).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return net


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        owner: Who makes the step: ``"sgd"`` after `soframe.Preconditioner`, or soframe (``"own"``).
        method: The method.
        options: Settings of soframe.
        schedule: The schedule; two stages on each rank but for the first two.
        pipe: Over how many ranks stages are spread.
        averaged: Who averages gradients over the copies of a stage: a plain ``"all-reduce"``,
            ``"ddp"``, ``"fully_shard"`` or soframe (``"local"``).
        scales: Whether the schedule divides gradients by micro-batches, or the loss does.
        rates: Whether every layer has a learning rate of its own.
        rare: Whether some micro-batches pass the first layer by.
        checkpoints: Whether stages compute their activations anew.
        bf16: Whether the pipeline runs under autocast to bfloat16, with weights in float32.
        tensor: Over how many ranks each layer is cut, as DTensors.
        trouble: What goes wrong in the third step: ``"loss"``, ``"gradient"``, ``"direction"``; in
            the first: ``"first gradient"``; or ``"frozen"`` and ``"thawed"``, where a layer is so.
        begin: The first step.
        end: The one after the last.
        state: What the run goes on from; a list of what each rank does.
    """

    owner: str = "sgd"
    method: Any = "kfac"
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "1f1b"
    pipe: int = 2
    averaged: str = "all-reduce"
    scales: bool = True
    rates: bool = False
    rare: bool = False
    checkpoints: bool = False
    bf16: bool = False
    tensor: int = 1
    trouble: str = ""
    begin: int = 0
    end: int = 4
    state: Any = None

    def copies(self, ranks: int) -> int:
        """How many copies of the model so many ranks have."""
        return ranks // (self.pipe * self.tensor)


TROUBLE = 2
"""The step in which something goes wrong."""


def batch(step: int, copy: int) -> tuple[Tensor, Tensor]:
    """What a copy of the model is given in a step: inputs and targets."""
    generator = torch.Generator().manual_seed(100 + 10 * step + copy)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1).mean()


def shared(outputs: Tensor, targets: Tensor) -> Tensor:
    return loss_of(outputs, targets) / BATCHES


class Run:
    """A run under way: on ranks, in so many copies, or on one process with the batches of all."""

    def __init__(self, case: Case, ranks: int = 0, copies: int = 1) -> None:
        self.case, self.copies, self.ranks = case, copies, ranks
        self.copy = 0
        self.whole = make_net(rare=case.rare)
        if ranks and case.bf16:
            self.whole.float()
        settings: dict[str, Any] = {"statistics_every": 1, "solve_every": 2, "kl_clip": None}
        settings.update(damping_for(case.method, case.options.get("auxiliary")))
        settings.update(case.options)
        if case.trouble == "direction":
            settings["damping"] = lambda step: 1e-13 if step == TROUBLE else 0.1
        if case.trouble == "thawed":
            self.whole.get_submodule("layers.0").requires_grad_(False)
        self.model: nn.Module = self.whole
        if ranks:
            settings.update(self.cut())
        if case.owner == "sgd":
            self.optimizer: Any = torch.optim.SGD(self.groups(), lr=0.05)
            self.preconditioner = soframe.Preconditioner(
                self.model, case.method, optimizer=self.optimizer, **grouped(settings)
            )
        else:
            settings = {"weight_decay": 0.1, **settings}
            self.optimizer = soframe.Optimizer(
                self.model, case.method, lr=0.02, **grouped(settings)
            )
            self.preconditioner = self.optimizer.preconditioner
        if case.state is not None:
            state = case.state[dist.get_rank()] if isinstance(case.state, list) else case.state
            load(self.model, state["model"])
            if "optimizer" in state:
                self.optimizer.load_state_dict(state["optimizer"])
            if case.owner == "sgd":
                self.preconditioner.load_state_dict(state["own"])

    def groups(self) -> list[dict[str, Any]]:
        """The param groups of a base optimizer."""
        if not self.case.rates:
            return [{"params": list(self.model.parameters())}]
        layers = self.model.get_submodule("layers").named_children()
        return [
            {"params": list(layer.parameters()), "lr": 0.02 * (1 + int(name))}
            for name, layer in layers
        ]

    def cut(self) -> dict[str, Any]:
        """Leave this rank the layers of its stages, and make their schedule."""
        case = self.case
        names = ("dp", "pp", "tp")
        shape = (self.copies, case.pipe, case.tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.among = mesh.get_group("dp")
        self.copy, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        several = case.schedule not in ("gpipe", "1f1b")
        stages = case.pipe * (2 if several else 1)
        mine = [index for index in range(stages) if index % case.pipe == rank]
        each = LAYERS // stages
        layers = dict(self.whole.layers.named_children())
        of_stage = [
            {str(n): layers[str(n)] for n in range(index * each, (index + 1) * each)}
            for index in mine
        ]
        self.model = Part({name: layer for own in of_stage for name, layer in own.items()})
        modules: list[nn.Module] = [Part(own, checkpoints=case.checkpoints) for own in of_stage]
        if case.tensor > 1:
            parallelize_module(self.model, mesh["tp"], PLAN)
        if case.averaged == "fully_shard":
            for module in modules:
                fully_shard(module, mesh=mesh["dp"])
            (self.model,) = modules  # which have the hooks
        if case.averaged == "ddp":
            modules = [DistributedDataParallel(m, process_group=self.among) for m in modules]
        group = mesh.get_group("pp")
        parts = [
            PipelineStage(module, index, stages, torch.device("cpu"), group=group)
            for module, index in zip(modules, mine, strict=True)
        ]
        self.first, self.last = mine[0] == 0, mine[-1] == stages - 1
        self.schedule = SCHEDULES[case.schedule](
            parts if several else parts[0],
            n_microbatches=BATCHES,
            loss_fn=loss_of if case.scales else shared,
            scale_grads=case.scales,
        )
        given: dict[str, Any] = {"pipeline": self.schedule}
        if case.averaged == "local":
            given["gradients"] = "local"
        if self.copies > 1:
            given["backend"] = TorchDistributed(self.among)
        if case.tensor > 1:
            both = mesh["dp", "tp"] if self.copies > 1 else mesh["tp"]
            given["backend"] = TorchDistributed(both)
        return given

    def backward(self, step: int) -> None:
        if self.ranks:
            inputs, targets = self.spoilt(step, *batch(step, self.copy))
            if self.case.bf16:
                inputs, targets = inputs.float(), targets.float()
            own = (inputs,) if self.first else ()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.case.bf16):
                self.schedule.step(*own, **({"target": targets} if self.last else {}))
            by_hand = self.case.averaged == "all-reduce" and self.copies > 1
            for parameter in self.model.parameters() if by_hand else ():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.among)
                    parameter.grad.div_(self.copies)
        else:
            every = [self.spoilt(step, *batch(step, copy)) for copy in range(self.copies)]
            inputs, targets = (torch.cat(parts) for parts in zip(*every, strict=True))
            parts = BATCHES if self.case.rare else 1
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                (loss_of(self.model(x), y) / parts).backward()
        gradient = dict(self.model.named_parameters()).get("layers.0.linear.weight")
        when, bad = {
            "gradient": (TROUBLE, math.inf),
            "first gradient": (0, math.inf),
            "direction": (TROUBLE, 1.7e308),
        }.get(self.case.trouble, (-1, 0.0))
        if step == when and gradient is not None:
            own = gradient.grad
            assert own is not None
            (own.to_local() if isinstance(own, DTensor) else own)[0, 0] = bad

    def spoilt(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step == TROUBLE and self.case.trouble == "loss":
            targets = targets.clone()
            targets[-1, 0] = math.nan
        return inputs, targets

    def step(self, step: int) -> None:
        if step == TROUBLE and self.case.trouble == "frozen":
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_("layers.0.linear" not in name)
        if step == TROUBLE and self.case.trouble == "thawed":
            self.model.requires_grad_(True)
        self.optimizer.zero_grad()
        self.backward(step)
        if self.case.owner == "sgd":
            self.preconditioner.step()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        found = {"model": weights(self.model), "optimizer": self.optimizer.state_dict()}
        return {**found, "own": self.preconditioner.state_dict()}


def train(case: Case, ranks: int = 0, copies: int = 1) -> Run:
    run = Run(case, ranks, copies)
    for step in range(case.begin, case.end):
        run.step(step)
    return run


def alone(case: Case, copies: int = 1) -> Run:
    """A run on one process, with the batches of all copies, in float64 whatever the case."""
    options = {k: v for k, v in case.options.items() if k != "strategy"}
    return train(replace(case, options=options), copies=copies)


def together(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The weights of a whole model, from those of its stages."""
    return {name: weight for part in parts for name, weight in part.items()}
