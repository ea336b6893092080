"""ViT-S on image folders, tar shards or CIFAR-10, with Muon.

Settings: Beyer et al., 2022 ("Better plain ViT baselines for ImageNet-1k"): ViT-S/16 with the mean
of all tokens in place of a class token, 90 epochs, batches of 1024, AdamW with rate 1e-3 and weight
decay 1e-4, half a cosine after 10,000 steps of warm-up. Their positions are fixed sines, here they
are learned; their RandAugment and mixup are left out, so do not expect their accuracy.

Muon's rate and momentum are those tuned on a ViT of 0.22 million parameters, where it is ahead of
soframe's default (docs/benchmarks/defaults.md); for ViT-S they are not tuned. ``--method
soap-normuon --lr 0.04`` is the call of `soframe.recommend`.

Run to its end small, on generated images (docs/benchmarks/recipes.md), not at its full size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soframe
from experiments.libraries import require
from experiments.recipes import common, resnet50
from experiments.recipes.common import Built, Common
from experiments.recipes.loaders import Cifar10
from experiments.recipes.resnet32 import metrics

__all__ = ["Settings", "data", "loss", "metrics", "model", "optimizer"]


@dataclass(frozen=True)
class Settings(Common):
    """ViT-S on images (run to its end smaller, on generated images)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 0.03, "adamw": 1e-3}

    data: Path = Path("data/imagenet")
    """Folder with `train` and `val`, as for resnet50; or of CIFAR-10's binary files, with
    `--side 32 --patch 4 --classes 10`."""
    output: Path = Path("runs/vit")
    epochs: int = 90
    """Passes through the training set (Beyer et al., 2022)."""
    batch_size: int = 1024
    """Images of a step (Beyer et al., 2022)."""
    method: str = "muon"
    """Method of soframe (docs/benchmarks/defaults.md)."""
    base: Literal["sgd", "adamw", "lamb"] | None = None
    strategy: str = "mem-opt"
    lr: float | None = None
    """Learning rate; None for 0.03 with soframe (docs/benchmarks/defaults.md) and 1e-3 with adamw
    (Beyer et al., 2022)."""
    momentum: float = 0.85
    """Momentum of Muon (docs/benchmarks/defaults.md), and of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of a step at the peak of the rate (Beyer et al., 2022)."""
    clip: float | None = 1.0
    """Bound on the norm of gradients, for first-order optimizers (Beyer et al., 2022)."""
    schedule: Literal["constant", "linear", "cosine", "root", "milestones"] = "cosine"
    warmup: float = 0.089
    """Fraction of the run in which the rate grows (Beyer et al., 2022: 10,000 of 112,590 steps)."""
    samples: int = 1_281_167
    """Training images, where they are tar shards."""
    side: int = 224
    """Side of the images."""
    patch: int = 16
    """Side of the patches."""
    classes: int = 1000
    """Classes."""
    width: int = 384
    """Width of the stream."""
    layers: int = 12
    """Layers."""
    heads: int = 6
    """Heads of the attention."""
    model_code: Literal["own", "timm"] = "own"
    """The model: torch's layers, or timm's `vit_small_patch16_224` (run for a few steps alone)."""


class ViT(nn.Module):
    """A vision transformer: `(batch, 3, side, side)` to logits, from the mean of all tokens.

    Args:
        settings: Its sizes.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, tokens = settings.width, (settings.side // settings.patch) ** 2
        self.patches = nn.Conv2d(3, width, settings.patch, stride=settings.patch)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, settings.heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
                )
                for _ in range(settings.layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, settings.classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.positions
        logits: Tensor = self.head(self.norm(self.layers(tokens)).mean(1))
        return logits


def model(settings: Settings) -> nn.Module:
    if settings.model_code == "timm":
        vit: nn.Module = require("timm").create_model(
            "vit_small_patch16_224", num_classes=settings.classes, img_size=settings.side
        )
        return vit
    return ViT(settings)


def data(settings: Settings) -> tuple[Any, Any]:
    if (settings.data / "test_batch.bin").exists():
        return Cifar10(settings.data, train=True), Cifar10(settings.data, train=False)
    sizes = (settings.side, settings.samples, settings.seed, settings.classes)
    return resnet50.images(settings.data, *sizes)


def loss(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(images), classes)


def optimizer(model: nn.Module, settings: Settings, **more: Any) -> Built:
    # Here and in torch the decay of a step is multiplied by the rate.
    settings = replace(settings, weight_decay=settings.weight_decay / settings.rate)
    if settings.optimizer == "soframe" and settings.method == "muon":
        more["method"] = soframe.methods.Muon(settings.momentum)
    return common.optimizer(model, settings, **more)
