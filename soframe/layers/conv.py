"""Two-dimensional convolutions, with everything that ``nn.Conv2d`` accepts.

A patch is a row and an output location a position (KFC: Grosse and Martens, 2016, section 3), with
the features of a patch in the order kernel row, kernel column, channel: that of a weight in
channels_last. A factor is then made of blocks of channels, one for each two kernel positions, which
fast paths compute without writing patches out (`soframe.kernels`). Each group of a grouped
convolution is a sub-layer of its own, with its own factors.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.kernels.dispatch import PATHS, Path, choose
from soframe.kernels.geometry import Axis, Geometry, patch_means, patch_sums
from soframe.kernels.gram import add_bias, zeros
from soframe.kernels.products import are_exact, has_primitives, prefers_onednn
from soframe.kernels.unfold import patches
from soframe.layers.base import LayerHelper, Unit
from soframe.registry import register


@register("layer", nn.Conv2d)
class Conv2dHelper(LayerHelper):
    """``nn.Conv2d``: stride, padding in numbers or words, padding modes, dilation, groups.

    Attributes:
        path: How factors of inputs are computed: one of `soframe.kernels.dispatch.PATHS`, or None
            for what `soframe.kernels.dispatch.choose` expects to be fastest. All give the same
            factor. To choose for some layers, name a subclass in ``Preconditioner(layers=...)``.
    """

    module: nn.Conv2d
    path: ClassVar[Path | None] = None
    unit: ClassVar[Unit | None] = "sample"

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """See `LayerHelper.unsupported`."""
        if not isinstance(module, nn.modules.conv._ConvNd):  # helpers of others may extend this one
            return f"{cls.__name__} serves convolutions, not {type(module).__name__}"
        if getattr(module, "transposed", False):
            return "transposed convolutions have another geometry"
        return super().unsupported(module)

    @property
    def groups(self) -> int:
        """The groups of the convolution."""
        return self.module.groups

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See `LayerHelper.to_matrix`; a view where the weight is in channels_last."""
        return super().to_matrix(weight if weight is None else weight.permute(0, 2, 3, 1), bias)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `LayerHelper.from_matrix`."""
        bias = None
        if self.bias is not None:
            bias = matrix[:, :, -1].reshape(self.bias.shape)
            matrix = matrix[:, :, :-1]
        if self.weight is None:
            return None, bias
        out, channels, *kernel = self.weight.shape
        return matrix.reshape(out, *kernel, channels).permute(0, 3, 1, 2), bias

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """See `LayerHelper.input_rows`: the plain way, which writes all patches out."""
        return patches(*self._padded(inputs[0]))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """See `LayerHelper.output_rows`: a view, channels first or last."""
        g = grad_output if grad_output.dim() == 4 else grad_output.unsqueeze(0)
        groups = self.module.groups
        batch, channels, height, width = g.shape
        g = g.reshape(batch, groups, channels // groups, height * width)
        return g.permute(1, 0, 3, 2)

    def input_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """See `LayerHelper.input_moment`."""
        if self.weight is None:
            return super().input_moment(inputs, output_rows, total, scale)
        if total is None:
            total = zeros(self.groups, self.shape.in_features, output_rows)
        x, geometry = self._padded(inputs[0].to(output_rows.dtype))
        weights = total
        if self.bias is not None:
            weights = total[:, :-1, :-1]
            add_bias(total, patch_sums(x, geometry), geometry.positions, scale)
        path = self.path or choose(
            geometry,
            torch.get_num_threads(),
            has_primitives(x),
            prefers_onednn(),
            are_exact(x),
            x.is_contiguous(),
        )
        PATHS[path](weights, x, geometry, scale)
        return total

    def _weight_means(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor:
        return patch_means(*self._padded(inputs[0].to(output_rows.dtype)))

    def input_key(self) -> Hashable:
        """See `LayerHelper.input_key`."""
        conv = self.module
        where = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode)
        return type(self), self.weight is not None, self.bias is not None, conv.groups, *where

    def _padded(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """Return a batch with all padding that is not zeros, and the geometry that is left."""
        conv = self.module
        x = x if x.dim() == 4 else x.unsqueeze(0)
        top, bottom, left, right = _padding(conv)
        if conv.padding_mode != "zeros":
            x = F.pad(x, (left, right, top, bottom), mode=conv.padding_mode)
            top = bottom = left = right = 0
        numbers = zip(x.shape[2:], conv.kernel_size, conv.stride, conv.dilation, strict=True)
        height, width = numbers
        geometry = Geometry(
            x.shape[0],
            conv.groups,
            conv.in_channels // conv.groups,
            Axis(*height, top, bottom),
            Axis(*width, left, right),
        )
        return x, geometry


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
