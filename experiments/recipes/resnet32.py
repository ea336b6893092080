"""ResNet-32 on CIFAR-10, with K-FAC in front of SGD as in KAISA's predecessor.

Model: He et al., 2016, section 4.2 (0.46 million parameters). Settings: kfac-pytorch's
``examples/torch_cifar10_resnet.py`` at commit 869cf110 (Pauloski et al., SC 2020). Two things
differ: the damping is split between the factors and a clipped step follows the schedule, which are
soframe's defaults; kfac-pytorch solves by eigenvectors.

Run to its end as a ResNet-20 on generated images in CIFAR-10's format (docs/benchmarks/recipes.md;
longer, with these clips and damping: docs/benchmarks/kaisa.md), not on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.recipes.common import Common
from experiments.recipes.loaders import Cifar10
from soframe.planning.workloads import Residual, convolution


@dataclass(frozen=True)
class Settings(Common):
    """ResNet-32 on CIFAR-10 (run to its end smaller, on generated images)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 0.1, "sgd": 0.1}

    data: Path = Path("data/cifar-10-batches-bin")
    """Folder of CIFAR-10's binary files."""
    output: Path = Path("runs/resnet32")
    epochs: int = 100
    """Passes through the training set (kfac-pytorch: 100)."""
    batch_size: int = 128
    """Images of a step (kfac-pytorch: 128 for each GPU)."""
    lr: float | None = None
    """Learning rate; None for 0.1 (kfac-pytorch: 0.1 for each 128 images of a batch)."""
    momentum: float = 0.9
    """Momentum of SGD (kfac-pytorch)."""
    weight_decay: float = 5e-4
    """Weight decay (kfac-pytorch)."""
    schedule: Literal["constant", "linear", "cosine", "root", "milestones"] = "milestones"
    milestones: tuple[int, ...] = (35, 75, 90)
    """Epochs at which the rate is divided by ten (kfac-pytorch)."""
    warmup: float = 0.05
    """Fraction of the run in which the rate grows (kfac-pytorch: 5 of 100 epochs)."""
    damping: float | None = 3e-3
    """Damping (kfac-pytorch)."""
    kl_clip: float | None = 1e-3
    """Bound of the KL clip (kfac-pytorch)."""
    statistics_every: int | None = 1
    """Steps between statistics (kfac-pytorch: 1)."""
    solve_every: int | None = 10
    """Steps between solves (kfac-pytorch: 10)."""
    width: int = 16
    """Channels of the first stage; they double twice."""
    layers: int = 5
    """Blocks of two convolutions in each of three stages: 5 make ResNet-32."""


def model(settings: Settings) -> nn.Module:
    width = channels = settings.width
    layers: list[nn.Module] = [convolution(3, width, 3, 1), nn.ReLU()]
    for out in (width, 2 * width, 4 * width):
        for _ in range(settings.layers):
            layers.append(Residual(channels, [(out, 3, out // channels), (out, 3, 1)]))
            channels = out
    head = nn.Linear(channels, 10)
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for module in body.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return body


def data(settings: Settings) -> tuple[Cifar10, Cifar10]:
    return Cifar10(settings.data, train=True), Cifar10(settings.data, train=False)


def loss(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(images), classes)


def metrics(model: nn.Module, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (model(images).argmax(dim=1) == classes).float().mean()}
