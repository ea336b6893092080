"""ZeroRedundancyOptimizer spreads the optimizer's state, and leaves gradients where they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import soframe
from tests import kit
from tests.compatibility.fully_sharded import SAMPLES, batch, make_net, weights
from tests.compatibility.kit import assert_rounded
from tests.distributed.harness import RankFailure, run_ranks

SETTINGS = {"strategy": "mem-opt", "layers": "all"}
LENGTH = {"kfac": {"damping": 0.1, "kl_clip": 1e-3}, "shampoo": {"kl_clip": None}}
"""What each method says of the length of its directions."""


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        method: The method.
        passes: Micro-batches in each step; with several, one of the fourth is spoilt on a rank.
        checkpoints: Whether activations are computed anew.
        bf16: Whether the model runs under autocast to bfloat16.
        begin: The first step.
        end: The one after the last.
        state: What the run goes on from.
    """

    method: str = "kfac"
    passes: int = 1
    checkpoints: bool = False
    bf16: bool = False
    begin: int = 0
    end: int = 5
    state: Any = None


CASES: dict[str, Case] = {
    "kfac": Case(),
    "shampoo": Case(method="shampoo", passes=2, checkpoints=True),
    "bf16": Case(bf16=True),
}


def train(rank: int, ranks: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train, and return the weights and the state, which rank 0 has of the base optimizer."""
    model = make_net(checkpoints=case.checkpoints).to(torch.float32 if case.bf16 else torch.float64)
    called, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ranks > 1:
        called = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = ZeroRedundancyOptimizer(
            called.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
        )
    own = soframe.Preconditioner(
        called,
        case.method,
        optimizer=optimizer,
        statistics_every=1,
        solve_every=2,
        **SETTINGS,
        **LENGTH[case.method],
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "own": own,
    }
    for name in () if case.state is None else parts:
        # It empties what it is given of what other ranks have.
        parts[name].load_state_dict(copy.deepcopy(case.state[name]))
    mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)

    def losses(_: nn.Module, step: int) -> Iterator[Tensor]:
        tokens, targets = batch(step)
        every = zip(tokens[mine].chunk(case.passes), targets[mine].chunk(case.passes), strict=True)
        for number, (x, y) in enumerate(every):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                outputs = called(x)
            loss = 0.5 * (outputs - y).square().sum(1).mean() / case.passes
            alone = ranks == 1 or number == case.passes - 1
            with nullcontext() if alone else called.no_sync():
                spoilt = case.passes > 1 and step == 3 and rank == 0
                yield loss * float("nan") if spoilt else loss

    kit.train(model, losses, range(case.begin, case.end), own, optimizer, schedule)
    assert own.counters["skipped_updates"] == (case.passes > 1 and case.end > 3)
    if ranks > 1:
        optimizer.consolidate_state_dict(to=0)
        if rank > 0:
            parts.pop("optimizer")
    state = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    own.close()
    return weights(model), state


def train_all(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    return [train(rank, ranks, case)[0] for case in CASES.values()]


@pytest.mark.distributed
def test_it_is_one_process() -> None:
    """In bfloat16 within 5 % of the way that weights go in float64."""
    start = weights(make_net())
    results = run_ranks(train_all, 2)
    for index, (what, case) in enumerate(CASES.items()):
        expected, _ = train(0, 1, replace(case, bf16=False, checkpoints=False))
        for own in results:
            for name, weight in own[index].items():
                where, stands = f"{what}, {name}", name.startswith("unused")
                assert torch.equal(weight, start[name].to(weight.dtype)) == stands, where
                if not case.bf16:
                    torch.testing.assert_close(
                        weight, expected[name], rtol=1e-9, atol=1e-9, msg=where
                    )
            if case.bf16:
                assert_rounded(own[index], expected, start, what)


def halfway(rank: int, ranks: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Save in the middle, let all ranks have what the first one has, and go on anew."""
    _, state = train(rank, ranks, replace(case, end=3))
    shared = [state]
    dist.broadcast_object_list(shared, 0)
    found, _ = train(rank, ranks, replace(case, begin=3, state=shared[0]))
    return found, shared[0]


@pytest.mark.distributed
def test_a_run_goes_on() -> None:
    """In the middle of an interval, with as many ranks, and on one process."""
    case = CASES["kfac"]
    expected, _ = train(0, 1, case)
    results = run_ranks(halfway, 2, case)
    alone, _ = train(0, 1, replace(case, begin=3, state=results[0][1]))
    for found in [*(found for found, _ in results), alone]:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def inside(rank: int, ranks: int) -> None:
    model = make_net()
    ZeroRedundancyOptimizer(model.parameters(), optimizer_class=soframe.Optimizer, lr=0.1)


@pytest.mark.distributed
def test_it_does_not_take_an_optimizer_of_a_whole_model() -> None:
    """Whose state `strategy="sharded"` spreads over ranks, as the guide says."""
    for failure in run_ranks(inside, 2, check=False):
        assert isinstance(failure, RankFailure)
        assert isinstance(failure.exception, TypeError)
        assert "model must be" in str(failure.exception)
