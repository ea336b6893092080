"""What is trained: data, a model, a loss, and the training losses worth reaching.

A workload fixes everything that must be the same for every optimizer in a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.experiments import data, models


@dataclass(frozen=True)
class Workload:
    """A training problem.

    Attributes:
        name: What the command line calls it.
        title: What tables and plots call it.
        loss_name: What is measured, in words.
        batch_size: Examples per step, over all processes.
        targets: Training losses to reach, descending.
        evaluate_every: Steps between evaluations, and so the resolution of "steps to target".
        data: Makes the data for a seed and a floating type.
        model: Makes the model for a seed and a floating type.
        losses: From the model's outputs and the targets to one loss per example, `(batch,)`.
        classifies: Whether outputs are logits of the targets' classes, so that accuracy makes
            sense.
    """

    name: str
    title: str
    loss_name: str
    batch_size: int
    targets: tuple[float, ...]
    evaluate_every: int
    data: Callable[[int, torch.dtype], data.Data]
    model: Callable[[int, torch.dtype], nn.Module]
    losses: Callable[[Tensor, Tensor], Tensor]
    classifies: bool = False


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error, summed over the features of each example.

    It is the negative log-likelihood of a Gaussian with unit variance, less its constant, so
    that its Fisher matrix is its Gauss-Newton matrix.

    Args:
        outputs: `(batch, features)`.
        targets: `(batch, features)`.

    Returns:
        `(batch,)`.
    """
    return 0.5 * (outputs - targets).square().flatten(1).sum(dim=1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each example, in nats.

    Args:
        outputs: Logits, `(batch, classes)`.
        targets: Classes, `(batch,)`.

    Returns:
        `(batch,)`.
    """
    return F.cross_entropy(outputs, targets, reduction="none")


def _reconstruction(seed: int, dtype: torch.dtype) -> data.Data:
    del seed  # every image is trained on, whatever the seed
    return data.digits_reconstruction(dtype)


_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="digits-autoencoder",
            title="Digits autoencoder",
            loss_name="training loss (half the squared error per image)",
            batch_size=500,
            targets=(0.3, 0.15),
            evaluate_every=5,
            data=_reconstruction,
            model=models.digits_autoencoder,
            losses=squared_error,
        ),
        Workload(
            name="digits-cnn",
            title="Digits CNN",
            loss_name="training loss (cross entropy per image, nats)",
            batch_size=128,
            targets=(0.1, 0.01),
            evaluate_every=5,
            data=data.digits_classification,
            model=models.digits_cnn,
            losses=cross_entropy,
            classifies=True,
        ),
    )
}


def names() -> tuple[str, ...]:
    """The names of all workloads."""
    return tuple(_WORKLOADS)


def workload(name: str) -> Workload:
    """Looks a workload up.

    Args:
        name: One of `names()`.

    Returns:
        The workload.

    Raises:
        ValueError: If there is none of that name; it lists those that there are.
    """
    try:
        return _WORKLOADS[name]
    except KeyError:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(_WORKLOADS)}") from None
