"""Whatever else a training loop does with a model, in whichever order, leaves no trace in a step.

Loops are drawn: micro-batches with passes of all kinds before and after each, and batches that are
given up before a step. A loop with the micro-batches alone must end with the same weights.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.testing import compare
from tests.examples import examples

METHODS = ("kfac", "eva", "tnt", "shampoo", "soap", "own kfac", "own soap-muon")


def batch(seed: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.softplus(model(x)).sum(1).mean()


class Loop:
    """A model in training, by a preconditioner before SGD or by an optimizer of soframe's."""

    def __init__(self, method: str, every: int) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
        self.model = nn.Sequential(*layers).double()
        self.kept: list[Tensor] = []
        intervals = {"statistics_every": every, "solve_every": every}
        self.optimizer: torch.optim.Optimizer
        if method.startswith("own "):
            own = soframe.Optimizer(self.model, method.removeprefix("own "), lr=0.02, **intervals)
            self.optimizer, self.preconditioner, self.saved = own, own.preconditioner, own
            return
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.preconditioner = self.saved = soframe.Preconditioner(
            self.model, method=method, optimizer=self.optimizer, **intervals
        )

    def step(self) -> None:
        if self.saved is self.preconditioner:
            self.preconditioner.step()
        self.optimizer.step()

    def zero(self, how: int) -> None:
        if how < 2:
            self.model.zero_grad(set_to_none=how == 1)
        for parameter in self.model.parameters() if how == 2 else ():
            parameter.grad = None


def without_gradients(loop: Loop, x: Tensor) -> None:
    with torch.no_grad():
        loop.model(x)


def in_inference(loop: Loop, x: Tensor) -> None:
    with torch.inference_mode():
        loop.model(x)


def dropped(loop: Loop, x: Tensor) -> None:
    loss_of(loop.model, x)


def kept(loop: Loop, x: Tensor) -> None:
    loop.kept.append(loss_of(loop.model, x))


def of_inputs(loop: Loop, x: Tensor) -> None:
    torch.autograd.grad(loss_of(loop.model, x.requires_grad_()), x)


def of_parameters(loop: Loop, x: Tensor) -> None:
    torch.autograd.grad(loss_of(loop.model, x), list(loop.model.parameters()))


def twice(loop: Loop, x: Tensor) -> None:
    parameters = list(loop.model.parameters())
    gradients = torch.autograd.grad(loss_of(loop.model, x), parameters, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)


def of_a_copy(loop: Loop, x: Tensor) -> None:
    loss_of(copy.deepcopy(loop.model), x).backward()


def of_a_saved_copy(loop: Loop, x: Tensor) -> None:
    file = io.BytesIO()
    torch.save(loop.model, file)
    file.seek(0)
    loss_of(torch.load(file, weights_only=False), x).backward()


def loaded(loop: Loop, x: Tensor) -> None:
    del x
    loop.model.load_state_dict({n: p.clone() for n, p in loop.model.state_dict().items()})


def frozen_and_thawed(loop: Loop, x: Tensor) -> None:
    del x
    loop.model[0].weight.requires_grad_(False).requires_grad_(True)


def looked_at(loop: Loop, x: Tensor) -> None:
    del x
    loop.preconditioner.metrics()
    str(loop.preconditioner.report())
    loop.preconditioner.memory_usage()


OTHER: tuple[Callable[[Loop, Tensor], None], ...] = (
    *(without_gradients, in_inference, dropped, kept, of_inputs, of_parameters, twice),
    *(of_a_copy, of_a_saved_copy, loaded, frozen_and_thawed, looked_at),
)


def given_up(loop: Loop, x: Tensor, draws: random.Random) -> None:
    for _ in range(draws.choice([1, 2])):
        loss_of(loop.model, x).backward()
    loop.preconditioner.reset_batch()
    loop.zero(draws.randrange(3))


def resumed(loop: Loop, x: Tensor, draws: random.Random) -> None:
    del x, draws
    own: Any = loop.saved
    own.load_state_dict(copy.deepcopy(own.state_dict()))


BETWEEN = (given_up, resumed)


def train(method: str, every: int, draws: random.Random | None) -> Tensor:
    """Train for four steps; with draws, do other things as well.

    Returns:
        The weights.
    """
    loop = Loop(method, every)

    def others(most: int) -> None:
        for _ in range(draws.randrange(most) if draws else 0):
            assert draws is not None
            x = batch(draws.randrange(10**6), draws.choice([1, 4, 6]))
            draws.choice(OTHER)(loop, draws.choice([1.0, 10.0]) * x)

    for step in range(4):
        for _ in range(draws.randrange(3) if draws else 0):
            assert draws is not None
            draws.choice(BETWEEN)(loop, batch(draws.randrange(10**6)), draws)
        loop.zero(draws.randrange(3) if draws else 1)
        count = 1 + step % 3
        for part in range(count):
            others(3)
            (loss_of(loop.model, batch(10 * step + part)) / count).backward()
            others(2)
        loop.step()
    loop.preconditioner.close()
    return nn.utils.parameters_to_vector(loop.model.parameters()).detach()


@settings(max_examples=examples(12))
@given(st.sampled_from(METHODS), st.integers(1, 3), st.randoms(use_true_random=False))
def test_what_else_a_loop_does_leaves_no_trace(
    method: str, every: int, draws: random.Random
) -> None:
    compare(train(method, every, draws), train(method, every, None), "the weights")
