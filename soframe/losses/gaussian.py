"""Gaussian likelihoods whose variance the model returns, too: heteroscedastic regression."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.losses.base import diagonal_columns, random_signs
from soframe.losses.classification import OverPositions
from soframe.registry import register


@register("loss", "gaussian")
@dataclass(frozen=True)
class Gaussian(OverPositions):
    """``s / 2 + (y - m)^2 / (2 exp(s))`` of outputs ``[N, 2, ...]``: a mean m, a log-variance s.

    That is ``nn.GaussianNLLLoss()(m, s.exp(), y)`` where no variance is below its ``eps``. The
    Hessian depends on the target, and may be indefinite; its expectation over targets of the model,
    the Fisher, is ``diag(exp(-s), 1 / 2)`` (Amari, 1998; Kendall and Gal, 2017, equation 8, for the
    loss).

    Attributes:
        positions: How a sample's positions (the dimensions after the second) are combined.
    """

    @property
    def expected(self) -> bool:
        return True

    def _diagonal(self, outputs: Tensor) -> Tensor:
        precision = (-_log_variance(outputs)).exp()
        return self._scale(outputs) * torch.cat([precision, torch.full_like(precision, 0.5)], 1)

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self._diagonal(outputs) * vectors

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        return diagonal_columns(self._diagonal(outputs).sqrt())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        # No two of its numbers are correlated, so signs have the second moment.
        return random_signs(outputs, generator) * self._diagonal(outputs).sqrt()

    def counts(self, outputs: Tensor, gradients: Tensor) -> Tensor:
        # Both gradients of a term are of one residual, which determines its factor.
        # With a = c (m - y) exp(-s) and b = c (1 - (m - y)^2 exp(-s)) / 2 it solves
        # c^2 - 2 b c = a^2 exp(s).
        a, b = gradients.double().split(1, 1)
        square = a.square() * _log_variance(outputs).double().exp()
        root = (b.square() + square).sqrt()
        # Of two forms of the root the one that subtracts nothing; where both are zero, so is c.
        c = torch.where(b >= 0, b + root, square / (root - b).clamp(min=math.ulp(0.0)))
        return c / self._scale(outputs)


def _log_variance(outputs: Tensor) -> Tensor:
    if outputs.shape[1:2] != (2,):
        raise ValueError(
            f"loss 'gaussian' is of outputs [N, 2, ...], a mean and a log-variance, not "
            f"{tuple(outputs.shape)}: return torch.stack([mean, log_variance], 1)"
        )
    return outputs[:, 1:]
