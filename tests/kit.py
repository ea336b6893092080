"""The loop of training that tests share; they differ in model, loss, steps and who steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor, nn

import soframe
from soframe.settings import grouped


class Steps(Protocol):
    """A preconditioner or an optimizer."""

    @property
    def step(self) -> Callable[[], Any]: ...


def precondition(model: nn.Module, method: Any = "kfac", **settings: Any) -> soframe.Preconditioner:
    """A preconditioner with statistics and solves at every step and no clip, but for `settings`."""
    every = {"statistics_every": 1, "solve_every": 1, "kl_clip": None}
    return soframe.Preconditioner(model, method, **grouped({**every, **settings}))


def train(
    model: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    steps: Iterable[int],
    *in_turn: Steps,
) -> Tensor:
    """Take steps, on each with the gradients of `loss(model, step)`, and return the weights."""
    for step in steps:
        model.zero_grad()
        loss(model, step).backward()
        for one in in_turn:
            one.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
