"""Optimizers of the experiments, built from a `RunConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import soframe
from experiments.config import AND, PRECONDITIONED, UNTUNED_PEERS, RunConfig, method_of
from experiments.libraries import import_kfac_pytorch, require
from experiments.muon import Together, muon_with_adamw, split
from soframe.losses.base import Loss
from soframe.methods import Chain
from soframe.registry import describe, first_match
from soframe.settings import grouped
from soframe.testing import Oracle

Own = soframe.TrustRegion | soframe.StochasticTrustRegion | soframe.Optimizer
"""Optimizers of soframe, whose hooks `close` removes."""


def build_optimizer(
    model: nn.Module, config: RunConfig, likelihood: str | Loss | None, *, full_batch: bool
) -> torch.optim.Optimizer:
    """Return the optimizer: for "sgd", "kfac" and "ekfac", SGD with Nesterov momentum.

    Args:
        model: The model, unwrapped.
        config: The run.
        likelihood: The loss, for "trust-region".
        full_batch: Whether every step has all examples, for "trust-region".
    """
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    options = dict(config.options)
    match config.optimizer:
        case "sgd" | "kfac" | "ekfac":
            nesterov = config.momentum > 0
            return torch.optim.SGD(
                model.parameters(), momentum=config.momentum, nesterov=nesterov, **common
            )
        case "oracle":
            return _oracle(model, momentum=config.momentum, **common, **options)
        case "adamw":
            return torch.optim.AdamW(model.parameters(), betas=config.betas, fused=True, **common)
        case "trust-region":
            if likelihood is None:
                raise ValueError(
                    "trust-region cannot run: it has no name for the loss of this workload"
                )
            arguments = {"full_batch": full_batch, "strategy": config.strategy, **options}
            return soframe.TrustRegion(model, loss=likelihood, **grouped({**common, **arguments}))
        case "stochastic-trust-region":
            return soframe.StochasticTrustRegion(model, **common, **options)
        case "muon":
            return _muon(model, momentum=config.momentum, **common, **options)
        case "soap" | "shampoo" | "prodigy" | "dadapt-adam" | "schedule-free" | "kfac-pytorch":
            return _peer(model, config, common, options)
    name = method_of(config.optimizer)
    assert name is not None
    method = _method(name, config.method)
    return soframe.Optimizer(
        model,
        method if config.modules is None else {config.modules: method},
        strategy=config.strategy,
        # All optimizers of a comparison let the same weights decay.
        **grouped({"decay_vectors": True, **common, **options}),
    )


def _oracle(model: nn.Module, lr: float, **options: Any) -> Oracle:
    """Return the oracle, whose conjugate gradients end early, as in Martens (2010)."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("oracle has the matrix of one process's batch: leave out processes")
    return Oracle(model, lr, **{"damping": 0.01, "tolerance": 0.01, "iterations": 20, **options})


class PreconditionedSGD(torch.optim.SGD):
    """SGD with Nesterov momentum behind kfac-pytorch's preconditioner."""

    def __init__(
        self,
        model: nn.Module,
        momentum: float,
        common: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(model.parameters(), momentum=momentum, nesterov=momentum > 0, **common)
        self._preconditioner = import_kfac_pytorch().KFACPreconditioner(
            model, lr=lambda step: self.param_groups[0]["lr"], **options
        )

    def step(self, closure: Any = None) -> Any:
        self._preconditioner.step()
        return super().step(closure)


def _method(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return a method; the arguments of a chain are by the names of its stages."""
    stages, known = name.split(AND), soframe.available("method")
    if len(stages) == 1:
        return known[name](**arguments)
    if unknown := [stage for stage in arguments if stage not in stages]:
        raise ValueError(f"method= has arguments of {unknown[0]!r}, which is no stage of {name!r}")
    return Chain(tuple(known[stage](**arguments.get(stage, {})) for stage in stages))


def _muon(model: nn.Module, *, published: bool = False, **options: Any) -> torch.optim.Optimizer:
    make = _published_muon if published else muon_with_adamw
    return make(model, **options)


def _published_muon(
    model: nn.Module,
    lr: float,
    momentum: float,
    adamw_lr: float = 3e-3,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Return `muon_with_adamw` as pytorch_optimizer has it, which orthogonalises in bfloat16."""
    matrices, outer_parameters = split(model)
    hidden = {"params": matrices, "lr": lr, "momentum": momentum, "use_muon": True}
    outer = {"params": outer_parameters, "lr": adamw_lr, "betas": tuple(adamw_betas), "eps": 1e-8}
    groups = [{**g, "weight_decay": weight_decay} for g in (hidden, {**outer, "use_muon": False})]
    muon: torch.optim.Optimizer = require("pytorch_optimizer").Muon(groups)
    return muon


def _peer(
    model: nn.Module, config: RunConfig, common: dict[str, Any], options: dict[str, Any]
) -> torch.optim.Optimizer:
    if config.optimizer == "kfac-pytorch":
        return PreconditionedSGD(model, config.momentum, common, options)
    package = require("pytorch_optimizer")
    optimizer: torch.optim.Optimizer
    if config.optimizer in UNTUNED_PEERS:
        kinds = (package.Prodigy, package.DAdaptAdam, package.ScheduleFreeAdamW)
        # With the defaults of their library: lr= of the run is not used.
        by_name = dict(zip(UNTUNED_PEERS, kinds, strict=True))
        optimizer = by_name[config.optimizer](model.parameters())
        return optimizer
    if config.optimizer == "soap":
        adamw_lr = options.pop("adamw_lr", None)
        if (adamw_lr is None) != (config.modules is None):
            raise ValueError(
                "modules= leaves parameters to AdamW, of options['adamw_lr']: give both"
            )
        inner, outer = _within(model, config.modules)
        optimizer = package.SOAP(inner, betas=config.betas, **common, **options)
        if not outer:
            return optimizer
        decay = config.weight_decay
        rest = torch.optim.AdamW(outer, lr=adamw_lr, weight_decay=decay, fused=True)
        return Together(optimizer, rest)
    graft = require("pytorch_optimizer.optimizer.utils.graft")
    optimizer = package.ScalableShampoo(
        model.parameters(),
        betas=config.betas,
        decoupled_weight_decay=True,
        moving_average_for_momentum=True,
        graft_type=graft.LayerWiseGrafting.RMSPROP,  # the length of Adam's step
        use_svd=True,  # on a CPU faster than the Schur-Newton iteration
        **common,
        **options,
    )
    return optimizer


def _within(model: nn.Module, pattern: str | None) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters as `soframe.Optimizer` does by a pattern on names of modules."""
    matching: set[int] = set()
    for name, module in model.named_modules():
        if pattern is None or first_match([pattern], name, type(module).__name__) is not None:
            matching.update(map(id, module.parameters(recurse=False)))
    every = list(model.parameters())
    inner = [parameter for parameter in every if id(parameter) in matching]
    return inner, [parameter for parameter in every if id(parameter) not in matching]


def build_preconditioner(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig
) -> soframe.Preconditioner | None:
    """Return the preconditioner of "kfac" and "ekfac", or None."""
    if config.optimizer not in PRECONDITIONED:
        return None
    return soframe.Preconditioner(
        model,
        method=config.optimizer,
        optimizer=optimizer,
        strategy=config.strategy,
        **grouped(config.preconditioner),
    )


def schedule_factor(config: RunConfig, step: int, seconds: float = 0.0) -> float:
    """Return the factor of the learning rate, from 1 to 0, after so many steps and seconds."""
    if config.schedule_seconds is not None:
        return factor(config.schedule, seconds, config.schedule_seconds, config.warmup)
    length = config.schedule_steps or config.steps or math.inf
    return factor(config.schedule, step, length, config.warmup)


def factor(schedule: str, taken: float, length: float, warmup: float) -> float:
    """Return the factor of the learning rate: it grows in a part of the run, then falls to 0."""
    grown = warmup * length if warmup else 0.0
    if taken < grown:
        return (taken + 1) / (grown + 1)
    if schedule == "constant":
        return 1.0
    remaining = max(length - taken, 0.0) / (length - grown)
    shapes = {"linear": remaining, "root": math.sqrt(remaining)}
    return shapes.get(schedule, 0.5 * (1 - math.cos(math.pi * remaining)))


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the initial learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def settings_of(
    optimizer: torch.optim.Optimizer, preconditioner: soframe.Preconditioner | None
) -> dict[str, Any]:
    """Return the settings in force, defaults included, ready for JSON."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        plain = {name: _plain(value) for name, value in group.items() if name != "params"}
        groups.append(plain)
    settings: dict[str, Any] = {"optimizer": type(optimizer).__name__, "groups": groups}
    if preconditioner is not None:
        # One line for each setting, between a first and a last line of brackets.
        lines = (line.strip().partition(": ") for line in repr(preconditioner).splitlines()[1:-1])
        settings["preconditioner"] = {name: value for name, _, value in lines}
    return settings


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it: numbers and texts as they are, components as text."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return describe(value)
