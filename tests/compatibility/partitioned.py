"""Training with gradients in partitions, as ZeRO keeps them, that must come to the plain run's.

Everything is float32, which is what DeepSpeed reduces, and seeded by the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe.settings import grouped
from tests.compatibility.fully_sharded import SAMPLES, Net, batch, make_net, weights
from tests.methods.stages import damping_for

STEPS = 5
FIRST = -2  # before there is an engine


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        stage: The stage of ZeRO.
        when: Whether the preconditioner is built ``"before"`` ``deepspeed.initialize``, or
            ``"after"``, or by the ``"hook"`` of `soframe.integrations`.
        method: The method.
        options: Further settings of `soframe.Preconditioner`.
        zero: Settings of ZeRO.
        config: Further settings of DeepSpeed.
        passes: Micro-batches in each step.
        groups: Whether biases have a learning rate of their own.
        spoilt: The step at which the gradient of one rank is not finite.
        frozen: From which step to which a weight and a bias are not trained; `FIRST` for before
            there is an engine.
        momentum: The optimizer's, by which DeepSpeed moves what is frozen, too.
        clip: DeepSpeed's bound on the norm of what it is given.
        checkpoints: Whose checkpoints compute activations anew in the backward pass: ``"torch"``'s,
            ``"deepspeed"``'s, or nobody's.
    """

    stage: int = 2
    when: str = "after"
    method: Any = "kfac"
    options: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 1
    groups: bool = False
    spoilt: int | None = None
    frozen: tuple[int, int] = (-1, -1)
    momentum: float = 0.9
    clip: float = 0.0
    checkpoints: str = ""


def base(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    if not case.groups:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=case.momentum)
    named = list(model.named_parameters())
    biases = [p for name, p in named if name.endswith("bias")]
    others = [p for name, p in named if not name.endswith("bias")]
    return torch.optim.SGD([{"params": biases, "lr": 0.3}, {"params": others}], lr=0.1)


def settings_of(case: Case) -> dict[str, Any]:
    settings = {"statistics_every": 1, "solve_every": 2, "kl_clip": None}
    settings |= damping_for(case.method, case.options.get("auxiliary"))
    return {**settings, "layers": "all", **case.options}


def losses(step: int, case: Case, model: nn.Module, rank: int, ranks: int) -> Iterator[Tensor]:
    """Yield the losses of the micro-batches of a step, as functions."""
    x, y = batch(step)
    mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    size = SAMPLES // ranks // case.passes
    for tokens, targets in zip(x[mine].split(size), y[mine].float().split(size), strict=True):
        loss = 0.5 * (model(tokens) - targets).square().sum(1).mean()
        yield loss * float("nan") if step == case.spoilt and rank == 0 else loss


def freeze(model: Net, step: int, case: Case) -> None:
    if step in case.frozen:
        for parameter in (model.layers[0].up.weight, model.layers[1].up.bias):
            parameter.requires_grad_(step == case.frozen[1])


def net() -> Net:
    return make_net().float()


def alone(case: Case, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """The weights after a run with whole gradients; on one process, of the concatenated batch."""
    model = net()
    freeze(model, FIRST, case)
    optimizer = base(model, case)
    settings = settings_of(case)
    if ranks == 1:
        settings.pop("strategy", None)
    own = soframe.Preconditioner(model, case.method, optimizer=optimizer, **grouped(settings))
    for step in range(STEPS):
        freeze(model, step, case)
        for loss in losses(step, case, model, rank, ranks):
            (loss / case.passes).backward()
        for parameter in model.parameters() if ranks > 1 else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(ranks))
        own.step()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    own.close()
    return weights(model)


def assert_same(results: list[Any], case: Case, name: str) -> None:
    expected, start = alone(case), weights(net())
    for found, counters in results:
        for key, weight in found.items():
            where = f"{name}, {key}"
            off = float((weight - expected[key]).abs().max())
            assert off < 2e-6, (where, off)
            moves = not torch.equal(expected[key], start[key])
            assert torch.equal(weight, start[key]) != moves, where
            assert moves or key.startswith("unused") or case.frozen[0] == FIRST
        assert counters["skipped_updates"] == (case.spoilt is not None)
