"""Layers whose rows do not all count, or are found in the graph: ranks train as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe import Preconditioner
from soframe.strategies import HybridOpt, Sharded
from tests import kit
from tests.distributed.harness import run_ranks
from tests.layers.test_experts import EXPERTS, INTO, Kernel, Routed

pytestmark = pytest.mark.distributed

SAMPLES, STEPS = 6, 3
STRATEGIES: dict[str, Any] = {
    "comm": "comm-opt",
    "mem": "mem-opt",
    "hybrid": HybridOpt(gradient_workers=1),
    "sharded": Sharded(group=None),
}
FISHERS = {"empirical": tuple(STRATEGIES), "type-2": ("comm", "sharded")}
"""Where statistics come from is the same under all strategies: two tell."""


class Net(nn.Module):
    """An embedding with padding, a norm, attention with and without a memory, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, INTO, padding_idx=0)
        self.norm = nn.LayerNorm(INTO)
        self.attention = nn.MultiheadAttention(INTO, 2, batch_first=True)
        self.memory = nn.MultiheadAttention(INTO, 2, batch_first=True)
        self.routed = Routed()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.memory(x[:, :2], x, x)[0].mean(1).tanh()
        routes = (tokens[:, :1] % EXPERTS).to(x)
        output: Tensor = self.routed(torch.cat([x, routes], 1))
        return output


class Signals(nn.Module):
    """A bag with padding, convolutions of a signal, an instance norm and a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 6, mode="mean", padding_idx=0)
        self.convolution = nn.Conv1d(2, 4, 2, groups=2, padding=1)
        self.norm = nn.InstanceNorm1d(4, affine=True)
        self.transposed = nn.ConvTranspose1d(4, 3, 2, stride=2)
        self.cell = nn.GRUCell(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bag(tokens).unflatten(1, (2, 3))
        x = self.transposed(self.norm(self.convolution(x)).tanh())
        state: Tensor | None = None
        for step in x.unbind(2):
            state = self.cell(step, state)
        output: Tensor = self.head(state)
        return output


NETS: dict[str, type[nn.Module]] = {"tokens": Net, "signals": Signals}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 7, (SAMPLES, 4), generator=generator)
    return tokens, torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)


def weights_of(rank: int, ranks: int, *, net: str, strategy: str, fisher: str) -> Tensor:
    torch.manual_seed(0)
    model = NETS[net]().double()
    share = SAMPLES // ranks
    own = Preconditioner(
        model,
        strategy=STRATEGIES[strategy] if ranks > 1 else "comm-opt",
        layers={"experts": Kernel, "": "all"} if net == "tokens" else "all",
        statistics=soframe.Statistics(samples=lambda: share, fisher=fisher, loss="mse"),
        damping=0.1,
        decay=0.5,
        kl_clip=None,
        statistics_every=1,
        solve_every=1,
    )
    assert len({row.block for row in own.report()}) == 7
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    part = slice(rank * share, (rank + 1) * share)

    def loss(model: nn.Module, step: int) -> Tensor:
        tokens, targets = batch(step)
        output = model(tokens[part])
        if fisher == "type-2":
            own.observe(output)
        return (output - targets[part]).square().mean()

    weights = kit.train(model, loss, range(STEPS), kit.Averaging(model), own, optimizer)
    assert all(parameter.grad is not None for parameter in model.parameters())
    own.close()
    return weights


def on_ranks(rank: int, ranks: int) -> dict[tuple[str, str, str], Tensor]:
    return {
        (net, strategy, fisher): weights_of(rank, ranks, net=net, strategy=strategy, fisher=fisher)
        for net in NETS
        for fisher, strategies in FISHERS.items()
        for strategy in strategies
    }


def test_ranks_train_as_one_process() -> None:
    ranks = run_ranks(on_ranks, 2)
    for net in NETS:
        for fisher, strategies in FISHERS.items():
            alone = weights_of(0, 1, net=net, strategy="comm", fisher=fisher)
            for rank, found in enumerate(ranks):
                for strategy in strategies:
                    where = f"{net}, {strategy}, {fisher}, rank {rank}"
                    torch.testing.assert_close(
                        found[net, strategy, fisher], alone, rtol=1e-8, atol=1e-10, msg=where
                    )
