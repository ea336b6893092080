"""Embeddings: rows of a table, by index.

``y = e_i^T W`` with the one-hot row ``e_i`` for an input, so that the second moment of the inputs
is diagonal: how often each index occurs. It is counted from the indices, and neither a one-hot row
nor a matrix of the size of the table squared is ever made. The gradient matrix is the table,
transposed: ``[1, embedding_dim, num_embeddings]``.

The index for padding has no gradient. Its rows count neither for the inputs nor for the gradients
of the outputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.layers.base import BlockShape, LayerHelper, Unit
from soframe.registry import KINDS
from soframe.specs import FactorSpec

__all__ = ["EmbeddingHelper"]


@KINDS["layer"].register_optional(nn.Embedding)
class EmbeddingHelper(LayerHelper):
    """``nn.Embedding``: the first dimension of the indices is the batch, others are positions.

    Indices without a batch, as of positions that are broadcast over it, count as so many samples:
    skip such a module, or give it indices ``[N, positions]``.
    """

    module: nn.Embedding
    unit: ClassVar[Unit | None] = "row"

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """See `LayerHelper.unsupported`."""
        if getattr(module, "sparse", False):
            return "sparse=True makes sparse gradients, which cannot be preconditioned"
        if getattr(module, "max_norm", None) is not None:
            return "max_norm changes the table in the forward pass, between two calls"
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq makes gradients that are not those of the loss"
        return super().unsupported(module)

    @property
    def shape(self) -> BlockShape:
        """See `LayerHelper.shape`: the table, transposed."""
        return BlockShape(1, self.module.embedding_dim, self.module.num_embeddings)

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See `LayerHelper.to_matrix`: a view."""
        assert weight is not None
        return weight.T.unsqueeze(0)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `LayerHelper.from_matrix`: a view."""
        return matrix[0].T, None

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """See `LayerHelper.factor`: that of the inputs is diagonal."""
        if spec.reads == "inputs" and spec.side == "right" and spec.kind == "psd":
            return replace(spec, kind="diagonal")
        if spec.mean_over == "rows" and self.module.padding_idx is not None:
            return replace(spec, mean_over="group rows")
        return spec

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """See `LayerHelper.input_rows`: one-hot rows, and zeros for padding; the plain way."""
        indices = _rows(inputs[0])
        rows = F.one_hot(indices, self.module.num_embeddings)
        if self.module.padding_idx is not None:
            rows = rows * (indices != self.module.padding_idx).unsqueeze(2)
        return rows.unsqueeze(0)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """See `LayerHelper.output_rows`."""
        if grad_output.dim() == 1:
            return grad_output.view(1, 1, 1, -1)
        batch, *positions, features = grad_output.shape
        return grad_output.reshape(1, batch, torch.Size(positions).numel(), features)

    def mask(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor | None:
        """See `LayerHelper.mask`: padding reaches nothing."""
        if self.module.padding_idx is None:
            return None
        return (_rows(inputs[0]) != self.module.padding_idx).unsqueeze(0)

    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        """See `LayerHelper.take_inputs`."""
        (x,) = inputs
        return (x[index],) if unit == "sample" else (x.flatten()[index],)

    def input_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """See `LayerHelper.input_moment`: the diagonal ``[1, num_embeddings]``, counts."""
        indices = inputs[0].flatten()
        return self._added(indices, output_rows.new_ones(len(indices)), total, scale)

    def mean_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """See `LayerHelper.mean_moment`: ``(count / positions)^2``, added up over samples.

        It is the diagonal alone: means of one-hot rows are not orthogonal.

        Args:
            inputs: The tensors of the call.
            output_rows: The rows of its output's gradient.
            total: What is added to, in place; None for zeros.
            scale: The multiplier.

        Returns:
            ``[1, num_embeddings]``.
        """
        indices = _rows(inputs[0])
        size, positions = self.module.num_embeddings, max(1, indices.shape[1])
        sample = torch.arange(len(indices), device=indices.device).unsqueeze(1)
        both, counts = (indices + sample * size).unique(return_counts=True)
        values = (counts.to(output_rows.dtype) / positions).square()
        return self._added(both % size, values, total, scale)

    def _added(self, indices: Tensor, values: Tensor, total: Tensor | None, scale: float) -> Tensor:
        """Add up values by index, times a scale, without those of padding."""
        counts = values.new_zeros(1, self.module.num_embeddings)
        # Unscaled first: counts are exact, in whichever order they are added up.
        counts.index_add_(1, indices, values.unsqueeze(0))
        if self.module.padding_idx is not None:
            counts[:, self.module.padding_idx] = 0
        counts *= scale
        return counts if total is None else total.add_(counts)

    def input_key(self) -> Hashable:
        """See `LayerHelper.input_key`."""
        return type(self), self.module.num_embeddings, self.module.padding_idx


def _rows(indices: Tensor) -> Tensor:
    """Return indices as ``[batch, positions]``."""
    if indices.dim() == 0:
        return indices.view(1, 1)
    return indices.reshape(len(indices), indices.shape[1:].numel())
