"""Gradients that soframe averages itself: the same steps as with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe import Preconditioner, TrustRegion
from soframe.comm import Recording, TorchDistributed, leave_gradients
from soframe.strategies import HybridOpt, Sharded
from soframe.testing import compare
from tests import kit
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

STRATEGIES: dict[str, Any] = {
    "mem": "mem-opt",
    "comm": "comm-opt",
    "hybrid": HybridOpt(gradient_workers=2),
    "sharded": Sharded(),
}


MODES = ("ddp", "plain", "hook", "fused")


class Net(nn.Module):
    """Layers with and without blocks, one that some steps use on one rank only, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Linear(4, 5)
        self.side = nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(5, 3)
        self.never = nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor, aside: bool) -> Tensor:
        x = self.norm(self.embedding(x))
        hidden = self.body(x) + self.side(x) if aside else self.body(x)
        return self.head(hidden.tanh())


def path_of(rank: int, strategy: Any, mode: str, options: dict[str, Any]) -> list[Tensor]:
    """The weights after every step; two micro-batches each."""
    torch.manual_seed(0)
    model = Net()
    called: nn.Module = model
    if mode in ("ddp", "hook"):
        called = DistributedDataParallel(model, find_unused_parameters=True)
    if mode == "hook":
        called.register_comm_hook(None, leave_gradients)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = Preconditioner(
        called,
        strategy=strategy,
        optimizer=optimizer,
        statistics_every=1,
        solve_every=2,
        distribution=soframe.Distribution(
            backend=TorchDistributed(fused=mode == "fused"),
            gradients="averaged" if mode == "ddp" else "local",
        ),
        **{"kl_clip": 1e-2, **options},
    )

    def losses(_: nn.Module, step: int) -> Iterator[Tensor]:
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randint(7, (4,), generator=generator)
            y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
            output = called(x, aside=step > 2 and rank == 1)
            yield (output - y).square().sum(1).mean() / 2
        if step == 1 and rank == 1:  # after the last backward pass
            model.head.bias.grad[0] = float("nan")

    found = []
    for step in range(5):
        found.append(kit.train(model, losses, [step], own, optimizer))
        assert (model.never.weight.grad is None) or not model.never.weight.grad.any()
    assert own.counters["skipped_updates"] == 1
    return found


def in_every_mode(
    rank: int, ranks: int, names: list[str], options: dict[str, Any]
) -> dict[str, dict[str, list[Tensor]]]:
    return {
        name: {mode: path_of(rank, STRATEGIES[name], mode, options) for mode in MODES}
        for name in names
    }


@pytest.mark.parametrize(
    ("ranks", "names", "options"),
    [
        pytest.param(3, ["comm", "hybrid", "sharded"], {}, marks=pytest.mark.slow),
        pytest.param(3, ["mem"], {}, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param(
            3, list(STRATEGIES), {"kl_clip": None}, marks=[pytest.mark.slow, pytest.mark.thorough]
        ),
        pytest.param(2, ["mem"], {"solver": "inverse"}, marks=pytest.mark.slow),
        pytest.param(
            2, ["sharded"], {"solver": "inverse"}, marks=[pytest.mark.slow, pytest.mark.thorough]
        ),
        pytest.param(4, ["mem", "sharded"], {}, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_every_step_is_that_of_averaged_gradients(ranks, names, options):
    results = run_ranks(in_every_mode, ranks, names, options, timeout=120)
    for rank, own in enumerate(results):
        for name, modes in own.items():
            for mode in MODES[1:]:
                for step, weights in enumerate(modes[mode]):
                    what = f"{name}, {mode}, rank {rank}, after step {step}"
                    compare(weights, modes["ddp"][step], what, rtol=1e-10)
                    assert torch.equal(weights, results[0][name][mode][step]), what
            assert not torch.equal(modes["ddp"][0], modes["ddp"][4])


def test_gradients_travel_to_their_worker_alone():
    """Once the blocks are solved, what is added up and what is sent are each one gradient large."""
    model = nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise([4, 8, 8, 8, 2])])
    numel = sum(p.numel() for p in model.parameters())
    backend = Recording(rank=1, world_size=4)
    own = Preconditioner(
        model,
        strategy="mem-opt",
        kl_clip=None,
        distribution=soframe.Distribution(backend=backend, gradients="local"),
    )
    for step in range(2):
        model.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        before = own.traffic()
        own.step()
        after = own.traffic()
        for phase in ("gradients", "exchange"):
            grown = after[phase]["bytes"] - before.get(phase, {"bytes": 0})["bytes"]
            assert grown == 4 * numel, (step, phase)
    sums = [e for e in backend.events if e.operation == "reduce"]
    workers = {place.gradient_workers[0] for place in own.placement.blocks}
    assert {event.source for event in sums} == workers
    # In the first step no block is solved yet, and all ranks keep the averages.
    assert len(sums) == len(workers)


def test_what_does_not_go_together_is_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="gradients must be one of 'averaged', 'local', not 'x'"):
        Preconditioner(model, kl_clip=None, distribution=soframe.Distribution(gradients="x"))
    with pytest.raises(ValueError, match="does not go with a GradScaler"):
        Preconditioner(
            model,
            kl_clip=None,
            distribution=soframe.Distribution(gradients="local"),
            grad_scaler=torch.amp.GradScaler("cpu"),
        )
    with pytest.raises(ValueError, match="TrustRegion needs gradients='averaged'"):
        TrustRegion(model, "mse", distribution=soframe.Distribution(gradients="local"))
    mixed = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    own = Preconditioner(mixed, kl_clip=None, distribution=soframe.Distribution(gradients="local"))
    mixed(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="needs dense gradients"):
        own.step()


def test_uncovered_gradients_are_averaged_once():
    """Over two ranks by hand; the mean that the base optimizer sees."""
    results = run_ranks(uncovered, 2)
    expected = sum(raw for raw, _ in results) / 2
    for _, averaged in results:
        assert torch.equal(averaged, expected)


def uncovered(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)).double()
    own = Preconditioner(model, kl_clip=None, distribution=soframe.Distribution(gradients="local"))
    x = torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1)
    model(x).square().mean().backward()
    raw = model[0].bias.grad.clone()
    own.step()
    return raw, model[0].bias.grad
