"""Linear layers, with any leading dimensions: ``[batch, ..., features]``."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import ClassVar

from torch import Tensor, nn

from soframe.layers.base import LayerHelper, Unit
from soframe.registry import register


@register("layer", nn.Linear)
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
        return _rows(inputs[0])

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return _rows(grad_output)

    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        (x,) = inputs
        if unit == "sample":
            return (x[index],)
        return (x.reshape(-1, x.shape[-1])[index],)

    def input_key(self) -> Hashable:
        return type(self), self.weight is not None, self.bias is not None


def _rows(x: Tensor) -> Tensor:
    if x.dim() == 1:
        return x.view(1, 1, 1, -1)
    batch, *positions, features = x.shape
    return x.reshape(1, batch, prod(positions), features)
