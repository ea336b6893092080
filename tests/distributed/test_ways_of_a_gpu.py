"""What is chosen on a GPU, on ranks, with micro-batches and a resume: to what a processor comes to.

The ways are taken on a processor here; `tests/gpu` takes them where they belong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.kernels import devices, halves
from soframe.step import verdict
from soframe.testing import compare
from tests import kit
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
SAMPLES, STEPS, MIDDLE = 16, 6, 3
"""Powers of two: a mean over any share of the batch rounds as the mean over all of it does."""
LR = 1e-3
"""Small: weights that differ by a rounding would make other numbers of bfloat16 in later steps."""


class Net(nn.Module):
    """Convolutions of each way, a grouped one, and linear layers that share an input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(2, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.point = nn.Conv2d(4, 3, 1, bias=False)
        self.left, self.right = nn.Linear(12, 4), nn.Linear(12, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, 4]`` of ``[N, 2, 4, 4]``."""
        x = self.point(self.grouped(self.wide(x).tanh()).tanh()).tanh().flatten(1)
        return self.frozen((self.left(x) + self.right(x)).tanh())


def results(
    rank: int, ranks: int, gpu: bool, strategy: str, steps: range, state: Any
) -> tuple[dict[str, Tensor], Any, int]:
    """Return how weights have moved, and factors; the state; the number of products of halves."""
    for module in (devices, verdict):
        module.on_gpu = lambda _: gpu  # type: ignore[attr-defined]
    multiplied, add_inner = [], halves.add_inner
    halves.add_inner = lambda *own: multiplied.append(own[1].dtype) or add_inner(*own)  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    model = Net()
    optimizer = soframe.Optimizer(
        model,
        "kfac",
        solver="inverse",
        lr=LR,
        damping=0.1,
        strategy=strategy,
        statistics_every=1,
        solve_every=2,
    )
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def losses(model: nn.Module, step: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(SAMPLES, 2, 4, 4, generator=generator)
        share = SAMPLES // ranks
        for part in whole[rank * share : (rank + 1) * share].split(share // 2):
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(part)
            yield outputs.float().square().sum(1).mean() / 2

    kit.train(model, losses, steps, kit.Averaging(model), optimizer)
    torch.manual_seed(0)
    begun = dict(Net().named_parameters())
    found = {name: p.detach() - begun[name].detach() for name, p in model.named_parameters()}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found |= {
        f"{b.name}.{k}": v.tril()
        for b in optimizer.preconditioner.blocks
        for k, v in b.running.items()
    }
    optimizer.close()
    return found, copy.deepcopy(state), len(multiplied)


def resumed(gpu: bool, strategy: str) -> tuple[list[Any], list[Any]]:
    """A run on four ranks, and how it went on as two."""
    every = range(STEPS)
    first = run_ranks(results, 4, gpu, strategy, every[:MIDDLE], None)
    return first, run_ranks(results, 2, gpu, strategy, every[MIDDLE:], first[0][1])


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """What a processor's ways come to; gradients of weights are rounded on each rank, too."""
    first, second = resumed(False, "comm-opt")
    assert {one[2] for one in (*first, *second)} == {0}
    return second[0][0]


@pytest.mark.parametrize(
    "strategy",
    [
        "sharded",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("comm-opt", "mem-opt", "hybrid-opt")
        ),
    ],
)
def test_four_ranks_that_go_on_as_two(strategy: str, plain: dict[str, Tensor]) -> None:
    first, second = resumed(True, strategy)
    # In each pass the outputs' of five layers and the inputs' of three; two share theirs in one.
    assert {one[2] for one in first} == {MIDDLE * (2 * (5 + 3) - 1)}
    for found, _, _ in second:
        for name, one in found.items():
            if plain[name].any():  # the frozen one stays
                compare(one, plain[name], name, rtol=2e-4)
