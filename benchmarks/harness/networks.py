"""Networks whose steps are timed; nothing is learned with them.

ResNets as published (He et al., 2016: the bottleneck form for ImageNet, section 4.2's for CIFAR,
which `soframe.experiments.resnet` has).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.experiments.gpt import BYTES, ByteGPT
from soframe.experiments.resnet import Residual, convolution, resnet20


def resnet18() -> nn.Module:
    """ResNet-18 as it is used for images of 32 x 32, nothing pooled: 11.2 million parameters."""
    layers: list[nn.Module] = [convolution(3, 64, 3, 1), nn.ReLU()]
    channels = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            layers.append(Residual(channels, [(width, 3, width // channels), (width, 3, 1)]))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def resnet50() -> nn.Module:
    """ResNet-50 for images of 224 x 224: 25.6 million parameters."""
    layers = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            stride = 2 if index == 0 and width > 64 else 1
            sizes = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
            layers.append(Residual(channels, sizes))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def bert_large_layer() -> nn.Module:
    """The six linear layers of one encoder layer of BERT-Large, one behind the other."""
    shapes = [(1024, 1024)] * 4 + [(1024, 4096), (4096, 1024)]
    layers: list[nn.Module] = []
    for into, out in shapes:
        layers += [nn.Linear(into, out), nn.GELU()]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Network:
    """A network and one batch.

    Attributes:
        title: What tables call it.
        model: Makes it.
        batch: Makes inputs and targets.
        loss: Of outputs and targets.
        images: Whether inputs are images, so that ``channels_last`` has a meaning.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    images: bool = False


def _images(batch: int, side: int, classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)))


NETWORKS = {
    "resnet20": Network(
        "ResNet-20, 64 x 32 x 32", resnet20, _images(64, 32, 10), F.cross_entropy, images=True
    ),
    "resnet18": Network(
        "ResNet-18, 128 x 32 x 32", resnet18, _images(128, 32, 10), F.cross_entropy, images=True
    ),
    "resnet50": Network(
        "ResNet-50, 4 x 224 x 224", resnet50, _images(4, 224, 1000), F.cross_entropy, images=True
    ),
    "gpt": Network(
        "GPT, d = 256, 4 layers, 16 x 128 tokens",
        lambda: ByteGPT(width=256, layers=4, heads=4, context=128),
        lambda: (torch.randint(BYTES, (16, 128)), torch.randint(BYTES, (16, 128))),
        F.cross_entropy,
    ),
    "bert-large-layer": Network(
        "one layer of BERT-Large, 64 tokens",
        bert_large_layer,
        lambda: (torch.randn(64, 1024), torch.randn(64, 1024)),
        F.mse_loss,
    ),
}
