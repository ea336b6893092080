"""Passes without samples: they divide the loss, and averages are over samples that exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from soframe.blocks.block import unpack
from soframe.testing import compare
from tests.curvature import blocks, closing, factors, fill, half_square, preconditioner, randn
from tests.distributed.harness import run_ranks

AVERAGES = ["local", "global", "sum"]


def network() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [(randn(n, 3, seed=i), randn(n, 2, seed=50 + i)) for i, n in enumerate(sizes)]


def step(rank: int, ranks: int, sizes: Sequence[int], average: str) -> list[Tensor]:
    """Factors of a step in micro-batches of these sizes, dealt to ranks in order."""
    model, parts = network(), batches(sizes)
    total = sum(sizes)
    mine = parts[rank * len(parts) // ranks : (rank + 1) * len(parts) // ranks]
    with closing(preconditioner(model, loss_average=average)) as own:
        for x, y in mine:
            loss = half_square(model(x), y) if len(x) else model(x).sum() * 0.0
            share = {"local": 1 / len(mine), "global": len(x) * ranks / total, "sum": len(x)}
            (loss * share[average]).backward()
        for parameter in model.parameters():  # as if averaged: factors do not depend on it
            parameter.grad = torch.ones_like(parameter)
        own.step()
        return [
            unpack(stored, factor)
            for block in own.blocks
            for factor, stored in zip(block.factors, block.running.values(), strict=True)
        ]


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("sizes", [(8, 0), (0, 8), (0, 5, 0)], ids=str)
def test_factors_are_those_of_the_samples(sizes: Sequence[int], average: str) -> None:
    """A and G by hand."""
    model = network()
    ((x, y),) = [part for part in batches(sizes) if len(part[0])]
    a, g = step(0, 1, sizes, average)[2:]
    rows = torch.cat([model[:2](x), torch.ones(len(x), 1).double()], 1).detach()
    compare(a[0], rows.T @ rows / len(x), "A")
    gradients = (model(x) - y).detach()
    compare(g[0], gradients.T @ gradients / len(x), "G")


@pytest.mark.parametrize("average", AVERAGES)
def test_a_loss_without_terms_is_an_empty_pass(average: str) -> None:
    """All labels ignored, `count(0)`: the rows of that pass are in no average."""
    model, (x, y) = network(), batches([6])[0]
    with closing(preconditioner(model, loss_average=average)) as own:
        own.count(6)
        scale = {"local": 1 / 2, "global": 1.0, "sum": 6.0}[average]
        (half_square(model(x), y) * scale).backward()
        own.count(0)
        (model(randn(4, 3, seed=9)).sum() * 0.0).backward()
        own.step()
        rows = torch.cat([x, torch.ones(6, 1).double()], 1)
        compare(factors(own, "0")[0][0], rows.T @ rows / 6, "A")


def test_a_window_of_empty_passes_leaves_the_averages() -> None:
    model, (x, y) = network(), batches([6])[0]
    with closing(preconditioner(model)) as own:
        half_square(model(x), y).backward()
        own.step()
        before = blocks(own)["0"].running["A"].clone()
        model.zero_grad()
        (model(x[:0]).sum() * 0.0).backward()
        own.step()
        assert torch.equal(blocks(own)["0"].running["A"], before)


@pytest.mark.distributed
@pytest.mark.parametrize("average", ["local", "global"])
@pytest.mark.parametrize("sizes", [(8, 0), (4, 0, 3, 5), (0, 0, 3, 5)], ids=str)
def test_two_ranks_are_one_process(sizes: Sequence[int], average: str) -> None:
    alone = step(0, 1, sizes, average)
    for found in run_ranks(step, 2, sizes, average):
        for one, other in zip(found, alone, strict=True):
            compare(one, other, "factor")


def test_an_empty_pass_in_parts_is_one_pass() -> None:
    found = []
    for parts in (1, 2):
        model, (x, y) = network(), batches([4])[0]
        with closing(preconditioner(model, loss_average="local")) as own:
            half_square(model(x), y).backward()
            empty = model(x[:0]).sum()
            named = list(model.parameters())
            for part in range(parts):
                empty.backward(inputs=named[part::parts], retain_graph=True)
            own.step()
            found.append([*factors(own, "0"), *factors(own, "2")])
    for whole, in_parts in zip(*found, strict=True):
        compare(in_parts, whole, "factor")


class Idle(nn.Module):
    """The layer that a backward pass reaches first has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return torch.cat([y, self.idle(y[:0])])


def test_a_layer_without_rows_says_nothing_of_a_declared_pass() -> None:
    """Nor of the model, which is called by its parts and shows no batch."""
    found = []
    for idle in (True, False):
        model = fill(Idle())
        called = model.forward if idle else model.first
        with closing(preconditioner(model)) as own:
            own.count(4)
            called(randn(4, 3)).square().sum().div(8).backward()
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            own.step()
            found.append(factors(own, "first"))
    for beside, alone in zip(*found, strict=True):
        compare(beside, alone, "factor")


def test_forward_passes_that_are_given_up_wait_no_longer() -> None:
    model, (x, y) = network(), batches([4])[0]
    with closing(preconditioner(model)) as own:
        for _ in range(3):
            model(x)
        half_square(model(x), y).backward()
        assert not own.curvature.capture.calls.waiting


def backward_together(losses: Sequence[Tensor]) -> None:
    torch.stack([*losses]).sum().backward()


def backward_in_turn(losses: Sequence[Tensor]) -> None:
    for loss in losses:
        (loss / len(losses)).backward()


def backward_in_reverse(losses: Sequence[Tensor]) -> None:
    backward_in_turn(losses[::-1])


@pytest.mark.parametrize("sizes", [(4, 0), (0, 4)], ids=str)
@pytest.mark.parametrize(
    "backward", [backward_together, backward_in_turn, backward_in_reverse], ids=lambda f: f.__name__
)
def test_an_empty_forward_pass_before_the_other_was_reached(
    sizes: Sequence[int], backward: Callable[[Sequence[Tensor]], None]
) -> None:
    model, losses = network(), []
    with closing(preconditioner(model, loss_average="local")) as own:
        for x, y in batches(sizes):
            losses.append(half_square(model(x), y) if len(x) else model(x).sum() * 0.0)
        backward(losses)
        own.step()
        found = [*factors(own, "0"), *factors(own, "2")]
    alone = network()
    with closing(preconditioner(alone)) as own:
        ((x, y),) = [part for part in batches(sizes) if len(part[0])]
        half_square(alone(x), y).backward()
        own.step()
        expected = [*factors(own, "0"), *factors(own, "2")]
    for beside, by_itself in zip(found, expected, strict=True):
        compare(beside, by_itself, "factor")
