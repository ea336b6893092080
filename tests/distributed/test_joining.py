"""Uneven inputs: ranks that run out of data take part in the steps of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from soframe import Preconditioner
from soframe.comm import leave_gradients
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

BATCHES = (5, 2, 4)
OPTIONS: dict[str, Any] = {
    "damping": 0.02,
    "statistics_every": 1,
    "solve_every": 2,
    "kl_clip": 0.05,
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)]
    return nn.Sequential(*layers, nn.Linear(4, 2)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return (model(x) - x[:, :2].sin()).square().sum(1).mean()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_joined(rank: int, ranks: int, wrapped: bool, options: dict[str, Any]) -> Tensor:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = Preconditioner(model, optimizer=optimizer, **OPTIONS, **options)
    joinables: list[Any] = [preconditioner]
    called: nn.Module = model
    if wrapped:
        called = DistributedDataParallel(model)
        if options.get("gradients") == "local":
            called.register_comm_hook(None, leave_gradients)
        joinables = [called, preconditioner]
    with Join(joinables):
        for step in range(BATCHES[rank]):
            optimizer.zero_grad()
            loss_of(called, rank, step).backward()
            preconditioner.step()
            optimizer.step()
    return weights(model)


def train_without_data(rank: int, ranks: int, options: dict[str, Any]) -> Tensor:
    """The same steps, each on every rank; a rank without a batch has no backward pass."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = Preconditioner(model, optimizer=optimizer, **OPTIONS, **options)
    for step in range(max(BATCHES[:ranks])):
        optimizer.zero_grad()
        if step < BATCHES[rank]:
            loss_of(model, rank, step).backward()
        if options.get("gradients") != "local":
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        preconditioner.step()
        optimizer.step()
    return weights(model)


CASES = [
    (2, True, {}),
    (3, True, {"solver": "inverse"}),
    (2, False, {"strategy": "mem-opt", "gradients": "local"}),
    (3, True, {"strategy": "sharded", "gradients": "local"}),
    (3, False, {"strategy": "hybrid-opt", "gradients": "local", "background": 1}),
]


@pytest.mark.parametrize(("ranks", "wrapped", "options"), CASES)
def test_joined_ranks_change_nothing(ranks, wrapped, options):
    joined = run_ranks(train_joined, ranks, wrapped, options)
    expected = run_ranks(train_without_data, ranks, options)
    for own in joined:
        torch.testing.assert_close(own, expected[0], rtol=0, atol=1e-12)


def skip_a_backward_pass(rank: int, ranks: int, zeros: bool) -> Tensor:
    """At the third step, a rank without a backward pass, or one with gradients of zero."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**OPTIONS, "statistics_every": 2}
    preconditioner = Preconditioner(model, optimizer=optimizer, gradients="local", **options)
    for step in range(5):
        optimizer.zero_grad()
        if step != 3 or rank == 0:
            loss_of(model, rank, step).backward()
        elif zeros:
            (0 * loss_of(model, rank, step)).backward()
        preconditioner.step()
        optimizer.step()
    return weights(model)


def test_a_backward_pass_that_is_skipped_is_one_of_zeros():
    skipped = run_ranks(skip_a_backward_pass, 2, False)
    zeros = run_ranks(skip_a_backward_pass, 2, True)
    assert torch.equal(skipped[0], skipped[1])
    torch.testing.assert_close(skipped[0], zeros[0], rtol=0, atol=1e-14)


UNREAD: dict[str, Any] = {"damping": 1e-3}
"""The default, in place of what a method of gradients does not read."""

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"strategy": "mem-opt"}, {}, "strategy='comm-opt', or gradients='local'"),
    ({"strategy": "sharded"}, {}, "strategy='comm-opt', or gradients='local'"),
    ({"grad_scaler": lambda: 2.0}, {}, "does not go with grad_scaler="),
    (
        {"gradients": "local"},
        {"divide_by_initial_world_size": False},
        "gradients='local' divides by all ranks",
    ),
    (
        {"loss_average": "global"},
        {"divide_by_initial_world_size": False},
        "loss_average='global' divides by all ranks",
    ),
    ({"backend": "single"}, {}, "Join needs backend='torch'"),
    ({"method": "adamw", **UNREAD}, {}, "block '0.weight' has a method that keeps a state"),
    ({"method": "shampoo", **UNREAD}, {}, "takes statistics of averaged gradients"),
]


def join_what_is_refused(rank: int, ranks: int) -> list[str]:
    errors = []
    for options, words, _ in REFUSED:
        preconditioner = Preconditioner(make_model(), **{**OPTIONS, "kl_clip": None, **options})
        try:
            Join([preconditioner], **words)
        except ValueError as error:
            errors.append(str(error))
        else:
            errors.append("no error")
    return errors


def test_what_cannot_join_is_refused_on_every_rank():
    # A callable of the test's own cannot be pickled; each rank has the list.
    for errors in run_ranks(join_what_is_refused, 2):
        for error, (options, words, message) in zip(errors, REFUSED, strict=True):
            assert message in error, (options, words, error)


def part_in_gradients(rank: int, ranks: int, method: str, gradients: str) -> str | Tensor:
    """At the third step, rank 1 leaves out a layer, and nobody averages gradients."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"method": method, "gradients": gradients, "kl_clip": None}
    preconditioner = Preconditioner(model, **options)
    try:
        for step in range(4):
            model.zero_grad()
            loss_of(model, 0, step).backward()
            if step == 2 and rank == 1:
                model[2].weight.grad = None
            preconditioner.step()
            optimizer.step()
    except ValueError as error:
        return str(error)
    return weights(model)


@pytest.mark.parametrize("method", ["adamw", "soap"])
def test_states_of_ranks_do_not_fall_apart(method):
    for error in run_ranks(part_in_gradients, 2, method, "averaged"):
        assert isinstance(error, str)
        assert "blocks with gradients: rank(s) [1] have" in error
    first, second = run_ranks(part_in_gradients, 2, method, "local")
    assert isinstance(first, Tensor)
    assert torch.equal(first, second)


def step_as_a_scheduler_does(rank: int, ranks: int) -> str:
    """A learning rate that changes at every batch is another one on a joined rank."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = Preconditioner(model, optimizer=optimizer, gradients="local", **OPTIONS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    try:
        with Join([preconditioner]):
            for step in range(BATCHES[rank]):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                preconditioner.step()
                optimizer.step()
                scheduler.step()
    except ValueError as error:
        return str(error)
    return "no error"


def test_learning_rates_that_part_are_an_error_on_every_rank():
    for error in run_ranks(step_as_a_scheduler_does, 2):
        assert "learning rates: rank(s) [1] have" in error
