"""The optimizers of the experiments, built from a `RunConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import soframe
from soframe.experiments.config import AND, RunConfig, method_of
from soframe.experiments.muon import MuonWithAdamW, Together, split
from soframe.experiments.requirements import require
from soframe.experiments.workloads import workload
from soframe.methods import Chain
from soframe.registry import first_match


def build_optimizer(
    model: nn.Module, config: RunConfig, *, full_batch: bool = False
) -> torch.optim.Optimizer:
    """What updates the parameters.

    Args:
        model: The model, unwrapped.
        config: The run.
        full_batch: Whether every step has all examples, which "trust-region" wants to know.

    Returns:
        The optimizer; SGD with Nesterov momentum for "sgd" and "kfac" alike.
    """
    if name := method_of(config.optimizer):
        method = _method(name, config.method)
        return soframe.Optimizer(
            model,
            method if config.modules is None else {config.modules: method},
            lr=config.lr,
            weight_decay=config.weight_decay,
            strategy=config.strategy,
            **config.options,
        )
    if config.optimizer == "trust-region":
        return _trust_region(model, config, full_batch)
    return _BUILDERS.get(config.optimizer, _sgd)(model, config)


def _method(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return a method.

    Args:
        name: What `method_of` returns.
        arguments: Its arguments; of a chain those of each stage by its name.

    Raises:
        ValueError: If there are arguments of what is no stage of the chain.
    """
    stages, known = name.split(AND), soframe.available("method")
    if len(stages) == 1:
        return known[name](**arguments)
    if unknown := [stage for stage in arguments if stage not in stages]:
        raise ValueError(f"method= has arguments of {unknown[0]!r}, which is no stage of {name!r}")
    return Chain(tuple(known[stage](**arguments.get(stage, {})) for stage in stages))


def _sgd(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        weight_decay=config.weight_decay,
    )


def _adamw(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _trust_region(model: nn.Module, config: RunConfig, full_batch: bool) -> soframe.TrustRegion:
    return soframe.TrustRegion(
        model,
        loss=workload(config.workload).likelihood,
        lr=config.lr,
        weight_decay=config.weight_decay,
        strategy=config.strategy,
        **{"full_batch": full_batch, **config.options},
    )


def _stochastic_trust_region(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    return soframe.StochasticTrustRegion(
        model, lr=config.lr, weight_decay=config.weight_decay, **config.options
    )


def _muon(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    options = dict(config.options)
    make = _published_muon if options.pop("published", False) else MuonWithAdamW
    return make(
        model,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        **options,
    )


def _published_muon(
    model: nn.Module,
    lr: float,
    momentum: float,
    adamw_lr: float = 3e-3,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """`MuonWithAdamW` as pytorch_optimizer has it, which orthogonalises in bfloat16."""
    (package,) = require("pytorch_optimizer")
    matrices, others = split(model)
    hidden = {"params": matrices, "lr": lr, "momentum": momentum, "use_muon": True}
    outer = {"params": others, "lr": adamw_lr, "betas": tuple(adamw_betas), "eps": 1e-8}
    groups = [{**g, "weight_decay": weight_decay} for g in (hidden, {**outer, "use_muon": False})]
    made: torch.optim.Optimizer = package.Muon(groups)
    return made


def _soap(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    (package,) = require("pytorch_optimizer")
    options = dict(config.options)
    adamw_lr = options.pop("adamw_lr", None)
    inner: list[nn.Parameter] = list(model.parameters())
    outer: list[nn.Parameter] = []
    if config.modules is not None:
        inner, outer = _within(model, config.modules)
        if adamw_lr is None:
            raise ValueError("modules= leaves parameters to AdamW: pass options['adamw_lr']")
    elif adamw_lr is not None:
        raise ValueError("options['adamw_lr'] is for what modules= leaves to AdamW: pass modules=")
    made: torch.optim.Optimizer = package.SOAP(
        inner, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, **options
    )
    if not outer:
        return made
    rest = torch.optim.AdamW(outer, lr=adamw_lr, weight_decay=config.weight_decay, fused=True)
    return Together(made, rest)


def _within(model: nn.Module, pattern: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters as `soframe.Optimizer` does by a pattern on names of modules.

    Args:
        model: The model.
        pattern: Of the names, or of those of classes.

    Returns:
        Those of modules that match, and all others.
    """
    matching = {
        id(parameter)
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if first_match([pattern], name, type(module).__name__) is not None
    }
    every = list(model.parameters())
    inner = [parameter for parameter in every if id(parameter) in matching]
    return inner, [parameter for parameter in every if id(parameter) not in matching]


def _shampoo(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    package, graft = require("pytorch_optimizer", "pytorch_optimizer.optimizer.utils.graft")
    made: torch.optim.Optimizer = package.ScalableShampoo(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        decoupled_weight_decay=True,
        moving_average_for_momentum=True,
        graft_type=graft.LayerWiseGrafting.RMSPROP,  # the length of Adam's step
        use_svd=True,  # on a CPU faster than the Schur-Newton iteration
        **config.options,
    )
    return made


_BUILDERS: Mapping[str, Callable[[nn.Module, RunConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "stochastic-trust-region": _stochastic_trust_region,
    "muon": _muon,
    "soap": _soap,
    "shampoo": _shampoo,
}


def build_preconditioner(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig
) -> soframe.Preconditioner | None:
    """The preconditioner of "kfac", or the one within an optimizer of soframe's.

    Args:
        model: The model, unwrapped: names in reports are then the model's own.
        optimizer: The base optimizer, whose learning rate the clips read.
        config: The run.

    Returns:
        The preconditioner, or None for the other optimizers.
    """
    if isinstance(optimizer, soframe.TrustRegion | soframe.Optimizer):
        return optimizer.preconditioner
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
    part = min(step / length, 1.0)
    return 1.0 - part if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * part))


def set_lr(optimizer: torch.optim.Optimizer, config: RunConfig, step: int) -> None:
    """Sets the learning rate of a step, counted from 0, on every parameter group."""
    factor = schedule_factor(config, step)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
