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

from soframe.layers.base import BlockShape, Inputs, LayerHelper, Unit
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
        return self._shape(self.groups, 1, 1)

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is not None:
            weight = weight.flatten()
        return super().to_matrix(weight, bias)


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

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        (x,) = inputs
        if unit == "row":
            x = x.reshape(-1, *self._features)
        return (x[index],)

    @property
    def _features(self) -> torch.Size:
        assert self._full_weight is not None
        return self._full_weight.shape

    def _rows(self, x: Tensor) -> Tensor:
        if x.dim() == len(self._features):
            x = x.unsqueeze(0)  # one sample
        shared = x.shape[1 : x.dim() - len(self._features)].numel()
        return x.reshape(len(x), shared, self.groups).permute(2, 0, 1).unsqueeze(3)


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
    "transformers.models.granite.modeling_granite.GraniteRMSNorm",
    "transformers.models.llama.modeling_llama.LlamaRMSNorm",
    "transformers.models.mamba.modeling_mamba.MambaRMSNorm",
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm",
    "transformers.models.mixtral.modeling_mixtral.MixtralRMSNorm",
    "transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm",
    "transformers.models.phi3.modeling_phi3.Phi3RMSNorm",
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeRMSNorm",
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeRMSNorm",
    "transformers.models.t5.modeling_t5.T5LayerNorm",
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

    def inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        """Return the input, with the running statistics in eval mode."""
        inputs = super().inputs(args, kwargs)
        module = self.module
        if module.training or module.running_mean is None or module.running_var is None:
            return inputs
        # Saved now: the mode may change before the backward pass.
        return (*inputs, module.running_mean, module.running_var)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        x = _wide(inputs[0])
        mean, variance = _running(inputs, x.dtype)
        training, eps = mean is None, self.module.eps
        return _channels(F.batch_norm(x, mean, variance, training=training, eps=eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return _channels(grad_output)


@KINDS["layer"].register_optional(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormHelper(BatchNormHelper):
    """``nn.InstanceNorm1d``, ``2d`` and ``3d`` with ``affine=True``, of ``[N, channels, ...]``."""

    module: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d  # type: ignore[assignment]
    unit: ClassVar[Unit | None] = "sample"

    def input_rows(self, *inputs: Tensor) -> Tensor:
        x = self._batched(_wide(inputs[0]))
        mean, variance = _running(inputs, x.dtype)
        training, eps = mean is None, self.module.eps
        return _channels(F.instance_norm(x, mean, variance, use_input_stats=training, eps=eps))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return _channels(self._batched(grad_output))

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        # All samples have the same running statistics.
        return super().take_inputs(inputs[:1], index, unit) + inputs[1:]

    def _batched(self, x: Tensor) -> Tensor:
        """Add the batch dimension if the module was called with a single sample."""
        return x.unsqueeze(0) if x.dim() == self.module._get_no_batch_dim() else x


def _running(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the running mean and variance of a call in eval mode."""
    if len(inputs) == 1:
        return None, None
    _, mean, variance = inputs
    return mean.to(dtype), variance.to(dtype)


def _channels(x: Tensor) -> Tensor:
    """Return ``[N, channels, ...]`` as ``[channels, N, positions, 1]``."""
    return x.reshape(*x.shape[:2], x.shape[2:].numel()).transpose(0, 1).unsqueeze(3)


def _wide(x: Tensor) -> Tensor:
    """Convert an input to at least float32, the precision in which torch normalises."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
