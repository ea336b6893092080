"""A U-Net that segments digits on canvases, with K-FAC in front of AdamW.

Model: Ronneberger et al., 2015, with batch norm and padded convolutions, small: two halvings, and
transposed convolutions on the way up. It marks the pixels of digits on canvases that show halves
of digits too, which are background (`experiments.canvases`). The figure is the Dice coefficient of
all held-out canvases.

Run to its end on a CPU (docs/benchmarks/applications.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.canvases import canvases
from experiments.recipes.common import OnCanvases


@dataclass(frozen=True)
class Settings(OnCanvases):
    """A small U-Net on canvases of digits (rates of `benchmarks.applications`)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 3e-2, "sgd": 0.3, "adamw": 3e-2}

    output: Path = Path("runs/unet")
    batch_size: int = 16
    """Canvases of a step."""
    rows: float = 0.25
    """Part of the canvases of a batch that enter the statistics."""
    width: int = 8
    """Channels at the full resolution; they double with each halving."""


class Pair(nn.Sequential):
    """Two convolutions of 3 x 3, each with batch norm and ReLU.

    Args:
        into: Channels of the input.
        out: Channels of the output.
    """

    def __init__(self, into: int, out: int) -> None:
        layers: list[nn.Module] = []
        for channels in (into, out):
            convolution = nn.Conv2d(channels, out, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(out), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """From `(batch, 1, side, side)` to logits of the same shape; 4 divides the side.

    Args:
        width: Channels at the full resolution.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.high = Pair(1, width)
        self.middle = Pair(width, 2 * width)
        self.low = Pair(2 * width, 4 * width)
        self.up_to_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.middle_again = Pair(4 * width, 2 * width)
        self.up_to_high = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.high_again = Pair(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        high = self.high(images)
        middle = self.middle(F.max_pool2d(high, 2))
        low = self.low(F.max_pool2d(middle, 2))
        joined = torch.cat([middle, self.up_to_middle(low)], 1)
        joined = torch.cat([high, self.up_to_high(self.middle_again(joined))], 1)
        logits: Tensor = self.head(self.high_again(joined))
        return logits


def model(settings: Settings) -> nn.Module:
    return UNet(settings.width)


def data(settings: Settings) -> tuple[TensorDataset, TensorDataset]:
    sets = []
    for count, held_out in ((settings.canvases, False), (settings.test_canvases, True)):
        shown = canvases(count, held_out=held_out)
        sets.append(TensorDataset(shown.images, (shown.masks > 0).float()))
    train, test = sets
    return train, test


def loss(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    """Return the mean cross entropy of pixels, in nats, and one minus the soft Dice coefficient."""
    logits: Tensor = model(images).squeeze(1)
    chances = logits.sigmoid()
    dice = 2 * (chances * masks).sum() / (chances.sum() + masks.sum())
    return F.binary_cross_entropy_with_logits(logits, masks) + 1 - dice


def metrics(model: nn.Module, images: Tensor, masks: Tensor) -> dict[str, Tensor]:
    marked = (model(images).squeeze(1) > 0).float()
    per_image = 1 / len(images)
    return {
        "correct": (marked * masks).sum() * per_image,
        "marked": (marked.sum() + masks.sum()) * per_image,
    }


def summary(means: Mapping[str, float]) -> dict[str, float]:
    return {"dice": 2 * means["correct"] / max(means["marked"], 1e-9)}
