"""Param groups: lengths and weight decays of some parameters, within the model of the objective.

The objective is the loss and ``sum_g decay_g / 2 ||parameters_g||^2``, whose gradient and curvature
are exact for every group. A group that is to move less than others has its share of every
new direction scaled down before the model weighs them, so that the model is one of the step as it
is taken; the last update counts as it was, unless its group stands. The largest ``lr`` then
multiplies the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.home import GradientHome
from soframe.checks.numbers import is_number
from soframe.derivatives.twice import Direction
from soframe.trust_region.quadratic import inner_products

Group = Mapping[str, Any]

SETTINGS = {"params", "param_names", "lr", "initial_lr", "weight_decay"}
"""What a group may have; schedulers of torch add ``initial_lr``."""

MOST = 1e30
"""Of a weight decay: more is no number in single precision, once it is multiplied."""


def check(model: nn.Module, group: Group) -> None:
    """Check a group.

    Args:
        model: The model.
        group: The group, with every default filled in.

    Raises:
        ValueError: If a setting is unknown or out of range, or a parameter not the model's.
    """
    unknown = sorted(set(group) - SETTINGS)
    if unknown:
        raise ValueError(f"a param group of TrustRegion has lr and weight_decay, not {unknown}")
    lr, decay = group["lr"], group["weight_decay"]
    if not is_number(lr) or not 0 < lr < math.inf:
        raise ValueError(f"lr must be positive, not {lr!r}")
    if not is_number(decay) or not 0 <= decay < math.inf:
        raise ValueError(f"weight_decay must not be negative, not {decay!r}")
    if decay > MOST:
        raise ValueError(f"weight_decay must not be above {MOST:g}, not {decay!r}")
    _require_own(model.parameters(), set(group["params"]))


def check_last(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Check the group that was added last, and take it out again if it is wrong.

    Args:
        model: The model.
        groups: The groups.

    Raises:
        ValueError: See `check`.
    """
    try:
        check(model, groups[-1])
    except ValueError:
        del groups[-1]
        raise


def check_all(model: nn.Module, groups: Sequence[Group]) -> None:
    """Check that the groups have the parameters of the model that are trained.

    Args:
        model: The model.
        groups: The groups.

    Raises:
        ValueError: If a parameter that needs a gradient is in no group, or none needs one; or one
            in a group is not the model's, which may have exchanged a layer; or one is sharded.
    """
    named = list(model.named_parameters())
    sharding.require_whole(named, "TrustRegion")
    grouped = {p for group in groups for p in group["params"]}
    _require_own([parameter for _, parameter in named], grouped)
    for name, parameter in named:
        if parameter.requires_grad and parameter not in grouped:
            raise ValueError(
                f"TrustRegion: {name!r} needs a gradient, and is in no param group: add it to "
                f"one, or freeze it with requires_grad_(False)"
            )
    if not trainable(groups):
        raise ValueError("TrustRegion: no parameter of the model needs a gradient")


def numbers(groups: Sequence[Group]) -> list[tuple[float, float]]:
    """Return what schedulers may change from step to step, once it is checked.

    Args:
        groups: The groups.

    Returns:
        For each group ``lr`` and ``weight_decay``. An ``lr`` may be 0 by now, where its parameters
        are to stand.

    Raises:
        ValueError: If one is out of range.
    """
    checked = []
    for group in groups:
        lr, decay = group["lr"], group["weight_decay"]
        if not is_number(lr) or not lr >= 0:
            raise ValueError(f"TrustRegion: the lr of a param group has become {lr!r}")
        if not is_number(decay) or not 0 <= decay <= MOST:
            raise ValueError(f"TrustRegion: the weight_decay of a group has become {decay!r}")
        checked.append((float(lr), float(decay)))
    return checked


def _require_own(own: Iterable[nn.Parameter], grouped: set[nn.Parameter]) -> None:
    for foreign in grouped.difference(own):
        raise ValueError(
            f"TrustRegion: a param group has a parameter of shape {list(foreign.shape)} that is "
            f"not, or no longer, the model's: make an optimizer without it"
        )


def trainable(groups: Sequence[Group]) -> list[nn.Parameter]:
    """Return the parameters that need a gradient, group by group."""
    return [p for group in groups for p in group["params"] if p.requires_grad]


def setting(groups: Sequence[Group], name: str) -> list[float]:
    """Return a setting of each parameter of `trainable`."""
    return [float(group[name]) for group in groups for p in group["params"] if p.requires_grad]


def mean_decay(groups: Sequence[Group]) -> float:
    """Return the weight decay that the preconditioner damps with: the mean over all numbers."""
    decays = setting(groups, "weight_decay")
    if len(set(decays)) == 1:
        return decays[0]
    sizes = [parameter.numel() for parameter in trainable(groups)]
    return sum(map(float.__mul__, decays, map(float, sizes))) / sum(sizes)


def shares(groups: Sequence[Group]) -> tuple[list[float], float]:
    """Return by how much each parameter's direction is scaled, and the step along all of them.

    Returns:
        Of each parameter of `trainable` its ``lr`` over the largest; and that.
    """
    lrs = setting(groups, "lr")
    largest = max(lrs)
    return [1.0 if lr == largest else lr / largest for lr in lrs], largest


def scaled(direction: Direction, factors: Sequence[float]) -> list[Tensor | None]:
    """Return a direction with each of its tensors scaled."""
    rows = zip(direction, factors, strict=True)
    return [t if t is None or factor == 1.0 else t * factor for t, factor in rows]


def add_decay(
    parameters: Sequence[nn.Parameter], decays: Sequence[float], home: GradientHome
) -> list[Tensor]:
    """Add the gradient of the penalty to the gradients.

    Args:
        parameters: The parameters; those without a gradient get one.
        decays: Their weight decays.
        home: Where their gradients live.

    Returns:
        Copies of the gradients of the objective.
    """
    gradients = []
    for parameter, decay in zip(parameters, decays, strict=True):
        gradient = home.fill(parameter)
        if decay:
            gradient.add_(parameter.detach(), alpha=decay)
        gradients.append(gradient.clone())
    return gradients


def penalty(decayed: Iterable[tuple[nn.Parameter, float]]) -> float:
    """Return the penalty on weights.

    Args:
        decayed: Parameters and their weight decays.
    """
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
    """Return what the quadratic model has besides the curvature of the loss.

    Args:
        gradients: Of the objective.
        directions: k directions.
        decays: The weight decay of each parameter.
        damping: The damping of all.

    Returns:
        ``[k]``, the inner products of directions and gradient; ``[k, k]``, those of every two
        directions, weighed by damping and decays; and those of every two as they are. Float64, on
        the CPU.
    """
    slope = torch.zeros(len(directions), dtype=torch.float64, device="cpu")
    metric = torch.zeros(len(directions), len(directions), dtype=torch.float64, device="cpu")
    lengths = torch.zeros_like(metric)
    for decay in dict.fromkeys(decays):
        rows = [
            [tensor for tensor, of_tensor in zip(row, decays, strict=True) if of_tensor == decay]
            for row in (gradients, *directions)
        ]
        products = inner_products(rows)
        slope += products[0, 1:]
        metric += (damping + decay) * products[1:, 1:]
        lengths += products[1:, 1:]
    return slope, metric, lengths
