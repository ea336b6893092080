"""What is trained: data, a model, a loss, and the training losses worth reaching.

A workload fixes everything that must be the same for every optimizer in a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.experiments import clutter, corpus, data, gpt, models, resnet, synthetic


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
        likelihood: What `soframe.TrustRegion` calls the mean of these losses.
        classifies: Whether outputs are logits of the targets' classes, so that accuracy makes
            sense.
        full_batch: Examples per step of "trust-region", where that is all of them: its quadratic
            model is then the objective's.
        scale: Reported losses are the mean of `losses` times this.
        held_out: Whether reported losses are those on the test set.
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
    likelihood: str
    classifies: bool = False
    full_batch: int | None = None
    scale: float = 1.0
    held_out: bool = False


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
    return 0.5 * F.mse_loss(outputs, targets, reduction="none").flatten(1).sum(dim=1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each example, in nats.

    Args:
        outputs: Logits, `(batch, classes)`.
        targets: Classes, `(batch,)`.

    Returns:
        `(batch,)`.
    """
    return F.cross_entropy(outputs, targets, reduction="none")


def mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each sequence, in nats, as a mean over its positions.

    Args:
        outputs: Logits, `(batch, classes, positions)`.
        targets: Classes, `(batch, positions)`.

    Returns:
        `(batch,)`.
    """
    return F.cross_entropy(outputs, targets, reduction="none").mean(dim=1)


def _curves(seed: int, dtype: torch.dtype) -> data.Data:
    del seed  # the images are part of the problem, not of a run
    return synthetic.curves(dtype)


def _standard_library(seed: int, dtype: torch.dtype) -> data.Data:
    del seed, dtype  # bytes
    return corpus.standard_library()


def _reconstruction(seed: int, dtype: torch.dtype) -> data.Data:
    del seed  # every image is trained on, whatever the seed
    return data.digits_reconstruction(dtype)


def _cluttered_digits(count: int) -> Workload:
    """So many training images, and 2000 held-out ones, or at most a fifth as many."""

    def images(seed: int, dtype: torch.dtype) -> data.Data:
        del seed, dtype  # the images are part of the problem, and bytes
        return clutter.cluttered_digits(count, min(clutter.HELD_OUT_IMAGES, max(1, count // 5)))

    whole = count == clutter.TRAINING_IMAGES
    return Workload(
        name="cluttered-digits" if whole else f"cluttered-digits:{count}",
        title=f"ResNet-20 on {count} cluttered digits",
        loss_name="loss on held-out digits (cross entropy per image, nats)",
        batch_size=128,
        targets=(0.5,),
        evaluate_every=100,
        data=images,
        model=resnet.resnet20_of_bytes,
        losses=cross_entropy,
        likelihood="cross-entropy",
        classifies=True,
        held_out=True,
    )


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
            likelihood="squared-error",
            full_batch=1797,
        ),
        Workload(
            name="curves",
            title="CURVES autoencoder",
            loss_name="training loss (squared error per image)",
            batch_size=500,
            targets=(0.5, 0.4, 0.3),
            evaluate_every=5,
            data=_curves,
            model=models.curves_autoencoder,
            losses=squared_error,
            likelihood="squared-error",
            full_batch=2000,
            scale=2.0,
        ),
        Workload(
            name="byte-gpt",
            title="Byte-level GPT on Python's standard library",
            loss_name="loss on held-out modules (cross entropy per byte, nats)",
            batch_size=8,
            targets=(2.5,),
            evaluate_every=20,
            data=_standard_library,
            model=gpt.byte_gpt,
            losses=mean_cross_entropy,
            likelihood="cross-entropy",
            held_out=True,
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
            likelihood="cross-entropy",
            classifies=True,
        ),
        _cluttered_digits(clutter.TRAINING_IMAGES),
    )
}

#: Workloads of any size: "name:size" is one with so many training examples.
_SIZED: Mapping[str, Callable[[int], Workload]] = {"cluttered-digits": _cluttered_digits}


def names() -> tuple[str, ...]:
    """The names of all workloads."""
    return tuple(_WORKLOADS)


def workload(name: str) -> Workload:
    """Looks a workload up.

    Args:
        name: One of `names()`; for generated data perhaps with a colon and the number of training
            examples, as in ``"cluttered-digits:10000"``.

    Returns:
        The workload.

    Raises:
        ValueError: If there is none of that name; it lists those that there are.
    """
    base, colon, size = name.partition(":")
    if colon and base in _SIZED and size.isdecimal() and int(size) > 0:
        return _SIZED[base](int(size))
    try:
        return _WORKLOADS[name]
    except KeyError:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(_WORKLOADS)}") from None
