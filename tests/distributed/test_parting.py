"""Ranks that do different things, or less: errors on every rank, or the same as zero gradients."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from soframe.blocks.home import PlainGrad
from soframe.capture.loss_scale import LossScale
from soframe.comm import TorchDistributed, board
from soframe.methods import KFAC
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over

pytestmark = pytest.mark.distributed

WHAT = {
    "state_dict": "Preconditioner.state_dict()",
    "load": "loading the state of a preconditioner",
}


def part_ways(rank: int, ranks: int, what: str, odd: int) -> str:
    """One rank saves or loads, the others take a step."""
    board.LOOK = 0.3
    strategy = "mem-opt" if what == "state_dict" else "comm-opt"
    run = Run(Case({"strategy": strategy}), rank, ranks, None, mean_over())
    run.step(0)
    state = run.preconditioner.state_dict()
    try:
        if rank != odd:
            # Not by way of the run, whose own average of gradients would be in the way.
            run.preconditioner.step()
        elif what == "state_dict":
            run.preconditioner.state_dict()
        else:
            run.preconditioner.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", list(WHAT))
def test_a_rank_that_does_something_else_is_named_on_every_rank(what, odd):
    found = run_ranks(part_ways, 3, what, odd)
    assert f"{WHAT[what]} must be called by every rank" in found.pop(odd)
    for error in found:
        assert f"rank {odd}: {WHAT[what]}" in error, error


class Unreadable(PlainGrad):
    """Raises instead of reading, once it is broken."""

    broken = False

    def has(self, parameter):
        if self.broken:
            raise OSError("no gradient today")
        return super().has(parameter)

    def of(self, parameters):
        if self.broken:
            raise OSError("no gradient today")
        return super().of(parameters)


class Undirected(KFAC):
    """Raises instead of making a direction, once it is broken."""

    broken = False

    def direct(self, given):
        if self.broken:
            raise ArithmeticError("no direction today")
        return super().direct(given)


def raise_in_a_step(rank: int, ranks: int, breaks: str, options: dict[str, Any]) -> str:
    """Rank 1 raises in the second step; nobody but soframe waits for anybody."""
    board.LOOK = 0.2
    broken = {"home": Unreadable(), "method": Undirected()}
    run = Run(Case({**broken, **options}), rank, ranks)
    run.step(0)
    broken[breaks].broken = rank == 1
    for step in (1, 2):
        try:
            run.step(step)
        except Exception as error:
            return f"step {step}, {type(error).__name__}: {error}"
    return "no error"


RAISING = {
    "a home, before anything travels": ("home", {"gradients": "local"}),
    "a method whose directions travel": ("method", {"strategy": "mem-opt"}),
    "a method whose directions stay": ("method", {}),
}


@pytest.mark.parametrize("case", list(RAISING))
def test_what_one_rank_raises_in_a_step_is_an_error_on_all(case):
    breaks, options = RAISING[case]
    own = {"home": "OSError: no gradient today", "method": "ArithmeticError: no direction today"}
    errors = run_ranks(raise_in_a_step, 2, breaks, options, timeout=30)
    assert errors.pop(1) == f"step 1, {own[breaks]}"
    last = 2 if case.endswith("stay") else 1  # the others only learn of it when they wait
    for error in errors:
        assert error.startswith(f"step {last}, RuntimeError: another rank"), error
        assert f"rank 1: {own[breaks]}" in error


def wait_rightly(rank: int, ranks: int) -> float:
    """Rank 0 has nothing to do with what the others wait for, and goes on."""
    board.LOOK = 0.1
    backend, tensor = TorchDistributed(), torch.tensor([float(rank)])
    backend.prepare([(1, 2)])
    if rank == 2:
        time.sleep(1)
    if rank > 0:
        backend.broadcast(tensor, 2, (1, 2), "share").wait()
    backend.meet("saving")
    return tensor.item()


def test_a_rank_that_has_rightly_gone_on_ends_nobodys_wait():
    assert run_ranks(wait_rightly, 3) == [0.0, 2.0, 2.0]


def come_late(rank: int, ranks: int) -> str:
    """A step on a rank that is late is no reason to give up, nor is a state."""
    board.LOOK = 0.1
    run = Run(Case({"strategy": "mem-opt"}), rank, ranks, None, mean_over())
    run.step(0)
    if rank == 1:
        time.sleep(1)
    run.model.zero_grad()  # else it would be a second step on one gradient
    run.preconditioner.step()
    if rank == 0:
        time.sleep(1)
    run.preconditioner.state_dict()
    return "no error"


def test_a_rank_that_is_late_is_waited_for():
    assert run_ranks(come_late, 2) == ["no error"] * 2


def come_too_late(rank: int, ranks: int) -> str:
    board.LOOK = 0.1
    backend = TorchDistributed(meet_timeout=0.5)
    run = Run(Case({"strategy": "mem-opt"}), rank, ranks, backend, mean_over())
    run.step(0)
    if rank == 1:
        time.sleep(2)
    try:
        run.preconditioner.state_dict()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_comes_once_the_others_have_gone_is_told_so():
    first, late = run_ranks(come_too_late, 2)
    assert "must be called by every rank: rank(s) [1] did not come within 0.5 s" in first
    assert "rank 0: gave up waiting for the others" in late


def differ(run: Run, what: str) -> None:
    conv = run.model.conv
    if what == "frozen":
        conv.requires_grad_(False)
    elif what == "replaced":
        conv.weight = torch.nn.Parameter(conv.weight.detach().clone())
    elif what == "a module more":
        run.model.more = torch.nn.Linear(2, 2)
    elif what == "sparse":
        run.model.unused.weight.grad = torch.zeros(3, 3).double().to_sparse()
    else:
        scaler = torch.amp.GradScaler("cpu")  # which has not unscaled anything
        run.preconditioner._loss_scale = LossScale(scaler)


CHANGES = {
    "frozen": "frozen, thawed or replaced on 1 of 3 ranks",
    "replaced": "frozen, thawed or replaced on 1 of 3 ranks",
    "a module more": "frozen, thawed or replaced on 1 of 3 ranks",
    "sparse": "needs dense gradients",
    "scaled": "the gradients are still scaled",
}


def differ_in_a_step(rank: int, ranks: int, what: str, gradients: str) -> list[str]:
    """The ranks reach soframe first: nobody else averages gradients."""
    options = {"gradients": gradients, "statistics_every": 2}
    run = Run(Case(options), rank, ranks)
    run.step(0)
    try:
        run.step(1, lambda run: differ(run, what) if rank == 1 else None)
    except (RuntimeError, TypeError) as error:
        return [str(error)]
    return ["no error"]


@pytest.mark.parametrize("what", list(CHANGES))
def test_what_one_rank_alone_does_to_its_model_is_an_error_on_all(what):
    for kind in ("local",) if what == "sparse" else ("local", "averaged"):
        for (error,) in run_ranks(differ_in_a_step, 3, what, kind):
            assert CHANGES[what] in error, (kind, error)
