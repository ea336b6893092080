"""Experts in one parameter: ``y[e] = x[e] W[e]^T``, a linear layer for each expert.

Every expert is a group: inputs are ``[experts, rows, in]``, the parameter ``[experts, out, in]``.
Rows of zeros are padding of experts that receive fewer rows, and are not counted. The output factor
of an expert is a mean over the rows that reach it; the input factor is a mean over all samples, as
for every layer that sees some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from soframe.layers.base import BlockShape, Inputs, LayerHelper
from soframe.specs import FactorSpec


def are_experts(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' classes with a matrix for each expert."""
    kind = type(module)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Experts")


class ExpertsHelper(LayerHelper):
    """A module that multiplies rows ``[experts, rows, in]`` with one three-dimensional parameter.

    A subclass names the parameter of its module, and is chosen with ``layers=``. The number of
    samples cannot be inferred from the rows of experts: pass it by `Preconditioner.count`, a
    callable ``Statistics(samples=...)``, or `Preconditioner.observe`.

    Attributes:
        parameter: The name of the parameter.
        transposed: Whether the parameter is ``[experts, in, out]``, with ``y[e] = x[e] W[e]``.
    """

    parameter: ClassVar[str] = "weight"
    routes: ClassVar[bool] = True
    transposed: ClassVar[bool] = False

    def __init__(self, module: nn.Module, *, weight: bool = True, bias: bool = True) -> None:
        super().__init__(module, weight=weight, bias=bias)
        self._experts = module.get_parameter(self.parameter)
        self.weight, self.bias = self._experts, None
        self._keys = (self.parameter, "")

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        experts = module._parameters.get(cls.parameter)
        if experts is None or experts.dim() != 3:
            what = "no" if experts is None else f"{experts.dim()}-dimensional"
            return f"{cls.__name__} needs a parameter [experts, out, in]: {cls.parameter} is {what}"
        if experts.is_complex():
            return "complex parameters are not supported"
        extra = sorted(set(dict(module.named_parameters(recurse=False))) - {cls.parameter})
        if extra:
            return f"it has parameters that {cls.__name__} does not know: {', '.join(extra)}"
        return None

    @classmethod
    def of(
        cls, module: nn.Module, trained: Collection[str], *, joint: bool = True
    ) -> Sequence[LayerHelper]:
        # One block for all experts.
        return [cls(module)] if cls.parameter in trained else []

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        return (cls.parameter,)

    @cached_property
    def groups(self) -> int:
        """The number of experts."""
        return len(self._experts)

    @cached_property
    def shape(self) -> BlockShape:
        return BlockShape._make(self._turned(self._experts).shape)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self._turned(tensors[self.parameter])

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        return {self.parameter: self._turned(matrix)}

    def _turned(self, tensor: Tensor) -> Tensor:
        """Convert between ``[experts, out, in]`` and the layout of the parameter."""
        return tensor.mT if self.transposed else tensor

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """Take means over rows for each expert."""
        return spec.by_group()

    def mask(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Exclude rows of zeros, which are padding."""
        return (self.input_rows(*inputs) != 0).any(3)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        # The rows of an expert are the batch of its group.
        return inputs[0].unsqueeze(2)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return grad_output.unsqueeze(2)
