"""Param groups: lengths and weight decays of some parameters, within the model of the objective.

The objective is the loss and ``sum_g decay_g / 2 ||parameters_g||^2``, whose gradient and curvature
are exact for every group. In a group with a smaller ``lr`` every new direction is scaled down
before the model weighs it, so that the model predicts the step that is taken; the last update keeps
its length, unless its group's ``lr`` is 0. The largest ``lr`` then multiplies the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.trust_region.quadratic import inner_products
from soframe.trust_region.twice import Direction

Group = Mapping[str, Any]

SETTINGS = {"params", "param_names", "lr", "initial_lr", "weight_decay"}
"""The allowed keys of a group; schedulers of torch add ``initial_lr``."""


def check(model: nn.Module, group: Group) -> None:
    """Check a group that has every default filled in."""
    if unknown := sorted(set(group) - SETTINGS):
        raise ValueError(f"a param group of TrustRegion has lr and weight_decay, not {unknown}")
    if not 0 < group["lr"] < math.inf:
        raise ValueError(f"lr must be positive, not {group['lr']!r}")
    if not 0 <= group["weight_decay"] < math.inf:
        raise ValueError(f"weight_decay must not be negative, not {group['weight_decay']!r}")
    _require_own(model.parameters(), set(group["params"]))


def check_all(model: nn.Module, groups: Sequence[Group]) -> None:
    """Check that the groups have all trained parameters of the model, whole, and no others."""
    named = list(model.named_parameters())
    sharding.require_whole(named, "TrustRegion")
    grouped: set[nn.Parameter] = set()
    for group in groups:
        grouped.update(group["params"])
    _require_own(model.parameters(), grouped)
    for name, parameter in named:
        if parameter.requires_grad and parameter not in grouped:
            raise ValueError(
                f"TrustRegion: {name!r} needs a gradient, and is in no param group: add it to "
                f"one, or freeze it with requires_grad_(False)"
            )
    if not trainable(groups):
        raise ValueError("TrustRegion: no parameter of the model needs a gradient")


def _require_own(trained: Iterable[nn.Parameter], grouped: set[nn.Parameter]) -> None:
    for foreign in grouped.difference(trained):
        raise ValueError(
            f"TrustRegion: a param group has a parameter of shape {list(foreign.shape)} that is "
            f"not, or no longer, the model's: make an optimizer without it"
        )


def trainable(groups: Sequence[Group]) -> list[nn.Parameter]:
    """Return the parameters that need a gradient, group by group."""
    parameters: list[nn.Parameter] = []
    for group in groups:
        parameters += [parameter for parameter in group["params"] if parameter.requires_grad]
    return parameters


def setting(groups: Sequence[Group], name: str) -> list[float]:
    """Return a setting of each parameter of `trainable`."""
    values: list[float] = []
    for group in groups:
        values += itertools.repeat(float(group[name]), len(trainable([group])))
    return values


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def copies(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return copies of the values of parameters."""
    return [parameter.detach().clone() for parameter in parameters]


def mean_decay(groups: Sequence[Group]) -> float:
    """Return the weight decay that the preconditioner damps with: the mean over all elements."""
    decays = setting(groups, "weight_decay")
    if len(set(decays)) == 1:
        return decays[0]
    total, size = 0.0, 0
    for parameter, decay in zip(trainable(groups), decays, strict=True):
        total += decay * parameter.numel()
        size += parameter.numel()
    return total / size


def shares(groups: Sequence[Group]) -> tuple[list[float], float]:
    """Return the ``lr`` of each `trainable` parameter over the largest ``lr``, and the largest."""
    lrs = setting(groups, "lr")
    largest = max(lrs)
    return [1.0 if lr == largest else lr / largest for lr in lrs], largest


def scaled(direction: Direction, factors: Sequence[float]) -> list[Tensor | None]:
    """Return a direction with each of its tensors scaled."""
    result = list(direction)
    for index, (tensor, factor) in enumerate(zip(direction, factors, strict=True)):
        if tensor is not None and factor != 1.0:
            result[index] = tensor * factor
    return result


def with_decay(parameters: Sequence[nn.Parameter], decays: Sequence[float]) -> list[Tensor]:
    """Add the penalty's gradient to ``.grad``, which becomes dense, and return these gradients."""
    gradients = []
    for parameter, decay in zip(parameters, decays, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if decay:
            parameter.grad.add_(parameter.detach(), alpha=decay)
        gradients.append(parameter.grad)
    return gradients


def penalty(decayed: Iterable[tuple[nn.Parameter, float]]) -> float:
    """Return the penalty on weights, given parameters and their weight decays."""
    by_decay: dict[float, list[Tensor]] = {}
    for parameter, decay in decayed:
        by_decay.setdefault(decay, []).append(parameter)
    return sum(0.5 * d * inner_products([weights]).item() for d, weights in by_decay.items() if d)


def slope_and_metric(
    gradients: Sequence[Tensor],
    directions: Sequence[Direction],
    *,
    decays: Sequence[float],
    damping: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the quadratic model's terms beside the curvature of the loss; float64, on the CPU.

    ``[k]``, the inner products of directions and gradient; ``[k, k]``, of every two directions,
    weighted by damping and decays; ``[k, k]``, the same unweighted.
    """
    slope = torch.zeros(len(directions), dtype=torch.float64, device="cpu")
    metric = torch.zeros(len(directions), len(directions), dtype=torch.float64, device="cpu")
    lengths = torch.zeros_like(metric)
    rows: list[Direction] = [gradients]
    rows += directions
    for decay in dict.fromkeys(decays):
        has_decay = [parameter_decay == decay for parameter_decay in decays]
        products = inner_products([list(itertools.compress(row, has_decay)) for row in rows])
        slope += products[0, 1:]
        metric += (damping + decay) * products[1:, 1:]
        lengths += products[1:, 1:]
    return slope, metric, lengths
