"""Parts that are frozen in turn at every step, under one K-FAC beside the dense reference."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soframe import Preconditioner
from soframe.testing import compare
from tests.capture.kit import Recorder, descend, precondition, softplus, vectors
from tests.distributed.harness import run_ranks

RESUMED = 6
STEPS = 10


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def take_turns(model: nn.Sequential, step: int) -> None:
    """Train the layers in turn, and all of them at the step before the resume."""
    for number in (0, 2, 4):
        model[number].requires_grad_(step == RESUMED - 1 or step % 3 == number // 2)


@dataclass
class Trained:
    """The gradients after each step."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)

    def end_step(self, model: nn.Module) -> None:
        named = model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        descend(model)


def dense() -> Trained:
    model, trained = build(), Trained()
    recorder = Recorder(model)
    for step in range(STEPS):
        model.zero_grad()
        take_turns(model, step)
        batch = vectors(step)
        softplus(model(batch)).backward()
        recorder.step(len(batch))
        trained.end_step(model)
    return trained


State = dict[str, Any]


def train(
    rank: int, ranks: int, options: dict[str, Any], steps: range, state: State | None = None
) -> tuple[list[dict[str, Tensor]], State]:
    """Train on a part of each batch, in two micro-batches, perhaps on from a state."""
    model, trained = build(), Trained()
    if state is not None:
        model.load_state_dict(state["model"])
    own = wrapped(model, ranks, options)
    if state is not None:
        own[1].load_state_dict(state["preconditioner"])
    for step in steps:
        model.zero_grad()
        take_turns(model, step)
        parts = vectors(step).chunk(ranks)[rank].chunk(2)
        for batch in parts:
            (softplus(own[0](batch)) / len(parts)).backward()
        own[1].step()
        trained.end_step(model)
    state = {"model": model.state_dict(), "preconditioner": own[1].state_dict()}
    own[1].close()
    return trained.gradients, copy.deepcopy(state)


def train_twice(rank: int, ranks: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Train, and go on from the state."""
    first, state = train(rank, ranks, options, range(RESUMED))
    return first + train(rank, ranks, options, range(RESUMED, STEPS), state)[0]


def wrapped(
    model: nn.Module, ranks: int, options: dict[str, Any]
) -> tuple[nn.Module, Preconditioner]:
    """Return what is called, and its preconditioner."""
    called = model
    if ranks > 1:
        called = DistributedDataParallel(model, find_unused_parameters=True)
    return called, precondition(called, **options)


STRATEGIES = ["comm-opt", "mem-opt", "sharded"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_statistics_of_parts_that_are_frozen_in_turn_stay(ranks: int, strategy: str) -> None:
    options = {"strategy": strategy}
    results = [train_twice(0, 1, options)]
    if ranks > 1:
        results = run_ranks(train_twice, ranks, options)
    for gradients in results:
        check(gradients, dense().gradients)


def check(gradients: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for step, (got, want) in enumerate(zip(gradients, expected, strict=True)):
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            compare(got[name], gradient, f"step {step}: {name}")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "after", "strategy"),
    [(1, 2, "mem-opt"), (4, 2, "sharded"), (4, 2, "mem-opt"), (2, 1, "sharded")],
)
def test_parts_that_are_frozen_in_turn_go_on_on_other_ranks(
    before: int, after: int, strategy: str
) -> None:
    options, expected = {"strategy": strategy}, dense().gradients
    halfway = run_ranks(train, before, options, range(RESUMED))
    for gradients, _ in halfway:
        check(gradients, expected[:RESUMED])
    state = halfway[0][1]
    for gradients, _ in run_ranks(train, after, options, range(RESUMED, STEPS), state):
        check(gradients, expected[RESUMED:])


def test_a_frozen_part_is_solved_with_its_last_statistics_alone() -> None:
    """At its turn, even where it is frozen at all of them; and not again until it is trained."""
    model = build()
    own = precondition(model, solve_every=2)
    solved_at = []
    for step in range(10):
        model.zero_grad()
        model[0].requires_grad_(step % 2 == 1 and step < 6)  # frozen where solves are due
        softplus(model(vectors(step))).backward()
        own.step()
        solved_at.append(own.blocks[0].record.solved_at.get("A"))
    own.close()
    assert solved_at == [None, 1, 1, 1, 4, 4, 6, 6, 6, 6]
