"""Tasks: a model, its loss and its examples, for one seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.data import Source
from soframe.losses.base import Loss


@dataclass(frozen=True)
class Task:
    """A workload with a seed.

    Attributes:
        model: The model.
        likelihood: The loss, as `soframe.TrustRegion` names it; None if that optimizer cannot run.
        loss: From the model and a batch of examples to their mean loss.
        train: Training examples.
        test: Held-out examples, or None.
    """

    model: nn.Module
    likelihood: str | Loss | None
    loss: Callable[..., Tensor]
    train: Source
    test: Source | None = None


def half_square(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared error, summed over features: a Gaussian of unit variance."""
    value: Tensor = (model(inputs) - targets).square().sum() / (2 * len(inputs))
    return value


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats; classes are the second dimension of the outputs."""
    return F.cross_entropy(model(inputs), targets)
