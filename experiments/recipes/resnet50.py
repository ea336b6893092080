"""ResNet-50 on ImageNet, with K-FAC in front of SGD as in KAISA.

Settings: kfac-pytorch's ``examples/torch_imagenet_resnet.py`` at commit 869cf110, at the batch of
64 GPUs, 2048 images (Pauloski et al., SC 2021). Solver, clip and split of the damping are soframe's
defaults, as for `experiments.recipes.resnet32`. With ``--optimizer sgd`` the settings of Goyal et
al., 2017, are ``--epochs 90 --milestones 30 60 80 --weight-decay 1e-4 --warmup 0.056``.

Run for a few steps on generated JPEG folders and tar shards; not run to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.libraries import require
from experiments.recipes.common import Common
from experiments.recipes.loaders import CentreCrop, ImageFolder, RandomCrop, TarShards
from experiments.recipes.resnet32 import metrics
from soframe.planning.workloads import Residual, convolution

__all__ = ["Settings", "data", "loss", "metrics", "model"]

SMOOTHING = 0.1
"""Label smoothing in training (kfac-pytorch)."""


@dataclass(frozen=True)
class Settings(Common):
    """ResNet-50 on ImageNet (not run to its end)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 0.8, "sgd": 0.8}

    data: Path = Path("data/imagenet")
    """Folder with `train` and `val`: folders of classes with images, or tar shards."""
    output: Path = Path("runs/resnet50")
    epochs: int = 55
    """Passes through the training set (kfac-pytorch: 55)."""
    batch_size: int = 2048
    """Images of a step (kfac-pytorch: 32 for each GPU; KAISA: 64 GPUs)."""
    lr: float | None = None
    """Learning rate; None for 0.8 (kfac-pytorch: 0.0125 for each 32 images of a batch)."""
    momentum: float = 0.9
    """Momentum of SGD (kfac-pytorch)."""
    weight_decay: float = 5e-5
    """Weight decay (kfac-pytorch)."""
    schedule: Literal["constant", "linear", "cosine", "root", "milestones"] = "milestones"
    milestones: tuple[int, ...] = (25, 35, 40, 45, 50)
    """Epochs at which the rate is divided by ten (kfac-pytorch)."""
    warmup: float = 5 / 55
    """Fraction of the run in which the rate grows (kfac-pytorch: 5 of 55 epochs)."""
    damping: float | None = 1e-3
    """Damping (kfac-pytorch)."""
    kl_clip: float | None = 1e-3
    """Bound of the KL clip (kfac-pytorch)."""
    statistics_every: int | None = 10
    """Steps between statistics (kfac-pytorch: 10)."""
    solve_every: int | None = 100
    """Steps between solves (kfac-pytorch: 100)."""
    samples: int = 1_281_167
    """Training images, where they are tar shards."""
    side: int = 224
    """Side of the images."""
    classes: int = 1000
    """Classes."""
    width: int = 64
    """Channels of the first stage."""
    layers: tuple[int, ...] = (3, 4, 6, 3)
    """Bottlenecks of each stage."""
    model_code: Literal["own", "timm"] = "own"
    """The model: soframe's, or timm's `resnet50` (run for a few steps alone)."""


def model(settings: Settings) -> nn.Module:
    if settings.model_code == "timm":
        resnet: nn.Module = require("timm").create_model("resnet50", num_classes=settings.classes)
        return resnet
    channels = settings.width
    layers = [convolution(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    for stage, count in enumerate(settings.layers):
        width = settings.width * 2**stage
        for index in range(count):
            stride = 2 if index == 0 and stage > 0 else 1
            layers.append(
                Residual(channels, [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)])
            )
            channels = 4 * width
    head = nn.Linear(channels, settings.classes)
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return body


def images(folder: Path, side: int, samples: int, seed: int, classes: int) -> tuple[Any, Any]:
    """Return the training and the test images of a folder with `train` and `val`.

    Raises:
        FileNotFoundError: If one of them is missing.
        ValueError: If they do not have the same classes, or too many.
    """
    train, test = folder / "train", folder / "val"
    random, centre = RandomCrop(side), CentreCrop(side)
    if any(train.glob("*.tar")):
        return TarShards(train, random, samples, seed), TarShards(test, centre, samples)
    folders = ImageFolder(train, random), ImageFolder(test, centre)
    for where, part in zip((train, test), folders, strict=True):
        if part.classes != folders[0].classes or len(part.classes) > classes:
            raise ValueError(
                f"{where} has {len(part.classes)} classes: `train` and `val` need the same "
                f"folders, at most {classes} (ImageNet's validation images have to be moved into "
                f"folders)"
            )
    return folders


def data(settings: Settings) -> tuple[Any, Any]:
    sizes = (settings.side, settings.samples, settings.seed, settings.classes)
    return images(settings.data, *sizes)


def loss(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    smoothing = SMOOTHING if model.training else 0.0
    return F.cross_entropy(model(images), classes, label_smoothing=smoothing)
