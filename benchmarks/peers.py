"""Optimizers of soframe and of other libraries, by name, for benchmarks of whole steps.

Their work is the same where settings can make it so: hidden matrices by Muon and all else by AdamW,
statistics of SOAP at every step, whole matrices, no grafting. Learning rates are so small that
weights stay near their start.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import soframe
from experiments import muon

LR = 1e-5
LONGEST_SIDE = 8192  # with a factor, by either library

Interval = int | Callable[[int], int]
Optimizers = Callable[[nn.Module, Interval], list[torch.optim.Optimizer]]
"""From a model and the interval of solves to the optimizers that step in turn."""

PACKAGES = {
    "pytorch-optimizer": "pytorch_optimizer",
    "heavyball": "heavyball",
    "distributed-shampoo": "distributed_shampoo",
    "dion": "dion",
    "kfac-pytorch": "kfac",
}
"""The packages of the contenders whose names begin so."""


def missing(names: Iterable[str]) -> dict[str, str]:
    """Return the contenders whose package is not installed, with the package."""
    return {
        name: package
        for name in names
        for prefix, package in PACKAGES.items()
        if name.startswith(prefix) and importlib.util.find_spec(package) is None
    }


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return hidden matrices, with kernels of convolutions, and all other parameters."""
    matrices, others = muon.split(model)
    return [*matrices, *(p for p in others if p.ndim > 2)], [p for p in others if p.ndim <= 2]


def fused(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's fastest AdamW."""
    return torch.optim.AdamW(params, lr=LR, fused=True)


def soframe_method(
    method: Any, model: nn.Module, every: Interval, **settings: Any
) -> list[torch.optim.Optimizer]:
    """Return soframe's optimizer, with AdamW for parameters without a block of the method."""
    own = {"statistics_every": 1, "solve_every": every, **settings}
    return [soframe.Optimizer(model, method, lr=LR, **own)]


def muon_beside(
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    model: nn.Module,
    every: Interval,
) -> list[torch.optim.Optimizer]:
    """Return a Muon that takes matrices only, and fused AdamW for the others."""
    matrices, others = split(model)
    return [make(matrices), fused(others)]


def pytorch_optimizer_muon(model: nn.Module, every: Interval) -> list[torch.optim.Optimizer]:
    """Return pytorch_optimizer's Muon, with its AdamW."""
    matrices, others = split(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return [importlib.import_module("pytorch_optimizer").Muon(groups, lr=LR, adamw_lr=LR)]


def pytorch_optimizer_soap(model: nn.Module, every: Interval) -> list[torch.optim.Optimizer]:
    """Return pytorch_optimizer's SOAP for everything, as soframe's takes everything."""
    peer = importlib.import_module("pytorch_optimizer")
    optimizer = peer.SOAP(model.parameters(), lr=LR)

    def schedule(optimizer: Any, *_: Any) -> None:
        for state in optimizer.state.values():  # empty before the first step
            step = optimizer.param_groups[0]["step"]
            state["precondition_frequency"] = every(step) if callable(every) else every

    optimizer.register_step_pre_hook(schedule)
    return [optimizer]


def heavyball() -> Any:
    """Return the package, compiling without the autotuning that takes minutes."""
    package = importlib.import_module("heavyball")
    package.utils.compile_mode = "default"
    return package


def heavyball_soap(model: nn.Module, every: Interval) -> list[torch.optim.Optimizer]:
    """Return HeavyBall's SOAP, which compiles its step, for everything."""
    own = {"precondition_frequency": every, "max_precond_dim": LONGEST_SIDE, "merge_dims": False}
    return [heavyball().SOAP(model.parameters(), lr=LR, weight_decay=0.0, **own)]


def distributed_shampoo_soap(model: nn.Module, every: Interval) -> list[torch.optim.Optimizer]:
    """Return Distributed Shampoo's SOAP for matrices, and fused AdamW for all else."""
    peer = importlib.import_module("distributed_shampoo")
    matrices = [p for p in model.parameters() if p.ndim > 1 and max(p.shape) <= LONGEST_SIDE]
    chosen = {id(p) for p in matrices}
    soap = peer.DistributedShampoo(
        matrices,
        lr=LR,
        betas=(0.9, 0.95),
        epsilon=1e-8,
        max_preconditioner_dim=LONGEST_SIDE,
        precondition_frequency=every,
        start_preconditioning_step=every,
        preconditioner_config=peer.DefaultSOAPConfig,
        # Else it makes vectors of matrices that are small enough.
        distributed_config=peer.SingleDeviceDistributedConfig(target_parameter_dimensionality=2),
    )
    return [soap, fused(p for p in model.parameters() if id(p) not in chosen)]


def dion_muon(model: nn.Module, every: Interval) -> list[torch.optim.Optimizer]:
    """Return dion's Muon, with its AdamW."""
    matrices, others = split(model)
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    peer = importlib.import_module("dion")
    return [peer.Muon(groups, lr=LR, nesterov=True, flatten=True, weight_decay=0.0)]


OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda model, every: [fused(model.parameters())],
    "adamw-foreach": lambda model, every: [
        torch.optim.AdamW(model.parameters(), lr=LR, foreach=True)
    ],
    "soframe-adamw": partial(soframe_method, "adamw"),
    "torch-muon": partial(muon_beside, lambda matrices: torch.optim.Muon(matrices, lr=LR)),
    "pytorch-optimizer-muon": pytorch_optimizer_muon,
    "heavyball-muon": partial(muon_beside, lambda matrices: heavyball().Muon(matrices, lr=LR)),
    "dion-muon": dion_muon,
    "soframe-muon": partial(soframe_method, "muon"),
    "pytorch-optimizer-soap": pytorch_optimizer_soap,
    "heavyball-soap": heavyball_soap,
    "distributed-shampoo-soap": distributed_shampoo_soap,
    "soframe-soap": partial(soframe_method, "soap"),
    "soframe-soap-muon": partial(soframe_method, "soap-muon"),
}
