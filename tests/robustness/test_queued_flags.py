"""On a GPU the flags of a plain step's gradients are read behind its work: as if read at first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.step import engine, magnitude
from tests import kit
from tests.curvature import randn
from tests.distributed.harness import run_ranks

# What appears in a gradient, by step: 1 and 4 are plain, 3 takes statistics and solves.
BAD = {1: math.nan, 3: math.inf, 4: 1e200, 5: -math.inf}
METHODS = ("adamw", "muon", "soap-muon", "shampoo", "kfac", "ekfac", "diagonal")


def outcome(
    rank: int, ranks: int, queued: bool, method: str, settings: dict[str, Any]
) -> tuple[list[Tensor], dict[str, int], int]:
    """Return the weights, the counters, and how many steps have read their flags behind the work.

    On several ranks the last one alone has the bad gradient.
    """
    calls = []

    class Counted(magnitude.Magnitude):
        def __init__(self, *own: Any) -> None:
            super().__init__(*own)
            self.queues = queued

        def read_queued(self) -> tuple[float, bool]:
            calls.append(self)
            return super().read_queued()

    engine.Magnitude = Counted  # type: ignore[misc]
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 3)).double()
        every = {"statistics_every": 3, "solve_every": 3, **settings}
        own = soframe.Optimizer(model, method, lr=0.01, auxiliary_lr=0.01, **every)

        class Spoil:
            step_now = 0

            def step(self) -> None:
                if self.step_now in BAD and rank == ranks - 1:
                    gradient = model[0].weight.grad
                    assert gradient is not None
                    gradient[0, 0] = BAD[self.step_now]
                self.step_now += 1

        def loss(model: nn.Module, step: int) -> Tensor:
            return model(randn(12, 4, seed=step)[rank::ranks]).square().mean()

        averaging = () if "distribution" in settings else (kit.Averaging(model),)
        kit.train(model, loss, range(8), Spoil(), *averaging, own)
        counters = dict(own.preconditioner.counters)
        own.close()
    finally:
        engine.Magnitude = Counted.__mro__[1]  # type: ignore[misc]
    return [p.detach() for p in model.parameters()], counters, len(calls)


def same(one: Any, plain: Any) -> None:
    for p, q in zip(one[0], plain[0], strict=True):
        assert torch.equal(p, q)
        assert bool(p.isfinite().all())
    assert one[1] == plain[1]
    assert (one[1]["skipped_updates"], plain[2]) == (3, 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_late_flag_skips_what_an_early_one_does(method: str) -> None:
    late = outcome(0, 1, True, method, {})
    # EKFAC takes statistics until it has those that need a solve.
    assert late[2] >= (1 if method == "ekfac" else 5), "plain steps read it late"
    same(late, outcome(0, 1, False, method, {}))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["averaged", "local"])
@pytest.mark.parametrize("method", ["muon", "kfac"])
def test_one_rank_has_the_bad_gradient(method: str, gradients: str) -> None:
    settings: dict[str, Any] = {"strategy": "mem-opt"}
    if gradients == "local":
        settings["distribution"] = soframe.Distribution(gradients="local")
    late = run_ranks(outcome, 3, True, method, settings)
    plain = run_ranks(outcome, 3, False, method, settings)
    for one, other in zip(late, plain, strict=True):
        assert one[2] >= 5
        same(one, other)
        same((*late[0][:2], 0), (*one[:2], 0))
