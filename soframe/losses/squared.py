"""Squared errors: Gaussian likelihoods of fixed variance."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.losses.base import Loss, diagonal_columns, mean_scale, random_signs
from soframe.registry import register


class _Gaussian(Loss):
    @property
    def floor(self) -> float:
        return 0.0

    @abstractmethod
    def _precision(self, outputs: Tensor) -> float:
        """Return the multiple of the identity that the Hessian is."""

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return vectors * self._precision(outputs)

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        return diagonal_columns(torch.full_like(outputs, math.sqrt(self._precision(outputs))))

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        # Any noise of the Gaussian's variance serves; random signs are the cheapest.
        return random_signs(outputs, generator) * math.sqrt(self._precision(outputs))


@register("loss", "squared-error")
@dataclass(frozen=True)
class SquaredError(_Gaussian):
    """``l_n = precision / 2 ||output_n - target_n||^2``, summed over features.

    Attributes:
        precision: The inverse variance of the Gaussian.
    """

    precision: float = 1.0

    def __post_init__(self) -> None:
        if not self.precision > 0:
            raise ValueError(f"SquaredError: precision must be positive, not {self.precision!r}")

    def _precision(self, outputs: Tensor) -> float:
        return self.precision


@register("loss", "mse")
@dataclass(frozen=True)
class MeanSquaredError(_Gaussian):
    """``l_n = mean over features of (output_n - target_n)^2``; ``nn.MSELoss()`` is its mean."""

    @property
    def means(self) -> bool:
        return True

    def _precision(self, outputs: Tensor) -> float:
        return 2.0 * mean_scale(True, outputs[:1].numel())
