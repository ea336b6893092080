"""Momentum: running averages or sums of the input of a stage (Polyak, 1964; Nesterov, 1983).

With ``x`` the input of the stage, ``m`` its buffer, both ``[groups, out, in]``, and ``b`` the
momentum, the buffer and the update are

    averaged:   m <- b m + (1 - b) x        m, or with Nesterov's form  b m + (1 - b) x
    classical:  m <- b m + x                m, or with Nesterov's form  b m + x

Muon (Jordan et al., 2024) uses the averaged form, whose Nesterov variant interpolates twice;
``torch.optim.SGD`` uses the classical one, which is ``1 / (1 - b)`` times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from soframe.checks.values import is_number
from soframe.layers.layout import BlockShape
from soframe.methods.base import Direction, Given, WithoutFactors
from soframe.registry import register
from soframe.specs import TensorSpec


@register("method", "momentum")
@dataclass(frozen=True)
class Momentum(WithoutFactors):
    """Heavy-ball or Nesterov momentum, a stage.

    Attributes:
        beta: The decay of the buffer, in ``[0, 1)``.
        nesterov: Whether the update is Nesterov's, which looks one step ahead.
        averaged: Whether the buffer is a running average of the inputs, rather than a decayed sum.

    Raises:
        ValueError: If ``beta`` is not in ``[0, 1)``.
    """

    elementwise = True
    options: ClassVar[Mapping[str, str]] = {"momentum": "beta"}

    beta: float = 0.9
    nesterov: bool = False
    averaged: bool = True

    def __post_init__(self) -> None:
        require_beta("Momentum", "beta", self.beta)

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        return {"momentum": TensorSpec(tuple(shape))}

    def direct(self, step: Given) -> Direction:
        new, before = step.incoming, step.state["momentum"]
        if self.averaged:
            buffer = before.lerp(new, 1 - self.beta)
            matrix = new.lerp(buffer, self.beta) if self.nesterov else buffer.clone()
        else:
            buffer = torch.add(new, before, alpha=self.beta)
            matrix = torch.add(new, buffer, alpha=self.beta) if self.nesterov else buffer.clone()
        return Direction(matrix, {"momentum": buffer})


def require_beta(method: str, name: str, beta: float | Sequence[float]) -> None:
    """Raise ValueError unless a decay, or each of two ``betas``, is a number in ``[0, 1)``."""
    betas: Any = beta if name == "betas" else (beta,)
    if not isinstance(betas, Sequence) or (name == "betas" and len(betas) != 2):
        raise ValueError(f"{method}: betas are two numbers, such as (0.9, 0.999), not {betas!r}")
    for number in betas:
        if not is_number(number):
            raise ValueError(
                f"{method}: {name} must be a number, not {number!r}: a schedule sets it at each "
                f"step, in the param_groups of a soframe.Optimizer"
            )
        if not 0 <= number < 1:
            raise ValueError(f"{method}: {name} must be at least 0 and less than 1, not {number!r}")


def second_moment(before: Tensor, new: Tensor, beta: float) -> Tensor:
    """Return the running average ``b square + (1 - b) new^2``."""
    return (before * beta).addcmul_(new, new, value=1 - beta)
