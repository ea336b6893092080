"""Single parameters, whose rows are the gradients of samples.

A parameter that no layer helper serves is the bias of a layer without inputs: the row of a sample
is its gradient, and the input is one. `soframe.capture.parameters` takes the rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from soframe.layers.base import BlockShape, LayerHelper, Unit
from soframe.layers.layout import parameter_of


class ParameterHelper(LayerHelper):
    """A parameter of a module, as the matrix ``[1, entries, 1]``."""

    unit: ClassVar[Unit | None] = "sample"

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self._keys = module, ("", name)
        self.weight = self._full_weight = None
        self.bias = parameter_of(module, name)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the module has now, perhaps as fully_shard has gathered it."""
        parameter = parameter_of(self.module, self.part)
        assert parameter is not None
        return parameter

    @property
    def part(self) -> str:
        """The name of the parameter in its module."""
        return self._keys[1]

    @cached_property
    def shape(self) -> BlockShape:
        assert self.bias is not None
        return BlockShape(1, self.bias.numel(), 1)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError("a parameter by itself multiplies no inputs")

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """Return the gradients of samples, ``[samples, entries]``, as rows."""
        return grad_output.view(1, len(grad_output), 1, -1)
