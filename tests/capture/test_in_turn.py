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


def train(rank: int, ranks: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Train on a part of each batch, in two micro-batches, and go on from a state."""
    model, trained = build(), Trained()
    own = wrapped(model, ranks, options)
    for step in range(STEPS):
        if step == RESUMED:
            state = own[1].state_dict()
            again = build()
            again.load_state_dict(copy.deepcopy(model.state_dict()))
            own[1].close()
            model, own = again, wrapped(again, ranks, options)
            own[1].load_state_dict(state)
        model.zero_grad()
        take_turns(model, step)
        for batch in vectors(step).chunk(ranks)[rank].chunk(2):
            (softplus(own[0](batch)) / 2).backward()
        own[1].step()
        trained.end_step(model)
    own[1].close()
    return trained.gradients


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
    results = [train(0, 1, options)] if ranks == 1 else run_ranks(train, ranks, options)
    expected = dense().gradients
    for gradients in results:
        for step, (got, want) in enumerate(zip(gradients, expected, strict=True)):
            assert got.keys() == want.keys()
            for name, gradient in want.items():
                compare(got[name], gradient, f"step {step}: {name}")


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
