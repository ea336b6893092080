"""A model, its data and the plain loop that trainers are held to, in float64 where they can."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import soframe

STEPS, MICRO, BATCH = 6, 2, 4  # steps, micro-batches of each, samples of these
SAVED = 3  # the step of the checkpoint, between two steps of statistics and solves
OPTIONS: dict[str, Any] = {"statistics_every": 2, "solve_every": 2, "damping": 0.01}
OWN: dict[str, Any] = {"method": "kfac", "lr": 0.02, "statistics_every": 2, "solve_every": 2}
TIGHT = 1e-10


class Network(nn.Module):
    """Takes labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.last(self.norm(self.first(x).tanh()))
        return {"loss": nn.functional.mse_loss(outputs, labels), "outputs": outputs}


class Data(Dataset[dict[str, Tensor]]):
    """The samples of one rank, in the order in which they are used."""

    def __init__(self, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (STEPS * MICRO, BATCH, 3)
        self.x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        self.x = self.x[:, rank::ranks].reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index][:2].sin()}

    def batches(self) -> list[dict[str, Tensor]]:
        """The micro-batches."""
        size = len(self) // (STEPS * MICRO)
        rows = [[self[i + j] for j in range(size)] for i in range(0, len(self), size)]
        return [{k: torch.stack([r[k] for r in row]) for k in row[0]} for row in rows]


def network(dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(3)
    return Network().to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(
    *,
    clip: float | None = None,
    clip_directions: float | None = None,
    own: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Train in a loop written out, and return the weights."""
    model = network(dtype)
    optimizer: torch.optim.Optimizer
    step: Callable[[], None] = lambda: None  # noqa: E731
    if own:
        optimizer = soframe.Optimizer(model, **OWN)
    else:
        optimizer = sgd(model)
        step = soframe.Preconditioner(model, optimizer=optimizer, **OPTIONS).step
    batches = Data(dtype=dtype).batches()
    for number, batch in enumerate(batches, 1):
        (model(**batch)["loss"] / MICRO).backward()
        if number % MICRO == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            step()
            if clip_directions is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_directions)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


def as_launched(rank: int, ranks: int) -> None:
    """Let libraries find what ``torchrun`` says; there is a process group already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
        ACCELERATE_USE_CPU="1",
    )
