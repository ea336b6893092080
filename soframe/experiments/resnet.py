"""ResNet-20 for images of 32 x 32 (He et al., 2016, section 4.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.experiments.models import own_randomness

WIDTHS = (16, 32, 64)
BLOCKS = 3
"""Of each width."""


class Scaled(nn.Module):
    """Maps images of bytes to numbers around zero, of the model's floating type.

    It also lays them out channels last, as the convolutions' weights are: on many processors that
    is a quarter faster.
    """

    middle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.tensor(127.5), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Maps `(batch, channels, height, width)`, 0 to 255, to the same, -2 to 2."""
        scaled: Tensor = (images.to(self.middle.dtype) - self.middle) / 64.0
        return scaled.contiguous(memory_format=torch.channels_last)


class Residual(nn.Module):
    """Convolutions with batch norm, and a shortcut around them.

    Args:
        channels: Of the input.
        layers: For each convolution its output channels, kernel size and stride.
    """

    def __init__(self, channels: int, layers: list[tuple[int, int, int]]) -> None:
        super().__init__()
        convolutions, into = [], channels
        for out, kernel, stride in layers:
            convolutions.append(convolution(into, out, kernel, stride))
            into = out
        self.convolutions = nn.ModuleList(convolutions)
        stride = max(stride for _, _, stride in layers)
        self.shortcut = (
            nn.Identity()
            if into == channels and stride == 1
            else convolution(channels, into, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to images."""
        out = x
        for index, layer in enumerate(self.convolutions):
            out = layer(out if index == 0 else out.relu())
        result: Tensor = F.relu(out + self.shortcut(x))
        return result


def convolution(channels: int, out: int, kernel: int, stride: int) -> nn.Sequential:
    """Make a convolution and its batch norm.

    Args:
        channels: Of the input.
        out: Of the output.
        kernel: The side of the kernel, odd; the image is padded by half of it.
        stride: Of the convolution.

    Returns:
        The two, one behind the other.
    """
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


def resnet20() -> nn.Sequential:
    """ResNet-20 from `(batch, 3, 32, 32)` to `(batch, 10)`: 0.27 million parameters."""
    layers: list[nn.Module] = [convolution(3, WIDTHS[0], 3, 1), nn.ReLU()]
    channels = WIDTHS[0]
    for width in WIDTHS:
        for _ in range(BLOCKS):
            layers.append(Residual(channels, [(width, 3, width // channels), (width, 3, 1)]))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def resnet20_of_bytes(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """ResNet-20 behind `Scaled`, channels last, initialised as published.

    Args:
        seed: Of the initial weights: normal, of the deviation for ReLU (He et al., 2015), from
            each convolution's outputs.
        dtype: The floating type of the parameters.

    Returns:
        A model from `(batch, 3, 32, 32)`, uint8, to `(batch, 10)`.
    """
    with own_randomness():
        torch.manual_seed(seed)
        model = nn.Sequential(Scaled(), *resnet20())
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    # torch's stubs leave out a call with a memory format.
    return model.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
