"""Runs of the gallery's methods on a rank, which tests start in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import soframe
from experiments.gallery.dion import Dion
from experiments.gallery.lora_pro import LoRAPro
from soframe.blocks import sharding
from soframe.methods import Direction, Given
from tests.curvature import closing, randn


def with_gaps(rank: int, ranks: int, strategy: str) -> list[Tensor]:
    """The weights after steps in which one of two alike layers has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))).double()
    optimizer = soframe.Optimizer(model, Dion(rank_fraction=0.3), strategy=strategy, lr=0.1)
    for step in range(4):
        for index, parameter in enumerate(model.parameters()):
            is_left_out = step == 1 + index
            parameter.grad = None if is_left_out else randn(6, 6, seed=10 * step + index)
        optimizer.step()
    optimizer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def with_parts(rank: int, ranks: int, strategy: str, *, sharded: bool = True) -> tuple[Any, ...]:
    """The weights after three steps of matrices in parts, what was sent, and the placement."""
    torch.manual_seed(0)
    shapes = [(16, 12), (12, 16), (16, 12), (12, 3)]
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)).double()
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = soframe.Optimizer(
        model, Dion(rank_fraction=0.05), strategy=strategy, lr=0.1, auxiliary="sgd"
    )
    inputs, targets = randn(4, 16, seed=1), randn(4, 3, seed=2)
    for _ in range(3):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    optimizer.close()
    weights = [sharding.whole(parameter.detach()).clone() for parameter in model.parameters()]
    return weights, optimizer.preconditioner.traffic(), optimizer.preconditioner.placement


class Empty(Dion):
    """It declares a parcel and returns none."""

    def direct(self, step: Given) -> Direction:
        update = super().direct(step)
        return Direction(update.matrix, update.state)


def empty(rank: int, ranks: int) -> str:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    own = soframe.Preconditioner(
        model, Empty(rank_fraction=0.1), strategy="mem-opt", auxiliary="sgd"
    )
    model(torch.ones(2, 6)).sum().backward()
    try:
        own.step()
        own.step()
    except Exception as error:
        return str(error)
    finally:
        own.close()
    return ""


class Adapter(nn.Module):
    """A frozen matrix and ``B A`` beside it."""

    def __init__(self, into: int, out: int, rank: int, seed: int) -> None:
        super().__init__()
        self.base = nn.Linear(into, out, bias=False).requires_grad_(False)
        self.lora_A = nn.Linear(into, rank, bias=False)
        self.lora_B = nn.Linear(rank, out, bias=False)
        shapes = {"base": (out, into), "lora_A": (rank, into), "lora_B": (out, rank)}
        for number, (name, shape) in enumerate(shapes.items()):
            self.get_submodule(name).weight.data = randn(*shape, seed=10 * seed + number)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs ``[N, out]`` of inputs ``[N, into]``."""
        return self.base(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def adapted() -> nn.Module:
    """Two adapters of one shape, which share a stack, and another."""
    sizes = [(4, 4, 2), (4, 4, 2), (4, 3, 2)]
    return nn.Sequential(*(Adapter(*size, seed=i + 1) for i, size in enumerate(sizes)))


@dataclass(frozen=True)
class Adapting:
    """A run of a few steps, perhaps from a state, in micro-batches."""

    strategy: str = "comm-opt"
    passes: int = 1
    begin: int = 0
    end: int = 4
    state: dict[str, Any] | None = None


def adapt(rank: int, ranks: int, run: Adapting) -> tuple[list[Tensor], dict[str, Any]]:
    """Train the adapters, and return their weights and the states to go on from."""
    model = adapted()
    optimizer = soframe.Optimizer(model, LoRAPro(scale=0.5), strategy=run.strategy, lr=0.01)
    if run.state is not None:
        model.load_state_dict(run.state["model"])
        optimizer.load_state_dict(run.state["optimizer"])
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(run.begin, run.end):
        optimizer.zero_grad()
        inputs, targets = randn(12, 4, seed=step), randn(12, 3, seed=50 + step)
        for part in torch.arange(12).chunk(ranks)[rank].chunk(run.passes):
            loss = (model(inputs[part]) - targets[part]).square().mean() / run.passes
            loss.backward()
        for parameter in trained if ranks > 1 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    optimizer.close()
    return [parameter.detach().clone() for parameter in trained], state


def sharded(rank: int, ranks: int) -> None:
    """Take steps of sharded weights, which are an error."""
    model = fully_shard(adapted(), mesh=init_device_mesh("cpu", (ranks,)))
    with closing(soframe.Optimizer(model, LoRAPro(), lr=0.01)) as optimizer:
        for _ in range(2):
            model(randn(12, 4)).square().mean().backward()
            optimizer.step()
