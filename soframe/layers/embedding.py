"""Embeddings: rows of a table, by index.

``y = e_i^T W`` with the one-hot row ``e_i`` as the input, so that the second moment of the inputs
is the diagonal of index counts. Counts are computed from the indices; neither one-hot rows nor a
matrix ``[num_embeddings, num_embeddings]`` are materialised. The gradient matrix is the transposed
table, ``[1, embedding_dim, num_embeddings]``.

The padding index has no gradient, so its rows are excluded from the statistics of inputs and of
output gradients.

A bag adds up rows of the table: its input is a weighted sum of one-hot rows. Only the diagonal of
its second moment is kept, which is exact if no bag has two different indices.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.layers.base import BlockShape, Inputs, LayerHelper, Unit
from soframe.layers.linear import rows_of
from soframe.registry import KINDS
from soframe.specs import FactorSpec


@KINDS["layer"].register_optional(nn.Embedding)
class EmbeddingHelper(LayerHelper):
    """``nn.Embedding`` of indices ``[batch, positions...]``, or of indices that all samples share.

    The latter are ``[T]``, ``[1, T]`` and a square ``[T, T]`` of distances, where no dimension is
    the model's batch.
    """

    module: nn.Embedding
    unit: ClassVar[Unit | None] = "row"
    _rowless = frozenset(
        {"input_key", "input_moment", "input_sum", "mean_moment"}
        | {"squared_gradients", "sample_moments", "sample_rows"}
    )

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if getattr(module, "sparse", False):
            return "sparse=True makes sparse gradients; build it with sparse=False to have a block"
        if getattr(module, "max_norm", None) is not None:
            return "max_norm changes the table in the forward pass, between two calls"
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq makes gradients that are not those of the loss"
        return super().unsupported(module)

    @cached_property
    def shape(self) -> BlockShape:
        """The shape of the transposed table."""
        return BlockShape(1, self.module.embedding_dim, self.module.num_embeddings)

    def lacks_batch(self, batch: int, shared: int, size: int) -> bool:
        if size in (1, batch, shared):
            return False
        return shared == 1 or batch in (1, shared) or batch % size > 0

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return weight.T.unsqueeze(0)

    def _weight_of(self, matrix: Tensor) -> Tensor:
        return matrix[0].T

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """Make the input factor diagonal, and exclude padding from means over rows."""
        if spec.captured and spec.side == "right" and spec.kind == "psd":
            return replace(spec, kind="diagonal")
        return spec if self.module.padding_idx is None else spec.by_group()

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """Return one-hot rows, zeros for padding: the plain twin of the fast paths."""
        indices = _rows(inputs[0])
        rows = F.one_hot(indices.long(), self.module.num_embeddings)
        if self.module.padding_idx is not None:
            rows = rows * (indices != self.module.padding_idx).unsqueeze(2)
        return rows.unsqueeze(0)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return rows_of(grad_output)

    def mask(self, inputs: Inputs, output_rows: Tensor) -> Tensor | None:
        """Exclude padding."""
        if self.module.padding_idx is None:
            return None
        return (_rows(inputs[0]) != self.module.padding_idx).unsqueeze(0)

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        (x,) = inputs
        if unit == "row":
            x = x.flatten()
        return (x[index],)

    def sample_rows(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return output rows, zeros for padding, and the indices of the table."""
        mask = self.mask(inputs, output_rows)
        if mask is not None:
            output_rows = output_rows * mask.unsqueeze(3)
        return output_rows, _rows(inputs[0]).unsqueeze(0).unsqueeze(3)

    def input_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Return the diagonal ``[1, num_embeddings]``: the counts of the indices."""
        indices = inputs[0].flatten()
        return self._added(indices, output_rows.new_ones(len(indices)), total, scale)

    def mean_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Return the sum over samples of ``(count / positions)^2``, ``[1, num_embeddings]``."""
        indices = _rows(inputs[0])
        size, positions = self.module.num_embeddings, max(1, indices.shape[1])
        sample = torch.arange(len(indices), device=indices.device).unsqueeze(1)
        both, counts = (indices + sample * size).unique(return_counts=True)
        values = (counts.to(output_rows.dtype) / positions).square()
        return self._added(both % size, values, total, scale)

    def squared_gradients(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Square the columns of the indices that occur in each sample, and add them up."""
        indices, sums = self._columns(inputs, output_rows)
        squares = sums.new_zeros(self.module.num_embeddings, sums.shape[1])
        squares.index_add_(0, indices, sums.square())
        return squares.T.unsqueeze(0)

    def sample_moments(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``W W^T`` and the diagonal of ``W^T W``, ``[1, num_embeddings]``."""
        indices, sums = self._columns(inputs, output_rows)
        lengths = sums.square().sum(1)
        right = lengths.new_zeros(self.module.num_embeddings).index_add_(0, indices, lengths)
        return (sums.T @ sums).unsqueeze(0), right.unsqueeze(0)

    def input_sum(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        # One-hot rows: the sum is the diagonal of the moment.
        return self.input_moment(inputs, output_rows)

    def _columns(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the columns in samples' gradients, and the columns ``[n, out]``."""
        sample, indices, gradients = self._entries(inputs, output_rows)
        size = self.module.num_embeddings
        both, place = (indices + sample * size).unique(return_inverse=True)
        sums = gradients.new_zeros(len(both), gradients.shape[1]).index_add_(0, place, gradients)
        indices = both % size
        if self.module.padding_idx is not None:
            sums = sums * (indices != self.module.padding_idx).unsqueeze(1)
        return indices, sums

    def _entries(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sample ``[n]``, index ``[n]`` and gradient ``[n, out]`` of each lookup."""
        indices = _rows(inputs[0])
        sample = torch.arange(len(indices), device=indices.device).unsqueeze(1).expand_as(indices)
        return sample.flatten(), indices.flatten(), output_rows[0].flatten(0, 1)

    def _added(self, indices: Tensor, values: Tensor, total: Tensor | None, scale: float) -> Tensor:
        """Add up values by index except for padding, times a scale, ``[1, num_embeddings]``."""
        counts = values.new_zeros(1, self.module.num_embeddings)
        # Scaled afterwards: sums of integers are exact in any order.
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

    The tensors of a call are the indices of all bags ``[entries]``, the weights of the entries in
    their bags ``[entries]``, and the number of entries of each bag ``[bags]``.
    """

    module: nn.EmbeddingBag  # type: ignore[assignment]  # has the same attributes
    unit: ClassVar[Unit | None] = "sample"
    _rowless = EmbeddingHelper._rowless
    sample_rows = LayerHelper.sample_rows  # a bag has a row of several indices

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if getattr(module, "mode", None) == "max":
            return "mode='max' is not linear in the table, which 'sum' and 'mean' are"
        return super().unsupported(module)

    def lacks_batch(self, batch: int, shared: int, size: int) -> bool:
        return False

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """Exclude empty bags from means over rows."""
        return super().factor(spec).by_group()

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return indices, weights and sizes, for all forms in which bags can be passed."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        indices, offsets = arguments["input"], arguments.get("offsets")
        weights = arguments.get("per_sample_weights")
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
        """Return weighted sums of one-hot rows: the plain twin of the fast paths."""
        indices, weights, sizes = inputs
        rows = weights.new_zeros(len(sizes), self.module.num_embeddings)
        rows.index_put_((_bags(sizes, len(indices)), indices), weights, accumulate=True)
        return rows.view(1, len(sizes), 1, -1)

    def mask(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Exclude bags without entries, or with padding only."""
        _, weights, sizes = inputs
        entries = (weights != 0).long()
        counts = entries.new_zeros(len(sizes)).index_add_(0, _bags(sizes, len(entries)), entries)
        return (counts > 0).view(1, -1, 1)

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        indices, weights, sizes = inputs
        taken, starts = sizes[index], sizes.cumsum(0) - sizes
        shift = starts[index] - (taken.cumsum(0) - taken)
        entries = shift.repeat_interleave(taken)
        entries = entries + torch.arange(len(entries), device=entries.device)
        return indices[entries], weights[entries], taken

    def input_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Return the diagonal ``[1, num_embeddings]``."""
        indices, weights, sizes = inputs
        size = self.module.num_embeddings
        both, place = (indices + _bags(sizes, len(indices)) * size).unique(return_inverse=True)
        values = output_rows.new_zeros(len(both))
        values.index_add_(0, place, weights.to(output_rows.dtype))
        return self._added(both % size, values.square(), total, scale)

    def input_sum(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Return the sum of the weights of each index, ``[1, num_embeddings]``."""
        indices, weights, _ = inputs
        return self._added(indices, weights.to(output_rows.dtype), None, 1.0)

    def mean_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        # The same: a bag has one position.
        return self.input_moment(inputs, output_rows, total, scale)

    def _entries(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        indices, weights, sizes = inputs
        bags = _bags(sizes, len(indices))
        weights = weights.to(output_rows.dtype).unsqueeze(1)
        return bags, indices, output_rows[0, bags, 0] * weights

    def input_key(self) -> None:
        # The entries are new tensors in each call, so no input is ever shared.
        return


def _bags(sizes: Tensor, entries: int) -> Tensor:
    """Return the bag of each entry; the given number of entries saves a host synchronisation."""
    bags = torch.arange(len(sizes), device=sizes.device)
    return bags.repeat_interleave(sizes, output_size=entries)


def _rows(indices: Tensor) -> Tensor:
    """Return indices as ``[batch, positions]``."""
    if indices.dim() == 0:
        return indices.view(1, 1)
    return indices.reshape(len(indices), indices.shape[1:].numel())
