"""The loop of training that tests share; they differ in model, loss, steps and who steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe.methods import FOOF, KFAC, Chain
from soframe.settings import grouped
from soframe.setup.choosing import methods


class Steps(Protocol):
    """A preconditioner or an optimizer."""

    @property
    def step(self) -> Callable[[], Any]: ...


@dataclass
class Averaging:
    """Averages gradients over the ranks, as DistributedDataParallel does."""

    model: nn.Module

    def step(self) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        for parameter in self.model.parameters() if ranks > 1 else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks


def exact(method: Any = "kfac") -> dict[str, Any]:
    """The solver whose damping is exact, as a dense twin has it, for K-FAC and its kin."""
    stages = [s for m in methods(method) for s in (m.stages if isinstance(m, Chain) else (m,))]
    own = any(isinstance(stage, KFAC | FOOF) for stage in stages)
    return {"solver": "eigen"} if own else {}


def precondition(model: nn.Module, method: Any = "kfac", **settings: Any) -> soframe.Preconditioner:
    """A preconditioner with statistics and solves at every step and no clip, but for `settings`."""
    every = {"statistics_every": 1, "solve_every": 1, "kl_clip": None, **exact(method)}
    return soframe.Preconditioner(model, method, **grouped({**every, **settings}))


def train(
    model: nn.Module,
    loss: Callable[[nn.Module, int], Tensor | Iterable[Tensor]],
    steps: Iterable[int],
    *in_turn: Steps,
) -> Tensor:
    """Take steps, on each with the gradients of `loss(model, step)`, and return the weights.

    A loss that yields those of micro-batches has a backward pass for each before the next is made.
    """
    for step in steps:
        model.zero_grad()
        found = loss(model, step)
        for part in (found,) if isinstance(found, Tensor) else found:
            part.backward()
        for one in in_turn:
            one.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of the gradients, of the parameters that have one."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
