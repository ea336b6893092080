"""Workloads: a model, its data and loss, and the losses worth reaching.

A workload fixes everything that must be the same for every optimizer in a comparison.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import clutter, data, models
from experiments.data import Examples
from soframe.losses.base import Loss

PROBLEM = "problem:"
"""Prefix of the small problems' names."""
SIZED = "cluttered-digits:"
"""Prefix of the number of training images, where they are fewer than all."""


@dataclass(frozen=True)
class Task:
    """A workload with a seed.

    Attributes:
        model: The model.
        likelihood: The loss, as `soframe.TrustRegion` names it.
        loss: From the model and a batch of examples to their mean loss.
        train: Training examples.
        test: Held-out examples, or None.
    """

    model: nn.Module
    likelihood: str | Loss
    loss: Callable[..., Tensor]
    train: Examples
    test: Examples | None = None


@dataclass(frozen=True)
class Workload:
    """A training problem.

    Attributes:
        title: Its name in tables and plots.
        make: From a seed and a floating type to a task.
        batch_size: Examples per step, over all processes; None for all of them.
        targets: Losses to reach, descending.
        evaluate_every: Steps between evaluations, and so the resolution of "steps to target".
        loss_name: The measured quantity, in words.
        classifies: Whether outputs are logits of classes, so that accuracy is defined.
        whole: Whether "trust-region" takes all examples in each step: its quadratic model is then
            the objective's.
        scale: Reported losses are the mean loss times this.
        held_out: Whether reported losses are those on the held-out examples.
    """

    title: str
    make: Callable[[int, torch.dtype], Task]
    batch_size: int | None
    targets: tuple[float, ...] = ()
    evaluate_every: int = 5
    loss_name: str = "training loss"
    classifies: bool = False
    whole: bool = False
    scale: float = 1.0
    held_out: bool = False


def half_square(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared error, summed over features: a Gaussian of unit variance."""
    found: Tensor = (model(inputs) - targets).square().sum() / (2 * len(inputs))
    return found


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats; classes are the second dimension of the outputs."""
    return F.cross_entropy(model(inputs), targets)


def _autoencoder(seed: int, dtype: torch.dtype) -> Task:
    pixels = data.digits()[0].to(dtype)
    model = models.autoencoder(models.AUTOENCODER_WIDTHS, seed, dtype)
    return Task(model, "squared-error", half_square, (pixels, pixels))


def _curves(seed: int, dtype: torch.dtype) -> Task:
    images = data.curves().to(dtype)
    model = models.autoencoder(models.CURVES_WIDTHS, seed, dtype)
    return Task(model, "squared-error", half_square, (images, images))


def _cnn(seed: int, dtype: torch.dtype) -> Task:
    examples = data.classified_digits(seed, dtype)
    return Task(models.digits_cnn(seed, dtype), "cross-entropy", cross_entropy, *examples)


def _byte_gpt(seed: int, dtype: torch.dtype) -> Task:
    model, examples = models.byte_gpt(seed, dtype), data.standard_library()
    return Task(model, "cross-entropy", cross_entropy, *examples)


def _byte_llama(seed: int, dtype: torch.dtype) -> Task:
    model, examples = models.byte_llama(seed, dtype), data.scipy_sources()
    return Task(model, "cross-entropy", cross_entropy, *examples)


def _vit(seed: int, dtype: torch.dtype) -> Task:
    examples = clutter.cluttered_digits(10_000)
    return Task(models.vit(seed, dtype), "cross-entropy", cross_entropy, *examples)


def _cluttered(count: int, seed: int, dtype: torch.dtype) -> Task:
    held_out = min(clutter.HELD_OUT_IMAGES, max(1, count // 5))
    examples = clutter.cluttered_digits(count, held_out)
    return Task(models.resnet20_of_bytes(seed, dtype), "cross-entropy", cross_entropy, *examples)


def _cluttered_digits(count: int) -> Workload:
    return Workload(
        title=f"ResNet-20 on {count} cluttered digits",
        make=partial(_cluttered, count),
        batch_size=128,
        targets=(0.5,),
        evaluate_every=100,
        loss_name="loss on held-out digits (cross entropy per image, nats)",
        classifies=True,
        held_out=True,
    )


def _problem(name: str) -> Workload:
    make, title, batch_size = importlib.import_module("benchmarks.problems").PROBLEMS[name]

    def task(seed: int, dtype: torch.dtype) -> Task:
        with models.own_randomness():
            made: Task = make(seed)
        assert dtype == torch.float32, "the small problems have no other precision"
        return made

    return Workload(title, task, batch_size, whole=batch_size is None)


_WORKLOADS = {
    "digits-autoencoder": Workload(
        title="Digits autoencoder",
        make=_autoencoder,
        batch_size=500,
        targets=(0.3, 0.15),
        loss_name="training loss (half the squared error per image)",
        whole=True,
    ),
    "curves": Workload(
        title="CURVES autoencoder",
        make=_curves,
        batch_size=500,
        targets=(0.5, 0.4, 0.3),
        loss_name="training loss (squared error per image)",
        whole=True,
        scale=2.0,
    ),
    "byte-gpt": Workload(
        title="Byte-level GPT on Python's standard library",
        make=_byte_gpt,
        batch_size=8,
        targets=(2.5,),
        evaluate_every=20,
        loss_name="loss on held-out modules (cross entropy per byte, nats)",
        held_out=True,
    ),
    "byte-llama": Workload(
        title="Byte-level Llama on SciPy's sources",
        make=_byte_llama,
        batch_size=16,
        evaluate_every=20,
        loss_name="loss on held-out modules (cross entropy per byte, nats)",
        held_out=True,
    ),
    "cluttered-vit": Workload(
        title="ViT on 10,000 cluttered digits",
        make=_vit,
        batch_size=64,
        evaluate_every=20,
        loss_name="loss on held-out digits (cross entropy per image, nats)",
        classifies=True,
        held_out=True,
    ),
    "digits-cnn": Workload(
        title="Digits CNN",
        make=_cnn,
        batch_size=128,
        targets=(0.1, 0.01),
        loss_name="training loss (cross entropy per image, nats)",
        classifies=True,
    ),
    "cluttered-digits": _cluttered_digits(clutter.TRAINING_IMAGES),
}


def names() -> tuple[str, ...]:
    """Return the names of the workloads, without the small problems'."""
    return tuple(_WORKLOADS)


def workload(name: str) -> Workload:
    """Return a workload: one of `names()`, "cluttered-digits:10000", or "problem:" and its name.

    Raises:
        ValueError: If the name is unknown; the message lists the names.
    """
    prefix, colon, rest = name.partition(":")
    if prefix + colon == SIZED and rest.isdecimal() and int(rest) > 0:
        return _cluttered_digits(int(rest))
    if prefix + colon == PROBLEM:
        return _problem(rest)
    if name not in _WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(_WORKLOADS)}")
    return _WORKLOADS[name]
