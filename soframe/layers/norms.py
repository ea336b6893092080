"""Scales and shifts of normalisations: ``y = w x̂ + b``, feature by feature.

The normalised input ``x̂`` is recomputed from the input, so only the input is kept. Each feature is
a group with the gradient matrix ``[1, 2]`` (scale, shift): the curvature is block-diagonal, with a
2 x 2 block for each feature.

A batch norm in training mode mixes the samples of a batch. The statistics of the batch are treated
as constants here, so that its scale and shift are like any other normalisation's.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.layers.base import BlockShape, LayerHelper, Unit
from soframe.registry import KINDS


class NormHelper(LayerHelper):
    """The base class of normalisations.

    A subclass implements ``input_rows``, the normalised input in at least float32, and
    ``output_rows``, both ``[features, batch, positions, 1]``.
    """

    @cached_property
    def groups(self) -> int:
        """The number of features; each is an independent sub-layer."""
        assert self._full_weight is not None
        return self._full_weight.numel()

    @cached_property
    def shape(self) -> BlockShape:
        """The shape ``[features, 1, 1 or 2]``: a scale, a shift or both for each feature."""
        return BlockShape(self.groups, 1, (self.weight is not None) + (self.bias is not None))

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return super().to_matrix(None if weight is None else weight.flatten(), bias)


@KINDS["layer"].register_optional(nn.LayerNorm, "timm.layers.norm.LayerNorm")
class LayerNormHelper(NormHelper):
    """``nn.LayerNorm`` over the last dimensions of ``[batch, ...]``."""

    module: nn.LayerNorm
    unit: ClassVar[Unit | None] = "row"

    def input_rows(self, *inputs: Tensor) -> Tensor:
        module = self.module
        x = _wide(inputs[0])
        return self._rows(F.layer_norm(x, module.normalized_shape, eps=module.eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return self._rows(grad_output)

    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        (x,) = inputs
        if unit == "row":
            x = x.reshape(-1, *self._features)
        return (x[index],)

    @property
    def _features(self) -> torch.Size:
        assert self._full_weight is not None
        return self._full_weight.shape

    def _rows(self, x: Tensor) -> Tensor:
        leading = x.shape[: x.dim() - len(self._features)]
        batch = leading[0] if leading else 1
        shared = leading[1:].numel() if leading else 1
        return x.reshape(batch, shared, self.groups).permute(2, 0, 1).unsqueeze(3)


@KINDS["layer"].register_optional(nn.RMSNorm)
class RMSNormHelper(LayerNormHelper):
    """``nn.RMSNorm`` over the last dimensions of ``[batch, ...]``."""

    module: nn.RMSNorm  # type: ignore[assignment]  # has the same attributes

    def input_rows(self, *inputs: Tensor) -> Tensor:
        module = self.module
        x = _wide(inputs[0])
        shape = list(module.normalized_shape)
        return self._rows(F.rms_norm(x, shape, eps=module.eps))


@KINDS["layer"].register_optional(
    *(
        f"transformers.models.{name}.modeling_{name}.{kind}"
        for name, kind in {
            "granite": "GraniteRMSNorm",
            "llama": "LlamaRMSNorm",
            "mamba": "MambaRMSNorm",
            "mistral": "MistralRMSNorm",
            "mixtral": "MixtralRMSNorm",
            "olmo2": "Olmo2RMSNorm",
            "phi3": "Phi3RMSNorm",
            "qwen2": "Qwen2RMSNorm",
            "qwen2_moe": "Qwen2MoeRMSNorm",
            "qwen3": "Qwen3RMSNorm",
            "qwen3_moe": "Qwen3MoeRMSNorm",
            "t5": "T5LayerNorm",
        }.items()
    )
)
class LanguageModelRMSNormHelper(LayerNormHelper):
    """The RMS norms of language models in transformers.

    For any module ``y = w x / sqrt(mean(x^2) + variance_epsilon)`` over the last dimension.
    """

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if not isinstance(getattr(module, "variance_epsilon", None), float):
            return f"{cls.__name__} needs variance_epsilon, a number"
        return super().unsupported(module)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        x = _wide(inputs[0])
        epsilon = float(getattr(self.module, "variance_epsilon"))  # noqa: B009  # not typed by torch
        return self._rows(F.rms_norm(x, list(x.shape[-1:]), eps=epsilon))


@KINDS["layer"].register_optional(nn.GroupNorm)
class GroupNormHelper(NormHelper):
    """``nn.GroupNorm``: ``[N, channels, ...]``."""

    module: nn.GroupNorm
    unit: ClassVar[Unit | None] = "sample"

    def input_rows(self, *inputs: Tensor) -> Tensor:
        module = self.module
        return _channels(F.group_norm(_wide(inputs[0]), module.num_groups, eps=module.eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return _channels(grad_output)


@KINDS["layer"].register_optional(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormHelper(NormHelper):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` of ``[N, channels, ...]``, in training and eval mode.

    In training the loss of one sample depends on all samples, through the statistics of the batch.
    A sample's gradient is taken with constant statistics, ``g x̂`` for the scale and ``g`` for the
    shift; the sum over a batch is autograd's gradient. However, later batch norms have already
    mixed the samples in ``g``.

    A call cannot be split into samples, which would have other statistics.
    """

    module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        # The statistics of other ranks are not available.
        if isinstance(module, nn.SyncBatchNorm):
            return f"{cls.__name__} normalises with the statistics of one rank, not of all of them"
        return super().unsupported(module)

    def inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Tensor, ...]:
        """Return the input, with the running statistics in eval mode."""
        inputs = super().inputs(args, kwargs)
        module = self.module
        if module.training or module.running_mean is None or module.running_var is None:
            return inputs
        # Saved now: the mode may change before the backward pass.
        return (*inputs, module.running_mean, module.running_var)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        x, *running = inputs
        x = _wide(x)
        mean, variance = (r.to(x.dtype) for r in running) if running else (None, None)
        return _channels(F.batch_norm(x, mean, variance, training=not running, eps=self.module.eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return _channels(grad_output)


@KINDS["layer"].register_optional(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormHelper(BatchNormHelper):
    """``nn.InstanceNorm1d``, ``2d`` and ``3d`` with ``affine=True``, of ``[N, channels, ...]``."""

    module: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d  # type: ignore[assignment]
    unit: ClassVar[Unit | None] = "sample"

    def input_rows(self, *inputs: Tensor) -> Tensor:
        x, *running = inputs
        x = self._batched(_wide(x))
        mean, variance = (r.to(x.dtype) for r in running) if running else (None, None)
        eps = self.module.eps
        return _channels(F.instance_norm(x, mean, variance, use_input_stats=not running, eps=eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return _channels(self._batched(grad_output))

    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        # All samples have the same running statistics.
        return super().take_inputs(inputs[:1], index, unit) + inputs[1:]

    def _batched(self, x: Tensor) -> Tensor:
        """Add the batch dimension if the module was called with a single sample."""
        return x.unsqueeze(0) if x.dim() == self.module._get_no_batch_dim() else x


def _channels(x: Tensor) -> Tensor:
    """Return ``[N, channels, ...]`` as ``[channels, N, positions, 1]``."""
    return x.reshape(*x.shape[:2], x.shape[2:].numel()).transpose(0, 1).unsqueeze(3)


def _wide(x: Tensor) -> Tensor:
    """Convert an input to at least float32, the precision in which torch normalises."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
