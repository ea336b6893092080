"""Training with fully_shard on ranks, and without on one process, that must come to the same.

Everything is float64 and seeded by the step, so that any rank can make any part of any batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.settings import grouped
from tests.methods.stages import damping_for

SAMPLES, TOKENS, WIDTH = 24, 19, 6


class Layer(nn.Module):
    """Two square layers and a norm; their rows fit no number of ranks but 1, 2, 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """An embedding, two layers, a layer that is not used, and a head of three rows."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self._checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            if self._checkpoints:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return self.head(hidden.tanh())


def make_net(*, checkpoints: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(checkpoints=checkpoints).double()


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        owner: ``"sgd"``: the base optimizer behind `soframe.Preconditioner`; else
            `soframe.Optimizer` owns the step.
        method: The method.
        options: Further settings of these.
        shard: Settings of ``fully_shard``.
        hybrid: Whether ranks are in two copies of the model.
        root_only: Whether ``fully_shard`` is called on the whole model alone.
        when: Whether it is called ``"before"`` the preconditioner is built, or ``"after"``.
        passes: Micro-batches in each step.
        syncs: Whether gradients are reduced in each of them, rather than in the last alone.
        checkpoints: Whether activations are computed anew in the backward pass.
        begin: The first step.
        end: The step after the last.
        state: What to begin from.
        spoilt: The step at which the gradient of one rank is not finite.
        observed: Whether the Fisher is observed.
        factor: What the loss is multiplied by.
        groups: Whether biases have a learning rate of their own.
        frozen: From which step to which a weight, a bias and a whole layer are not trained.
    """

    owner: str = "sgd"
    method: Any = "kfac"
    options: Mapping[str, Any] = field(default_factory=dict)
    shard: Mapping[str, Any] = field(default_factory=dict)
    hybrid: bool = False
    root_only: bool = False
    when: str = "before"
    passes: int = 1
    syncs: bool = True
    checkpoints: bool = False
    begin: int = 0
    end: int = 3
    state: Any = None
    spoilt: int | None = None
    observed: bool = False
    factor: float = 1.0
    groups: bool = False
    frozen: tuple[int, int] = (-1, -1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, of all ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, TOKENS, (SAMPLES,), generator=generator)
    return tokens, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def shard(model: Net, case: Case, ranks: int) -> None:
    """Call fully_shard."""
    settings = dict(case.shard)
    settings["mesh"] = (
        init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "rows"))
        if case.hybrid
        else init_device_mesh("cpu", (ranks,))
    )
    for layer in () if case.root_only else model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; every rank must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def load(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let a model have saved weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = saved[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


class Run:
    """A run under way, on one rank of the default group; or on one process, without fully_shard."""

    def __init__(self, case: Case, rank: int = 0, ranks: int = 1, *, sharded: bool = True) -> None:
        self.case, self.rank, self.ranks = case, rank, ranks
        self.model = make_net(checkpoints=case.checkpoints)
        if sharded and case.when == "before":
            shard(self.model, case, ranks)
        settings = {"statistics_every": 1, "solve_every": 2, "kl_clip": None}
        settings.update(damping_for(case.method, case.options.get("auxiliary")))
        settings.update(case.options)
        if case.observed:
            settings.update(fisher="type-2", loss="squared-error")
        self.optimizer: Any
        if case.owner == "sgd":
            if sharded and case.when == "after":
                # The base optimizer needs the parameters that there are afterwards.
                lr = settings.pop("lr", 0.1)
                self.preconditioner = soframe.Preconditioner(
                    self.model, case.method, lr=lr, layers="all", **grouped(settings)
                )
                shard(self.model, case, ranks)
                self.optimizer = self.base()
            else:
                self.optimizer = self.base()
                self.preconditioner = soframe.Preconditioner(
                    self.model,
                    case.method,
                    optimizer=self.optimizer,
                    layers="all",
                    **grouped(settings),
                )
        else:
            settings = {"lr": 0.05, "weight_decay": 0.1, **settings}
            self.optimizer = soframe.Optimizer(self.model, case.method, **grouped(settings))
            self.preconditioner = self.optimizer.preconditioner
            if sharded and case.when == "after":
                shard(self.model, case, ranks)
        if case.state is not None:
            load(self.model, case.state["model"])
            (self.preconditioner if case.owner == "sgd" else self.optimizer).load_state_dict(
                case.state["own"]
            )

    def base(self) -> torch.optim.Optimizer:
        if not self.case.groups:
            # Natural gradients fall with the loss's scale.
            return torch.optim.SGD(self.model.parameters(), lr=0.1 * self.case.factor)
        named = list(self.model.named_parameters())
        biases = [p for name, p in named if name.endswith("bias")]
        others = [p for name, p in named if not name.endswith("bias")]
        return torch.optim.SGD([{"params": biases, "lr": 0.3}, {"params": others}], lr=0.1)

    def backward(self, step: int) -> None:
        case = self.case
        x, y = batch(step)
        mine = slice(self.rank * SAMPLES // self.ranks, (self.rank + 1) * SAMPLES // self.ranks)
        size = SAMPLES // self.ranks // case.passes
        pairs = list(zip(x[mine].split(size), y[mine].split(size), strict=True))
        for number, (tokens, targets) in enumerate(pairs):
            if not case.syncs:
                self.model.set_requires_gradient_sync(number == len(pairs) - 1)
            outputs = self.model(tokens).double()
            if case.observed:
                self.preconditioner.observe(outputs)
            loss = 0.5 * (outputs - targets).square().sum(1).mean() * case.factor / case.passes
            spoilt = step == case.spoilt and self.rank == 0
            (loss * float("nan") if spoilt else loss).backward()

    def step(self, step: int) -> None:
        if step in self.case.frozen:
            first, second = self.model.layers
            for parameter in (first.up.weight, second.up.bias, *second.down.parameters()):
                parameter.requires_grad_(step == self.case.frozen[1])
        self.optimizer.zero_grad()
        self.backward(step)
        if self.case.owner == "sgd":
            self.preconditioner.step()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        own = self.preconditioner if self.case.owner == "sgd" else self.optimizer
        return {"model": weights(self.model), "own": own.state_dict()}


def train(case: Case, rank: int = 0, ranks: int = 1, *, sharded: bool = True) -> Run:
    run = Run(case, rank, ranks, sharded=sharded)
    for step in range(case.begin, case.end):
        run.step(step)
    return run


def alone(case: Case) -> dict[str, Tensor]:
    """The weights after a run on one process, of the concatenated batch."""
    options = dict(case.options)
    options.pop("strategy", None)
    plain = replace(case, syncs=True, options=options)
    return weights(train(plain, sharded=False).model)
