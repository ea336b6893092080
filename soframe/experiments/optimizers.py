"""The optimizers of the experiments, built from a `RunConfig`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import soframe
from soframe.experiments.config import RunConfig


def build_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The base optimizer: what steps once gradients are final.

    Args:
        model: The model, unwrapped.
        config: The run.

    Returns:
        AdamW, or SGD with Nesterov momentum for "sgd" and "kfac" alike.
    """
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
    return torch.optim.SGD(
        model.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        weight_decay=config.weight_decay,
    )


def build_preconditioner(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig
) -> soframe.Preconditioner | None:
    """The preconditioner of "kfac".

    Args:
        model: The model, unwrapped: names in reports are then the model's own.
        optimizer: The base optimizer, whose learning rate the clips read.
        config: The run.

    Returns:
        The preconditioner, or None for the other optimizers.
    """
    if config.optimizer != "kfac":
        return None
    # The schedule is to shorten the steps that the clip has cut, too.
    options: dict[str, Any] = {"clip_lr": "initial", **config.preconditioner}
    return soframe.Preconditioner(model, optimizer=optimizer, strategy=config.strategy, **options)


def schedule_factor(config: RunConfig, step: int) -> float:
    """What the learning rate is multiplied by.

    Args:
        config: The run.
        step: Steps taken so far, from 0.

    Returns:
        A factor from 1 to 0.
    """
    if config.schedule == "constant":
        return 1.0
    length = config.schedule_steps or config.steps
    assert length is not None, "RunConfig checks this"
    return 0.5 * (1.0 + math.cos(math.pi * min(step / length, 1.0)))


def set_lr(optimizer: torch.optim.Optimizer, config: RunConfig, step: int) -> None:
    """Sets the learning rate of a step, counted from 0, on every parameter group."""
    lr = config.lr * schedule_factor(config, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
