"""Ranks of a trust region that disagree, or of which one raises: an error on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.testing import compare
from soframe.trust_region import LevenbergMarquardt
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import classes_of, deep, vector

pytestmark = pytest.mark.distributed

CONSTRUCTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "lr": ({"lr": 0.5}, "settings of rank(s) [1]", "settings of rank(s) [1]"),
    "wrong": ({"max_increase": 0.5}, "max_increase must be", "[1] could not start"),
}


def construct(rank: int, ranks: int) -> list[str]:
    said = []
    for settings, _, _ in CONSTRUCTED.values():
        try:
            soframe.TrustRegion(deep(), "cross-entropy", **(settings if rank == 1 else {}))
        except (TypeError, ValueError) as error:
            said.append(str(error))
        else:
            said.append("no error")
    dist.barrier()
    return said


def test_settings_of_one_rank() -> None:
    others, own = run_ranks(construct, 2)
    for number, (name, (_, mine, theirs)) in enumerate(CONSTRUCTED.items()):
        assert mine in own[number], (name, own[number])
        assert theirs in others[number], (name, others[number])


def differ(rank: int, ranks: int, whats: list[str]) -> list[str]:
    """Rank 1 has another setting, or at the second step another closure, which may raise."""
    said = []
    for what in whats:
        net = deep()
        wrapped = DistributedDataParallel(net)
        damping = LevenbergMarquardt(1.0, interval=1)
        settings = {"momentum": False} if rank == 1 and what == "momentum" else {}
        own = soframe.TrustRegion(wrapped, "cross-entropy", damping=damping, **settings)
        x, y = classes_of(rank)

        def write(_: object) -> None:
            if step == 1 and rank == 1 and what == "derivative":  # noqa: B023
                x.add_(0)  # noqa: B023

        net[0].weight.register_post_accumulate_grad_hook(write)
        runs = 0

        def closure() -> Any:
            nonlocal runs
            runs += 1
            if runs == 2 and step == 1 and rank == 1 and what == "verdict":  # noqa: B023
                raise ZeroDivisionError("no second run")
            return F.cross_entropy(wrapped(x), y)  # noqa: B023

        try:
            for step in range(3):
                runs = 0
                if step == 1 and rank == 1 and what == "lr":
                    own.param_groups[0]["lr"] = 0.5
                if step == 1 and rank == 1 and what == "policy":
                    own.damping._now = 7.0
                if step == 1 and rank == 1 and what == "broken":
                    own.param_groups[0]["lr"] = "x"
                own.step(closure)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            said.append(f"step {step}: {type(error).__name__}: {error}")
        else:
            said.append("no error")
        own.close()
    dist.barrier()
    return said


STEPS = {
    "momentum": ("ValueError: these must be", "ValueError: these must be"),
    "lr": ("ValueError: these must be", "ValueError: these must be"),
    "policy": ("ValueError: these must be", "ValueError: these must be"),
    "broken": ("ValueError: could not convert", "RuntimeError: another rank cannot"),
    "verdict": ("ZeroDivisionError: no second run", "RuntimeError: another rank cannot"),
    "derivative": (
        "RuntimeError: TrustRegion differentiates the forward pass twice",
        "RuntimeError: another rank cannot",
    ),
}


def test_what_differs_at_a_step_and_what_raises_on_one_rank() -> None:
    others, own = run_ranks(differ, 2, list(STEPS))
    for number, (what, (mine, theirs)) in enumerate(STEPS.items()):
        step = 0 if what == "momentum" else 1
        assert own[number].startswith(f"step {step}: {mine}"), (what, own[number])
        assert others[number].startswith(f"step {step}: {theirs}"), (what, others[number])
        if what == "lr":
            assert "lr and weight_decay of the param groups: rank(s) [1] have [(0.5," in own[number]


def sparse(rank: int, ranks: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 3)).double()
    wrapped: nn.Module = DistributedDataParallel(model) if ranks > 1 else model
    own = soframe.StochasticTrustRegion(wrapped)
    _, y = classes_of(0)
    indices, part = torch.arange(8), slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    for _ in range(3):
        own.step(lambda: F.cross_entropy(wrapped(indices[part]), y[part]))
    return vector(model)


def test_sparse_gradients_of_ranks_are_those_of_one_process() -> None:
    expected = sparse(0, 1)
    for weights in run_ranks(sparse, 2):
        compare(weights, expected, "weights")


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x - self.mean)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return output


def changes(rank: int, ranks: int) -> list[float]:
    """The changes of the loss that steps report, which hardly move the parameters."""
    wrapped = DistributedDataParallel(Centred().double())
    own = soframe.StochasticTrustRegion(
        wrapped, damping=LevenbergMarquardt(1.0), model_every=1, lr=1e-12
    )
    found = []
    for step in range(3):
        x, y = classes_of(step)
        own.step(lambda: F.cross_entropy(wrapped(x + rank), y))  # noqa: B023
        assert own.readout is not None
        assert own.readout.change is not None
        found.append(own.readout.change)
    return found


def test_a_loss_is_evaluated_again_with_the_buffers_that_were_broadcast() -> None:
    for found in run_ranks(changes, 2):
        assert max(map(abs, found)) < 1e-9


MICRO_BATCHES = ((5, 2), (3,))
"""The samples of each micro-batch, by rank."""


def uneven(rank: int | None, ranks: int) -> Tensor:
    """Train with micro-batches of this rank, or of all; the closures turn gradients on."""
    model = deep()
    wrapped: Any = model if rank is None else DistributedDataParallel(model)
    own = soframe.StochasticTrustRegion(wrapped, damping=LevenbergMarquardt(1.0), model_every=1)
    for step in range(4):
        closures = []
        for of_rank, sizes in enumerate(MICRO_BATCHES):
            for index, size in enumerate(sizes):
                x, y = classes_of(100 * step + 10 * of_rank + index, size)
                weight = 1 / len(sizes) / (ranks if rank is None else 1)
                is_last = rank is None or index == len(sizes) - 1

                def closure(
                    x: Tensor = x, y: Tensor = y, weight: float = weight, is_last: bool = is_last
                ) -> Tensor:
                    with torch.enable_grad() if is_last else wrapped.no_sync():
                        return F.cross_entropy(wrapped(x), y) * weight

                if rank is None or rank == of_rank:
                    closures.append(closure)
        own.step(closures)
    return vector(model)


def test_an_evaluation_begins_no_reduction() -> None:
    """Else the next backward pass would, of which ranks have unequal numbers."""
    expected = uneven(None, 2)
    for weights in run_ranks(uneven, 2, timeout=60):
        compare(weights, expected, "weights")
