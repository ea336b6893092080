"""Cross-entropies of logits: categorical and Bernoulli likelihoods."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from soframe.losses.base import Loss, diagonal_columns, mean_scale
from soframe.registry import register

Over = Literal["mean", "sum"]


def require_over(name: str, setting: str, value: str) -> None:
    """Raise if a loss combines the terms of a sample by neither a mean nor a sum."""
    if value not in ("mean", "sum"):
        raise ValueError(f"{name}: {setting} must be 'mean' or 'sum', not {value!r}")


@dataclass(frozen=True)
class OverPositions(Loss):
    """The base class of losses ``[N, features, ...]`` over positions, the dimensions from 2 on."""

    positions: Over = "mean"

    def __post_init__(self) -> None:
        require_over(type(self).__name__, "positions", self.positions)

    @property
    def means(self) -> bool:
        return self.positions == "mean"

    def _scale(self, outputs: Tensor) -> float:
        return mean_scale(self.means, outputs[:1, :1].numel())


@register("loss", "cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(OverPositions):
    """``nn.CrossEntropyLoss()`` of logits ``[N, classes, ...]``: ``H = diag(p) - p p^T``.

    Attributes:
        positions: How a sample's positions (the dimensions after the classes) are combined.
    """

    @property
    def floor(self) -> float:
        return 0.0

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        p = outputs.softmax(1)
        return self._scale(outputs) * p * (vectors - (p * vectors).sum(1, keepdim=True))

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        # ``sqrt(p_c) (e_c - p)`` for every class at every position
        p = outputs.softmax(1).flatten(2) if outputs.dim() > 2 else outputs.softmax(1).unsqueeze(2)
        for position in range(p.shape[2]):
            for label in range(p.shape[1]):
                column = torch.zeros_like(p)
                column[:, :, position] = -p[:, :, position]
                column[:, label, position] += 1
                column[:, :, position] *= (
                    (self._scale(outputs) * p[:, label, position]).sqrt().unsqueeze(1)
                )
                yield column.view_as(outputs)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = outputs.softmax(1).movedim(1, -1)
        flat = p.reshape(-1, p.shape[-1])
        # Logits that are not finite have no distribution: the gradient is NaN, without an error.
        labels = torch.multinomial(flat.nan_to_num(1.0), 1, generator=generator)
        gradient = flat.scatter_add(1, labels, flat.new_full(labels.shape, -1.0))
        gradient = gradient.view(p.shape).movedim(-1, 1)
        # Positions are drawn independently, so a mean over them keeps one factor of the two.
        return gradient * math.sqrt(self._scale(outputs))


@register("loss", "binary-cross-entropy")
@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of logits ``[N, ...]``: ``H = diag(p (1 - p))``.

    Attributes:
        features: How a sample's features are combined; ``nn.BCEWithLogitsLoss()`` takes the mean.
    """

    features: Over = "mean"

    def __post_init__(self) -> None:
        require_over("BinaryCrossEntropy", "features", self.features)

    @property
    def means(self) -> bool:
        return self.features == "mean"

    @property
    def floor(self) -> float:
        return 0.0

    def _variance(self, outputs: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return mean_scale(self.means, outputs[:1].numel()) * p * (1 - p)

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self._variance(outputs) * vectors

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        return diagonal_columns(self._variance(outputs).sqrt())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = outputs.sigmoid()
        labels = torch.bernoulli(p.nan_to_num(0.5), generator=generator)  # as of CrossEntropy
        return (p - labels) * math.sqrt(mean_scale(self.means, outputs[:1].numel()))
