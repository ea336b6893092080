"""Two-dimensional convolutions, with everything that ``nn.Conv2d`` accepts.

A patch is a row and an output location a position (KFC: Grosse and Martens, 2016, section 3), with
the features of a patch in the order of ``weight.flatten(1)``: channel, kernel row, kernel column.
Each group of a grouped convolution is a sub-layer of its own, with its own factors.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from soframe.layers.base import LayerHelper
from soframe.registry import register


@register("layer", nn.Conv2d)
class Conv2dHelper(LayerHelper):
    """``nn.Conv2d``: stride, padding in numbers or words, padding modes, dilation, groups."""

    module: nn.Conv2d

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """See `LayerHelper.unsupported`."""
        if getattr(module, "transposed", False):
            return "transposed convolutions have another geometry"
        return super().unsupported(module)

    @property
    def groups(self) -> int:
        """The groups of the convolution."""
        return self.module.groups

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """See `LayerHelper.input_rows`."""
        x = inputs[0] if inputs[0].dim() == 4 else inputs[0].unsqueeze(0)
        conv = self.module
        top, bottom, left, right = _padding(conv)
        padding = (top, left)
        if conv.padding_mode != "zeros":
            x = F.pad(x, (left, right, top, bottom), mode=conv.padding_mode)
            padding = (0, 0)
        elif (top, left) != (bottom, right):
            x = F.pad(x, (left, right, top, bottom))
            padding = (0, 0)
        patches = F.unfold(
            x,
            kernel_size=conv.kernel_size,
            dilation=conv.dilation,
            padding=padding,
            stride=conv.stride,
        )  # [batch, channels * kernel, positions]
        batch, features, positions = patches.shape
        patches = patches.view(batch, conv.groups, features // conv.groups, positions)
        return patches.permute(1, 0, 3, 2)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """See `LayerHelper.output_rows`."""
        g = grad_output if grad_output.dim() == 4 else grad_output.unsqueeze(0)
        groups = self.module.groups
        batch, channels, height, width = g.shape
        g = g.reshape(batch, groups, channels // groups, height * width)
        return g.permute(1, 0, 3, 2)


def _padding(conv: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return the padding as (top, bottom, left, right)."""
    if conv.padding == "valid":
        return (0, 0, 0, 0)
    if conv.padding == "same":
        # An odd total leaves the extra row or column at the end, as torch does.
        rows, columns = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
        return (rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)
    rows, columns = (int(p) for p in conv.padding)
    return (rows, rows, columns, columns)
