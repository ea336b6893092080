"""Embeddings: rows of a table, by index.

``y = e_i^T W`` with the one-hot row ``e_i`` for an input, so that the second moment of the inputs
is diagonal: how often each index occurs. It is counted from the indices, and neither a one-hot row
nor a matrix of the size of the table squared is ever made. The gradient matrix is the table,
transposed: ``[1, embedding_dim, num_embeddings]``.

The index for padding has no gradient. Its rows count neither for the inputs nor for the gradients
of the outputs.

A bag adds up rows of the table: its input is the sum of one-hot rows, with the weights that entries
have in it. Of the second moment of these the diagonal is taken, which is all of it where no bag has
two different indices.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.layers.base import BlockShape, LayerHelper, Unit
from soframe.registry import KINDS
from soframe.specs import FactorSpec

__all__ = ["EmbeddingBagHelper", "EmbeddingHelper"]


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
        if getattr(module, "sparse", False):
            return "sparse=True makes sparse gradients; build it with sparse=False to have a block"
        if getattr(module, "max_norm", None) is not None:
            return "max_norm changes the table in the forward pass, between two calls"
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq makes gradients that are not those of the loss"
        return super().unsupported(module)

    @property
    def shape(self) -> BlockShape:
        """The table, transposed."""
        return BlockShape(1, self.module.embedding_dim, self.module.num_embeddings)

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return weight.T.unsqueeze(0)

    def _weight_of(self, matrix: Tensor) -> Tensor:
        return matrix[0].T

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """That of the inputs' side is diagonal."""
        if spec.captured and spec.side == "right" and spec.kind == "psd":
            return replace(spec, kind="diagonal")
        if spec.mean_over == "rows" and self.module.padding_idx is not None:
            return replace(spec, mean_over="group rows")
        return spec

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """One-hot rows, and zeros for padding; the plain way."""
        indices = _rows(inputs[0])
        rows = F.one_hot(indices.long(), self.module.num_embeddings)
        if self.module.padding_idx is not None:
            rows = rows * (indices != self.module.padding_idx).unsqueeze(2)
        return rows.unsqueeze(0)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        if grad_output.dim() == 1:
            return grad_output.view(1, 1, 1, -1)
        batch, *positions, features = grad_output.shape
        return grad_output.reshape(1, batch, torch.Size(positions).numel(), features)

    def mask(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor | None:
        """Padding reaches nothing."""
        if self.module.padding_idx is None:
            return None
        return (_rows(inputs[0]) != self.module.padding_idx).unsqueeze(0)

    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        (x,) = inputs
        return (x[index],) if unit == "sample" else (x.flatten()[index],)

    def input_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """The diagonal ``[1, num_embeddings]``, counts."""
        indices = inputs[0].flatten()
        return self._added(indices, output_rows.new_ones(len(indices)), total, scale)

    def mean_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """``(count / positions)^2``, added up over samples."""
        indices = _rows(inputs[0])
        size, positions = self.module.num_embeddings, max(1, indices.shape[1])
        sample = torch.arange(len(indices), device=indices.device).unsqueeze(1)
        both, counts = (indices + sample * size).unique(return_counts=True)
        values = (counts.to(output_rows.dtype) / positions).square()
        return self._added(both % size, values, total, scale)

    def squared_gradients(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor:
        """Of the indices that occur, sample by sample."""
        indices, sums = self._columns(inputs, output_rows)
        squares = sums.new_zeros(self.module.num_embeddings, sums.shape[1])
        squares.index_add_(0, indices, sums.square())
        return squares.T.unsqueeze(0)

    def sample_moments(
        self, inputs: tuple[Tensor, ...], output_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the indices' side the diagonal."""
        indices, sums = self._columns(inputs, output_rows)
        lengths = sums.square().sum(1)
        right = lengths.new_zeros(self.module.num_embeddings).index_add_(0, indices, lengths)
        return (sums.T @ sums).unsqueeze(0), right.unsqueeze(0)

    def input_sum(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor:
        """Counts."""
        return self.input_moment(inputs, output_rows)

    def _columns(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of samples' gradients that are not zero, without those of padding.

        Returns:
            The index of each, and the column, ``[columns, out]``.
        """
        sample, indices, gradients = self._entries(inputs, output_rows)
        size = self.module.num_embeddings
        both, place = (indices + sample * size).unique(return_inverse=True)
        sums = gradients.new_zeros(len(both), gradients.shape[1]).index_add_(0, place, gradients)
        indices = both % size
        if self.module.padding_idx is not None:
            sums = sums * (indices != self.module.padding_idx).unsqueeze(1)
        return indices, sums

    def _entries(
        self, inputs: tuple[Tensor, ...], output_rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sample, the index and the gradient of each row that is looked up."""
        indices = _rows(inputs[0])
        sample = torch.arange(len(indices), device=indices.device).unsqueeze(1).expand_as(indices)
        return sample.flatten(), indices.flatten(), output_rows[0].flatten(0, 1)

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
        return type(self), self.module.num_embeddings, self.module.padding_idx


@KINDS["layer"].register_optional(nn.EmbeddingBag)
class EmbeddingBagHelper(EmbeddingHelper):
    """``nn.EmbeddingBag``, modes ``"sum"`` and ``"mean"``: every bag is a sample.

    The tensors of a call are the indices of all bags ``[entries]``, their weights in their bags
    ``[entries]``, and the number of entries of each bag ``[bags]``.
    """

    module: nn.EmbeddingBag  # type: ignore[assignment]  # it has what is asked of an Embedding
    unit: ClassVar[Unit | None] = "sample"

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if getattr(module, "mode", None) == "max":
            return "mode='max' is not linear in the table, which 'sum' and 'mean' are"
        return super().unsupported(module)

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """Empty bags reach nothing."""
        spec = super().factor(spec)
        return replace(spec, mean_over="group rows") if spec.mean_over == "rows" else spec

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Entries, weights and sizes, however bags were given."""
        given = self._signature.bind(*args, **kwargs).arguments
        indices, offsets = given["input"], given.get("offsets")
        weights = given.get("per_sample_weights")
        if offsets is None:
            sizes = indices.new_full(indices.shape[:1], indices.shape[1])
        elif self.module.include_last_offset:
            sizes = offsets.diff()
        else:
            sizes = offsets.diff(append=offsets.new_full((1,), len(indices)))
        indices = indices.flatten()
        if weights is None:
            weights = torch.ones(len(indices), dtype=self.module.weight.dtype, device=sizes.device)
        weights = weights.detach().flatten()
        if self.module.padding_idx is not None:
            weights = weights * (indices != self.module.padding_idx)
        if self.module.mode == "mean":
            bags = _bags(sizes, len(indices))
            counts = weights.new_zeros(len(sizes)).index_add_(0, bags, weights)
            weights = weights / counts.clamp(min=1)[bags]
        return indices, weights, sizes

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """Weighted sums of one-hot rows; the plain way."""
        indices, weights, sizes = inputs
        rows = weights.new_zeros(len(sizes), self.module.num_embeddings)
        rows.index_put_((_bags(sizes, len(indices)), indices), weights, accumulate=True)
        return rows.view(1, len(sizes), 1, -1)

    def mask(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor:
        """Bags without entries, or with padding alone, reach nothing."""
        _, weights, sizes = inputs
        entries = (weights != 0).long()
        counts = entries.new_zeros(len(sizes)).index_add_(0, _bags(sizes, len(entries)), entries)
        return (counts > 0).view(1, -1, 1)

    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        indices, weights, sizes = inputs
        taken, starts = sizes[index], sizes.cumsum(0) - sizes
        shift = starts[index] - (taken.cumsum(0) - taken)
        entries = shift.repeat_interleave(taken)
        entries = entries + torch.arange(len(entries), device=entries.device)
        return indices[entries], weights[entries], taken

    def input_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """The diagonal ``[1, num_embeddings]``."""
        indices, weights, sizes = inputs
        size = self.module.num_embeddings
        both, place = (indices + _bags(sizes, len(indices)) * size).unique(return_inverse=True)
        values = output_rows.new_zeros(len(both))
        values.index_add_(0, place, weights.to(output_rows.dtype))
        return self._added(both % size, values.square(), total, scale)

    def input_sum(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor:
        """The weights of each index."""
        indices, weights, _ = inputs
        return self._added(indices, weights.to(output_rows.dtype), None, 1.0)

    def mean_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """The same, for a bag has one position."""
        return self.input_moment(inputs, output_rows, total, scale)

    def _entries(
        self, inputs: tuple[Tensor, ...], output_rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        indices, weights, sizes = inputs
        bags = _bags(sizes, len(indices))
        weights = weights.to(output_rows.dtype).unsqueeze(1)
        return bags, indices, output_rows[0, bags, 0] * weights

    def input_key(self) -> None:
        """Entries of a call are tensors of that call."""
        return


def _bags(sizes: Tensor, entries: int) -> Tensor:
    """Return the bag of each entry; as their number is given, a device need not be waited for."""
    bags = torch.arange(len(sizes), device=sizes.device)
    return bags.repeat_interleave(sizes, output_size=entries)


def _rows(indices: Tensor) -> Tensor:
    """Return indices as ``[batch, positions]``."""
    if indices.dim() == 0:
        return indices.view(1, 1)
    return indices.reshape(len(indices), indices.shape[1:].numel())
