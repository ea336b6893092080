"""Linear layers whose weight is stored transposed: ``y = x W + b`` with ``W`` ``[in, out]``.

An example is GPT-2's ``Conv1D``, registered by its qualified name so that transformers need not be
installed.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from soframe.layers.base import BlockShape
from soframe.layers.linear import LinearHelper
from soframe.registry import KINDS


@KINDS["layer"].register("transformers.pytorch_utils.Conv1D")
class TransposedLinearHelper(LinearHelper):
    """``y = x W + b`` of ``[batch, ..., in]``: dimensions in between are positions.

    For any module with a ``weight`` ``[in, out]`` and optionally a ``bias`` ``[out]``.
    """

    transposed: ClassVar[bool] = True
    widens: ClassVar[bool] = True

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if (why := super().unsupported(module)) is not None:
            return why
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if weight is not None and bias is not None and bias.shape != weight.shape[1:]:
            return f"its bias {tuple(bias.shape)} does not fit its weight {tuple(weight.shape)}"
        return None

    @property
    def shape(self) -> BlockShape:
        """The shape of the transposed weight, with the bias column."""
        assert self._full_weight is not None
        into, out = self._full_weight.shape
        columns = into if self.weight is not None else 0
        return BlockShape(1, out, columns + (self.bias is not None))

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return super().to_matrix(None if weight is None else weight.T, bias)

    def _weight_of(self, matrix: Tensor) -> Tensor:
        return matrix[0].T
