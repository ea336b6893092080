"""Experts in one parameter: ``y[e] = x[e] W[e]^T``, a linear layer for each expert.

Every expert is a group: inputs are ``[experts, rows, in]``, the parameter ``[experts, out, in]``.
Where an expert is given fewer rows than there is room for, the others are padding: rows of zeros.
They count for nothing. So the factor of an expert's outputs is a mean over the rows that reach it,
while that of its inputs is one over all samples, as for every layer that sees some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from soframe.layers.base import BlockShape, LayerHelper
from soframe.specs import FactorSpec

__all__ = ["ExpertsHelper", "are_experts"]


def are_experts(module: nn.Module) -> bool:
    """Return whether a module of the package transformers has one matrix for each expert."""
    kind = type(module)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Experts")


class ExpertsHelper(LayerHelper):
    """A module that multiplies rows ``[experts, rows, in]`` with one parameter of three dimensions.

    A subclass names the parameter of its module, and is chosen with ``layers=``. How many samples
    the loss is a mean over cannot be told from rows of experts: say so with
    `Preconditioner.count`, a callable ``samples=``, or by `Preconditioner.observe`.

    Attributes:
        parameter: The name of the parameter.
        transposed: Whether it is ``[experts, in, out]``, with ``y[e] = x[e] W[e]``.
    """

    parameter: ClassVar[str] = "weight"
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
        extra = sorted(k for k, p in module._parameters.items() if p is not None)
        if len(extra) > 1:
            extra.remove(cls.parameter)
            return f"it has parameters that {cls.__name__} does not know: {', '.join(extra)}"
        return None

    @classmethod
    def of(
        cls, module: nn.Module, trained: Collection[str], *, joint: bool = True
    ) -> Sequence[LayerHelper]:
        """One block."""
        return [cls(module)] if cls.parameter in trained else []

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        return (cls.parameter,)

    @property
    def groups(self) -> int:
        """The experts."""
        return len(self._experts)

    @property
    def shape(self) -> BlockShape:
        experts, out, into = self._experts.shape
        return BlockShape(experts, into, out) if self.transposed else BlockShape(experts, out, into)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor = tensors[self.parameter]
        return tensor.mT if self.transposed else tensor

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        return {self.parameter: matrix.mT if self.transposed else matrix}

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """Means over rows are those over the rows of each expert."""
        return replace(spec, mean_over="group rows") if spec.mean_over == "rows" else spec

    def mask(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor:
        """Rows of zeros are padding."""
        return (self.input_rows(*inputs) != 0).any(3)

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """The rows of an expert are the batch of its group."""
        return inputs[0].unsqueeze(2)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return grad_output.unsqueeze(2)
