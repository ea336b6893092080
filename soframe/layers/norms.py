"""Scales and shifts of normalisations: ``y = w x̂ + b``, feature by feature.

The normalised input ``x̂`` is computed again from the input, so that nothing is kept besides what
the module was called with. Each feature is a group of its own, with the gradient matrix ``[1, 2]``
(scale, shift): its curvature is 2 x 2, and that of the whole module the diagonal of these blocks.

A batch norm in training mode mixes the samples of a batch. With the statistics of the batch given,
its scale and shift are those of any other normalisation, and so they are treated here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.kernels.gram import add_bias, zeros
from soframe.layers.base import BlockShape, LayerHelper, Unit
from soframe.registry import KINDS

__all__ = ["BatchNormHelper", "GroupNormHelper", "LayerNormHelper", "NormHelper", "RMSNormHelper"]


class NormHelper(LayerHelper):
    """A normalisation: a subclass says how to normalise, and where the features are."""

    @property
    def groups(self) -> int:
        """The number of features, each of which is a sub-layer of its own."""
        assert self._full_weight is not None
        return self._full_weight.numel()

    @property
    def shape(self) -> BlockShape:
        """See `LayerHelper.shape`: a scale, a shift or both for each feature."""
        return BlockShape(self.groups, 1, (self.weight is not None) + (self.bias is not None))

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See `LayerHelper.to_matrix`."""
        return super().to_matrix(None if weight is None else weight.flatten(), bias)

    def input_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """See `LayerHelper.input_moment`: sums of squares, with no tensor besides the rows."""
        if self.weight is None:
            return super().input_moment(inputs, output_rows, total, scale)
        rows = self._weight_rows(inputs, output_rows)
        if total is None:
            total = zeros(self.groups, self.shape.in_features, output_rows)
        if self.bias is not None:
            count = rows.shape[1] * rows.shape[2]
            add_bias(total, rows.sum((1, 2)), count, scale)
        # In place: a normalised input is a new tensor, and nobody else's.
        total[:, 0, 0].add_(rows.square_().sum((1, 2, 3)), alpha=scale)
        return total


@KINDS["layer"].register_optional(nn.LayerNorm)
class LayerNormHelper(NormHelper):
    """``nn.LayerNorm`` over the last dimensions; the first one is the batch."""

    module: nn.LayerNorm
    unit: ClassVar[Unit | None] = "row"

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """See `LayerHelper.input_rows`: the normalised input, in float32 at least."""
        module = self.module
        x = _wide(inputs[0])
        return self._rows(F.layer_norm(x, module.normalized_shape, eps=module.eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """See `LayerHelper.output_rows`."""
        return self._rows(grad_output)

    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        """See `LayerHelper.take_inputs`."""
        (x,) = inputs
        if unit == "row":
            x = x.reshape(-1, *self.module.normalized_shape)
        return (x[index],)

    def _rows(self, x: Tensor) -> Tensor:
        leading = x.shape[: x.dim() - len(self.module.normalized_shape)]
        batch = leading[0] if leading else 1
        shared = leading[1:].numel() if leading else 1
        return x.reshape(batch, shared, self.groups).permute(2, 0, 1).unsqueeze(3)


@KINDS["layer"].register_optional(nn.RMSNorm)
class RMSNormHelper(LayerNormHelper):
    """``nn.RMSNorm`` over the last dimensions; the first one is the batch."""

    module: nn.RMSNorm  # type: ignore[assignment]  # it has what is asked of a LayerNorm

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """See `LayerHelper.input_rows`: the normalised input, in float32 at least."""
        module = self.module
        x = _wide(inputs[0])
        shape = list(module.normalized_shape)
        return self._rows(F.rms_norm(x, shape, eps=module.eps))


@KINDS["layer"].register_optional(nn.GroupNorm)
class GroupNormHelper(NormHelper):
    """``nn.GroupNorm``: ``[N, channels, ...]``."""

    module: nn.GroupNorm
    unit: ClassVar[Unit | None] = "sample"

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """See `LayerHelper.input_rows`: the normalised input, in float32 at least."""
        module = self.module
        return _channels(F.group_norm(_wide(inputs[0]), module.num_groups, eps=module.eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """See `LayerHelper.output_rows`."""
        return _channels(grad_output)


@KINDS["layer"].register_optional(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormHelper(NormHelper):
    """``nn.BatchNorm1d``, ``2d`` and ``3d``: ``[N, channels, ...]``, in either mode.

    No sample can be taken of a batch by itself: it would have other statistics.
    """

    module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """See `LayerHelper.unsupported`: statistics of other ranks cannot be seen."""
        if isinstance(module, nn.SyncBatchNorm):
            return f"{cls.__name__} normalises with the statistics of one rank, not of all of them"
        return super().unsupported(module)

    def inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Tensor, ...]:
        """See `LayerHelper.inputs`: with the running statistics, if these were used."""
        inputs = super().inputs(args, kwargs)
        module = self.module
        if module.training or module.running_mean is None or module.running_var is None:
            return inputs
        # As they were in this call, whatever the mode is when the gradient arrives.
        return (*inputs, module.running_mean, module.running_var)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """See `LayerHelper.input_rows`: the normalised input, in float32 at least."""
        x, *running = inputs
        x = _wide(x)
        mean, variance = (r.to(x.dtype) for r in running) if running else (None, None)
        return _channels(F.batch_norm(x, mean, variance, training=not running, eps=self.module.eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """See `LayerHelper.output_rows`."""
        return _channels(grad_output)


def _channels(x: Tensor) -> Tensor:
    """Return ``[N, channels, ...]`` as ``[channels, N, positions, 1]``."""
    return x.reshape(*x.shape[:2], x.shape[2:].numel()).transpose(0, 1).unsqueeze(3)


def _wide(x: Tensor) -> Tensor:
    """Return an input in the precision in which torch normalises it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
