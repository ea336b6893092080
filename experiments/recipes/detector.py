"""A one-stage detector of digits on canvases, with K-FAC in front of AdamW.

A small residual backbone, eight pixels to a cell, and three heads of 1 x 1, as in YOLO (Redmon et
al., 2016): whether a digit's centre is in the cell, the digit's box, and its class. The loss is the
sum of the three. The canvases also show halves of digits, which are no objects
(`experiments.canvases`). The figure is F1: a detection counts if its cell has the centre of a
digit, the class is right, and the boxes' intersection is at least half of their union.

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

from experiments.canvases import CLASSES, SIDE, Canvases, canvases
from experiments.recipes.common import OnCanvases
from soframe.planning.workloads import Residual, convolution

CELL = 8
"""Pixels of a cell's side."""
USUAL = 10.0
"""Pixels of the side of a usual box, of which sizes are multiples."""
OVERLAP = 0.5
"""The least intersection over union of a detection that counts."""


@dataclass(frozen=True)
class Settings(OnCanvases):
    """A small one-stage detector on canvases of digits (rates of `benchmarks.applications`)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 3e-2, "sgd": 3e-2, "adamw": 3e-2}

    output: Path = Path("runs/detector")
    batch_size: int = 32
    """Canvases of a step."""
    width: int = 16
    """Channels of the first stage; they double twice."""


class Detector(nn.Module):
    """From `(batch, 1, side, side)` to `(batch, 1 + 4 + classes, side / 8, side / 8)`.

    Channels are the logit of an object, the offset of its centre from the cell's in cells (across,
    down), the logarithms of its sides (width, height) over a usual one, and logits of classes.

    Args:
        width: Channels of the first stage.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(1, width, 3, 2), nn.ReLU())
        self.stages = nn.Sequential(
            Residual(width, [(2 * width, 3, 2), (2 * width, 3, 1)]),
            Residual(2 * width, [(4 * width, 3, 2), (4 * width, 3, 1)]),
        )
        self.objects = nn.Conv2d(4 * width, 1, 1)
        self.boxes = nn.Conv2d(4 * width, 4, 1)
        self.classes = nn.Conv2d(4 * width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images))
        heads = (self.objects, self.boxes, self.classes)
        return torch.cat([head(features) for head in heads], 1)


def model(settings: Settings) -> nn.Module:
    return Detector(settings.width)


def cells(shown: Canvases) -> tuple[Tensor, Tensor]:
    """Assign each digit to the cell of its box's centre.

    Returns:
        Classes of cells, `(canvases, cells)` from the left to the right and down, -1 without an
        object; and their boxes as `Detector` gives them, `(canvases, cells, 4)`.
    """
    count, across = len(shown.images), SIDE // CELL
    classes = torch.full((count, across * across), -1)
    boxes = torch.zeros(count, across * across, 4)
    left_top, right_bottom = shown.boxes.split(2, -1)
    centres, sides = (left_top + right_bottom) / 2, right_bottom - left_top  # [canvases, digits, 2]
    places = (centres / CELL).long()
    targets = torch.cat([centres / CELL - places - 0.5, (sides / USUAL).log()], -1)
    canvas, digit = (shown.classes >= 0).nonzero(as_tuple=True)
    cell = places[canvas, digit, 1] * across + places[canvas, digit, 0]
    classes[canvas, cell] = shown.classes[canvas, digit]
    boxes[canvas, cell] = targets[canvas, digit]
    return classes, boxes


def data(settings: Settings) -> tuple[TensorDataset, TensorDataset]:
    sets = []
    for count, held_out in ((settings.canvases, False), (settings.test_canvases, True)):
        shown = canvases(count, held_out=held_out)
        sets.append(TensorDataset(shown.images, *cells(shown)))
    train, test = sets
    return train, test


def _heads(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of objects `(batch, cells)`, boxes `(..., 4)` and logits of classes."""
    out = model(images).flatten(2).mT  # [batch, cells, channels]
    return out[..., 0], out[..., 1:5], out[..., 5:]


def loss(model: nn.Module, images: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
    """Return the sum of three losses, each summed over the cells of an image."""
    logits, predicted, scores = _heads(model, images)
    has_digit = (classes >= 0).to(logits.dtype)
    of_objects = F.binary_cross_entropy_with_logits(logits, has_digit, reduction="sum")
    distances = F.smooth_l1_loss(predicted, boxes, reduction="none").sum(-1)
    of_boxes = (distances * has_digit).sum()
    of_classes = F.cross_entropy(
        scores.flatten(0, 1), classes.flatten(), ignore_index=-1, reduction="sum"
    )
    return (of_objects + of_boxes + of_classes) / len(images)


def overlaps(boxes: Tensor, targets: Tensor) -> Tensor:
    """Return intersections over unions of boxes of the same cells, `(..., 4)` to `(...)`."""
    corners = []
    for box in (boxes, targets):
        centres, sides = box[..., :2] * CELL, box[..., 2:].exp() * USUAL
        corners.append((centres - sides / 2, centres + sides / 2))
    (left_top, right_bottom), (target_left_top, target_right_bottom) = corners
    shared = torch.minimum(right_bottom, target_right_bottom)
    shared = (shared - torch.maximum(left_top, target_left_top)).clamp(min=0).prod(-1)
    areas = (right_bottom - left_top).prod(-1) + (target_right_bottom - target_left_top).prod(-1)
    return shared / (areas - shared)


def metrics(model: nn.Module, images: Tensor, classes: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    logits, predicted, scores = _heads(model, images)
    detected, has_digit = logits > 0, classes >= 0
    is_right = (scores.argmax(-1) == classes) & (overlaps(predicted, boxes) >= OVERLAP)
    per_image = 1 / len(images)
    return {
        "correct": (detected & has_digit & is_right).sum() * per_image,
        "marked": (detected.sum() + has_digit.sum()) * per_image,
    }


def summary(means: Mapping[str, float]) -> dict[str, float]:
    return {"f1": 2 * means["correct"] / max(means["marked"], 1e-9)}
