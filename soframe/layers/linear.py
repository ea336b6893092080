"""Linear layers, with any leading dimensions: ``[batch, ..., features]``."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from soframe.layers.base import BlockShape, Inputs, LayerHelper, Unit
from soframe.registry import KINDS, register


@register("layer", nn.Linear)
@KINDS["layer"].register("torch_geometric.nn.dense.linear.Linear")
class LinearHelper(LayerHelper):
    """``y = x W^T + b`` of ``[batch, ..., in]``: dimensions in between are positions."""

    unit: ClassVar[Unit | None] = "row"
    widens: ClassVar[bool] = True

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() != 2:
            return f"{cls.__name__} serves matrices, and its weight has {weight.dim()} dimensions"
        return super().unsupported(module)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return rows_of(inputs[0])

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return rows_of(grad_output)

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        (x,) = inputs
        if unit == "row":
            x = x.reshape(-1, x.shape[-1])
        return (x[index],)

    def input_key(self) -> Hashable:
        return type(self), self.weight is not None, self.bias is not None


@KINDS["layer"].register("transformers.pytorch_utils.Conv1D")
class TransposedLinearHelper(LinearHelper):
    """``y = x W + b``, of any module with a ``weight`` ``[in, out]`` and perhaps a ``bias``.

    An example is GPT-2's ``Conv1D``, registered by its qualified name so that transformers need not
    be installed.
    """

    transposed: ClassVar[bool] = True
    widens: ClassVar[bool] = True

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if (why := super().unsupported(module)) is not None:
            return why
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        if bias is not None and bias.shape != weight.shape[1:]:
            return f"its bias {tuple(bias.shape)} does not fit its weight {tuple(weight.shape)}"
        return None

    @cached_property
    def shape(self) -> BlockShape:
        """The shape of the transposed weight, with the bias column."""
        assert self._full_weight is not None
        into, out = self._full_weight.shape
        return self._shape(1, out, into)

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is not None:
            weight = weight.T
        return super().to_matrix(weight, bias)

    def _weight_of(self, matrix: Tensor) -> Tensor:
        return matrix[0].T


def rows_of(x: Tensor) -> Tensor:
    """Return ``[batch, ..., features]``, or the features of one sample, as rows of one group."""
    shape = x.shape
    if len(shape) == 1:
        return x.view(1, 1, 1, -1)
    return x.reshape(1, shape[0], shape[1:-1].numel(), shape[-1])
