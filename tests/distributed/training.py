"""Small training runs, on one process or on the ranks of a group, that must come to the same.

Everything is float64 and seeded by the step, so that any rank can make any part of any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from soframe import Preconditioner
from soframe.comm import Backend
from soframe.settings import grouped

SAMPLES = 12
LR = 0.1
Shards = tuple[tuple[int, ...], ...]
"""Per rank, the sizes of its micro-batches."""


class Net(nn.Module):
    """Linear and convolutional layers, a grouped one, one without bias, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, dtype=torch.float64)
        self.grouped = nn.Conv2d(4, 4, 2, groups=2, bias=False, dtype=torch.float64)
        self.unused = nn.Linear(3, 3, dtype=torch.float64)
        self.hidden = nn.Linear(16, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.conv(x).tanh()).tanh()
        return self.head(self.hidden(x.flatten(1)).tanh())


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, of all ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(SAMPLES, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        options: Of the Preconditioner.
        shards: How each step's batch is divided; None for equal shards, one batch each.
        loss_average: The Preconditioner's, and what is done to the loss accordingly.
        steps: How many.
        factor: Multiplies every gradient before the preconditioner sees it.
    """

    options: dict[str, Any] = field(default_factory=dict)
    shards: Shards | None = None
    loss_average: str = "local"
    steps: int = 4
    factor: float = 1.0

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})


def equal_shards(ranks: int) -> Shards:
    return ((SAMPLES // ranks,),) * ranks


def preconditioner_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, backend: Backend | None
) -> Preconditioner:
    options: dict[str, Any] = {"statistics_every": 1, "damping": 0.02, "decay": 0.7}
    options |= {"kl_clip": 0.05, "loss_average": case.loss_average, "backend": backend}
    return Preconditioner(model, optimizer=optimizer, **grouped({**options, **case.options}))


def backward(
    model: nn.Module,
    case: Case,
    step: int,
    rank: int = 0,
    ranks: int = 1,
    average: Callable[[Tensor], object] | None = None,
) -> None:
    """Leave this rank's gradients of a step, averaged over ranks as DDP would."""
    shards = case.shards if case.shards is not None else equal_shards(ranks)
    x, y = batch(step)
    start = sum(map(sum, shards[:rank]))
    own = shards[rank]
    for size in own:
        part = slice(start, start + size)
        start += size
        losses = (model(x[part]) - y[part]).square().sum(1)
        if case.loss_average == "global":
            loss = losses.sum() * ranks / SAMPLES
        elif case.loss_average == "sum":
            loss = losses.sum()
        else:
            loss = losses.sum() / max(size, 1) / len(own)
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, case.factor)
    if average is not None:
        # All at once: a collective for each would take longer than the step.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        average(flat)
        for gradient, mean in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))


def mean_over(group: dist.ProcessGroup | None = None) -> Callable[[Tensor], object]:
    def average(gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=group)
        gradient.div_(dist.get_world_size(group))

    return average


@dataclass
class Run:
    """A run under way."""

    case: Case
    rank: int = 0
    ranks: int = 1
    backend: Backend | None = None
    average: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        self.model: nn.Module = make_net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.preconditioner = preconditioner_of(self.model, self.optimizer, self.case, self.backend)

    def step(self, step: int, between: Callable[[Run], object] | None = None) -> None:
        """One step; `between` is called after the backward passes."""
        self.optimizer.zero_grad()
        backward(self.model, self.case, step, self.rank, self.ranks, self.average)
        if between is not None:
            between(self)
        self.preconditioner.step()
        self.optimizer.step()

    def train(self, steps: Iterable[int] | None = None) -> Run:
        """Take these steps, or all of the case; returns itself."""
        for step in range(self.case.steps) if steps is None else steps:
            self.step(step)
        return self

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


def train_alone(case: Case) -> Tensor:
    """The weights after a run on one process."""
    run = Run(case).train()
    run.preconditioner.close()
    return run.weights()


def train_rank(
    rank: int, ranks: int, case: Case, make_backend: Callable[[], Backend] | None = None
) -> Run:
    """A finished run on one rank of the default group."""
    run = Run(
        case,
        rank,
        ranks,
        make_backend() if make_backend is not None else None,
        mean_over() if ranks > 1 else None,
    ).train()
    run.preconditioner.close()
    return run


def train_cases(rank: int, ranks: int, cases: list[Case]) -> list[Tensor]:
    """The weights after each of some runs on this rank."""
    return [train_rank(rank, ranks, case).weights() for case in cases]


def snapshot(preconditioner: Preconditioner) -> dict[str, Tensor]:
    """A copy of everything that this rank remembers."""
    found = {}
    for block in preconditioner.blocks:
        for name, tensor in block.running.items():
            found[f"{block.name}.{name}"] = tensor.clone()
        for factor, tensors in block.second_order.items():
            for name, tensor in tensors.items():
                found[f"{block.name}.{factor}.{name}"] = tensor.clone()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two snapshots are the same bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
