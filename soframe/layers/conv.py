"""Convolutions in one to three dimensions, and transposed ones, with all options of ``torch.nn``.

A patch is a row and an output location a position (KFC: Grosse and Martens, 2016, section 3). The
features of a patch are in the order kernel row, kernel column, channel, as in a channels_last
weight. A factor then has a block ``[channels, channels]`` for each pair of kernel positions, which
fast paths compute without materialising patches (`soframe.kernels`). Each group of a grouped
convolution is an independent sub-layer with its own factors.

The fast paths take images. A one-dimensional input is an image with one row. In three dimensions
the last axis is unfolded: its kernel positions become channels, its output positions more images.

A transposed convolution is a convolution of its inputs with zeros inserted between them (Dumoulin
and Visin, 2016, section 4), and has the rows of that convolution: the positions are locations of
the output. Its kernel is flipped; the axes of the inputs are flipped instead of the weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.kernels import devices, pointwise
from soframe.kernels.dispatch import PATHS, Path, choose
from soframe.kernels.geometry import Axis, Geometry, patch_means, patch_sums
from soframe.kernels.gram import add_bias, add_moment, new_sum
from soframe.kernels.unfold import patches, windows
from soframe.layers.base import BlockShape, Inputs, LayerHelper, Unit, widened
from soframe.registry import register


@register("layer", nn.Conv2d)
class Conv2dHelper(LayerHelper):
    """``nn.Conv2d``: any stride, padding (also ``"same"``), padding mode, dilation and groups.

    Attributes:
        path: The kernel for input factors, one of `soframe.kernels.dispatch.PATHS`; None for the
            choice of `soframe.kernels.dispatch.choose`. All compute the same factor. To set it for
            some layers, pass a subclass in ``Preconditioner(layers=...)``.
    """

    module: nn.modules.conv._ConvNd
    dimensions: ClassVar[int] = 2
    transposed: ClassVar[bool] = False
    path: ClassVar[Path | None] = None
    unit: ClassVar[Unit | None] = "sample"
    widens: ClassVar[bool] = True  # true of all paths that accelerators use
    _rowless = frozenset({"row_views", "input_key", "input_moment", "input_sum", "_weight_means"})

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if not isinstance(module, nn.modules.conv._ConvNd):  # a subclass's own key
            return f"{cls.__name__} serves convolutions, not {type(module).__name__}"
        if (len(module.kernel_size), module.transposed) != (cls.dimensions, cls.transposed):
            kind = "transposed convolutions" if module.transposed else "convolutions"
            return f"{kind} of {len(module.kernel_size)} dimension(s) have another geometry"
        return super().unsupported(module)

    @cached_property
    def groups(self) -> int:
        """The groups of the convolution."""
        return self.module.groups

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is not None:
            weight = weight.movedim(1, -1)  # a view if it is in channels_last
        return super().to_matrix(weight, bias)

    def _weight_of(self, matrix: Tensor) -> Tensor:
        assert self.weight is not None
        out, channels, *kernel = self.weight.shape
        return matrix.reshape(out, *kernel, channels).movedim(-1, 1)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """Return all patches: the plain twin of the fast paths."""
        x, geometry = self._image(inputs, inputs[0].dtype)
        return patches(x, geometry)

    def row_views(self, inputs: Inputs, output_rows: Tensor) -> Tensor | None:
        if self.weight is None:
            return None
        x, geometry = self._image(inputs, output_rows.dtype)
        return windows(x, geometry)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """Return a view, channels first or last."""
        g = self._batched(grad_output)
        groups, locations = self.module.groups, g.shape[2:].numel()
        g = g.reshape(g.shape[0], groups, g.shape[1] // groups, locations)
        return g.permute(1, 0, 3, 2)

    def input_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        if self.weight is None:
            return super().input_moment(inputs, output_rows, total, scale)
        x, geometry = self._image(inputs, output_rows.dtype)
        path = self.path or choose(geometry, torch.get_num_threads(), gpu=devices.on_gpu(x))
        if self.bias is None and path == "pointwise":
            return add_moment(total, pointwise.rows(x, geometry), scale)
        if total is None:
            total = new_sum(self.groups, self.shape.in_features, widened(output_rows), zero=True)
        weights = total
        if self.bias is not None:
            weights = total[:, :-1, :-1]
            sums = patch_sums(x.to(total.dtype), geometry)
            add_bias(total, sums, geometry.positions, scale)
        PATHS[path](weights, x, geometry, scale)
        return total

    def input_sum(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        # Without materialising patches.
        if self.weight is None:
            return super().input_sum(inputs, output_rows)
        x, geometry = self._image(inputs, output_rows.dtype)
        sums = patch_sums(x, geometry)
        if self.bias is None:
            return sums
        return torch.cat([sums, sums.new_full((len(sums), 1), geometry.positions)], dim=1)

    def _weight_means(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        x, geometry = self._image(inputs, output_rows.dtype)
        return patch_means(x, geometry)

    def input_key(self) -> Hashable:
        conv = self.module
        sizes = (conv.kernel_size, conv.stride, conv.dilation, conv.groups)
        padding = (conv.padding, conv.padding_mode, conv.output_padding)
        return type(self), self.weight is not None, self.bias is not None, sizes, padding

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.dim() == self.dimensions + 2 else x.unsqueeze(0)

    def _padded(self, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, list[Axis]]:
        """Apply padding other than zeros to the batch; return it and the geometry of its axes."""
        conv, x = self.module, self._batched(inputs[0])
        if x.dtype != dtype:
            x = x.to(dtype)
        around: list[tuple[int, int]] = []
        for axis in range(self.dimensions):
            before = after = 0
            if conv.padding == "same":
                # An odd total leaves the extra position at the end, as torch does.
                total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
                before, after = total // 2, total - total // 2
            elif conv.padding != "valid":
                before = after = int(conv.padding[axis])
            around.append((before, after))
        if conv.padding_mode != "zeros":
            x = F.pad(x, _last_first(around), mode=conv.padding_mode)
            around = list(itertools.repeat((0, 0), self.dimensions))
        axes: list[Axis] = []
        for axis, (before, after) in enumerate(around):
            size, kernel = x.shape[axis + 2], conv.kernel_size[axis]
            stride, dilation = conv.stride[axis], conv.dilation[axis]
            axes.append(Axis(size, kernel, stride, dilation, before, after))
        return x, axes

    def _image(self, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Geometry]:
        """Return the batch as images, and the geometry of their patches."""
        x, (rows, columns) = self._padded(inputs, dtype)
        return x, self._geometry(x.shape[0], 1, rows, columns)

    def _geometry(self, batch: int, unfolded: int, rows: Axis, columns: Axis) -> Geometry:
        conv = self.module
        channels = conv.in_channels // conv.groups * unfolded
        return Geometry(batch, conv.groups, channels, rows, columns)


@register("layer", nn.Conv1d)
class Conv1dHelper(Conv2dHelper):
    """``nn.Conv1d``: an image with one row."""

    dimensions: ClassVar[int] = 1

    def _image(self, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Geometry]:
        x, (axis,) = self._padded(inputs, dtype)
        return x.unsqueeze(2), self._geometry(len(x), 1, Axis(1, 1), axis)


@register("layer", nn.Conv3d)
class Conv3dHelper(Conv2dHelper):
    """``nn.Conv3d``: one image for each output position of the last axis."""

    dimensions: ClassVar[int] = 3
    _rowless = Conv2dHelper._rowless

    def input_rows(self, *inputs: Tensor) -> Tensor:
        rows = super().input_rows(*inputs)  # [groups, batch * last, the others, features]
        batch = len(self._batched(inputs[0]))
        by_sample: Tensor = rows.unflatten(1, (batch, -1))
        return by_sample.transpose(2, 3).flatten(2, 3)

    def _weight_means(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        of_images = super()._weight_means(inputs, output_rows)
        means: Tensor = of_images.unflatten(1, (output_rows.shape[1], -1)).mean(2)
        return means

    def _image(self, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Geometry]:
        x, (rows, columns, last) = self._padded(inputs, dtype)
        x = F.pad(x, (last.before, last.after))
        windows = x.unfold(4, last.reach + 1, last.stride)[..., :: last.dilation]
        windows = windows.unflatten(1, (self.groups, -1))
        # [batch, last, group, kernel position, channel, height, width]
        images = windows.permute(0, 5, 1, 6, 2, 3, 4).flatten(2, 4).flatten(0, 1)
        return images, self._geometry(len(images), last.kernel, rows, columns)


class _Transposed(Conv2dHelper):
    """The base class of transposed convolutions of all dimensions."""

    module: nn.modules.conv._ConvTransposeNd
    transposed: ClassVar[bool] = True
    _rowless = Conv2dHelper._rowless

    @cached_property
    def shape(self) -> BlockShape:
        """The shape of the matrix; the weight itself is ``[in, out / groups, kernel]``."""
        conv = self.module
        out, into = conv.out_channels // conv.groups, conv.weight.numel() // conv.out_channels
        return self._shape(conv.groups, out, into)

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        # A view of the weight if it has one group.
        if weight is not None:
            weight = weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return super().to_matrix(weight, bias)

    def _weight_of(self, matrix: Tensor) -> Tensor:
        # A copy if it has several groups.
        weight: Tensor = matrix.unflatten(2, (*self.module.kernel_size, -1))
        return weight.movedim(-1, 1).flatten(0, 1)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the input, and the output padding if the call has ``output_size``."""
        bound = self._signature.bind(*args, **kwargs).arguments
        x, size = bound["input"], bound.get("output_size")
        if size is None:
            return (x,)
        conv = self.module
        padding = conv._output_padding(
            input=x,
            output_size=list(size),
            stride=list(conv.stride),
            padding=list(map(int, conv.padding)),
            kernel_size=list(conv.kernel_size),
            num_spatial_dims=self.dimensions,
            dilation=list(conv.dilation),
        )
        return x, torch.tensor(padding, device="cpu")

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        # All samples have the same padding.
        return super().take_inputs(inputs[:1], index, unit) + inputs[1:]

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return super().input_rows(*inputs).flip(2)  # all axes are flipped

    def _padded(self, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, list[Axis]]:
        """Flip the inputs and insert the zeros of the stride; return them and their axes."""
        conv, x = self.module, self._batched(inputs[0].to(dtype))
        extra = inputs[1].tolist() if len(inputs) > 1 else conv.output_padding
        sizes = [stride * (n - 1) + 1 for n, stride in zip(x.shape[2:], conv.stride, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        places = spread
        for axis, stride in enumerate(conv.stride):
            places = places.unfold(axis + 2, 1, stride).squeeze(-1)
        places.copy_(x)
        axes: list[Axis] = []
        crop: list[tuple[int, int]] = []
        for axis, size in enumerate(sizes):
            reach = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            after = reach - int(conv.padding[axis])
            before = after + int(extra[axis])
            # Padding beyond the kernel's reach crops inputs.
            crop.append((min(before, 0), min(after, 0)))
            axes.append(
                Axis(
                    size + sum(crop[-1]),
                    conv.kernel_size[axis],
                    dilation=conv.dilation[axis],
                    before=max(before, 0),
                    after=max(after, 0),
                )
            )
        turned = spread.flip(tuple(range(2, x.dim())))
        if any(map(any, crop)):
            turned = F.pad(turned, _last_first(crop))
        return turned, axes


def _last_first(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the padding of each axis in the order of `F.pad`."""
    return list(itertools.chain.from_iterable(reversed(pairs)))


@register("layer", nn.ConvTranspose1d)
class ConvTranspose1dHelper(_Transposed, Conv1dHelper):
    """``nn.ConvTranspose1d``: stride, padding, output padding, dilation, groups."""


@register("layer", nn.ConvTranspose2d)
class ConvTranspose2dHelper(_Transposed):
    """``nn.ConvTranspose2d``: stride, padding, output padding, dilation, groups."""


@register("layer", nn.ConvTranspose3d)
class ConvTranspose3dHelper(_Transposed, Conv3dHelper):
    """``nn.ConvTranspose3d``: stride, padding, output padding, dilation, groups."""
