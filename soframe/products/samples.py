"""The gradients of single samples, from one backward pass of their mean loss.

The gradient of a sample in a block is ``W_n = sum_t g_{n,t} a_{n,t}^T``, with inputs ``a`` and
output gradients ``g`` at the positions t of sample n. The rows of all calls are kept, or the
gradients where those are smaller. Of a mean over N samples ``g`` is N times the gradient of
the backward pass, so that the mean of the gradients is the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.capture.hooks import Calls, Capture, LayerCall
from soframe.estimate.statistics import batch_first
from soframe.kernels.precision import Precision
from soframe.layers.base import LayerHelper
from soframe.products.fitting import LossOf, kept
from soframe.products.vectors import Coordinates, Vector, total


def _rotated(rows: Tensor, basis: Tensor | None) -> Tensor:
    """Multiply rows ``[groups, samples, positions, n]`` by a basis ``[groups, n, n]``, or None."""
    # One product for all samples: matmul would broadcast the basis to each.
    return rows if basis is None else (rows.flatten(1, 2) @ basis).view_as(rows)


@dataclass(frozen=True)
class Rows:
    """The gradients of samples in a block, as rows of outputs and of inputs.

    Attributes:
        left: ``[groups, samples, positions, out]``.
        right: ``[groups, samples, positions, in]``.
    """

    left: Tensor
    right: Tensor

    @property
    def pays(self) -> bool:
        """Whether rows are smaller than gradients."""
        positions, out, into = *self.left.shape[2:], self.right.shape[3]
        return positions * (out + into) < out * into

    @property
    def rows(self) -> tuple[int, int]:
        """The numbers of rows that a rotation of the left and of the right side multiplies."""
        rows = self.left.shape[1] * self.left.shape[2]
        return rows, rows

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Rows:
        """Return the gradients ``L^T W R``, with None for the identity."""
        return Rows(_rotated(self.left, left), _rotated(self.right, right))

    def dense(self) -> Tensor:
        """Return the gradients, ``[samples, groups, out, in]``."""
        return (self.left.mT @ self.right).transpose(0, 1)

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, groups, out, in]``: ``[vectors, samples]``."""
        _, samples, positions, out = self.left.shape
        if len(matrices) * positions < out:
            # [vectors, groups, samples * positions, out]
            products = self.right.flatten(1, 2) @ matrices.mT
            by_row: Tensor = (products * self.left.flatten(1, 2)).sum((1, 3))
            return by_row.view(-1, samples, positions).sum(2)
        return Dense(self.dense()).dot(matrices)


@dataclass(frozen=True)
class Lookups:
    """The gradients of samples in a table, as rows of outputs and the indices that they are of.

    Attributes:
        left: ``[1, samples, positions, out]``.
        indices: ``[1, samples, positions, 1]``, of the columns of the gradient matrix.
        size: The number of columns.
    """

    left: Tensor
    indices: Tensor
    size: int

    @property
    def rows(self) -> tuple[int, int]:
        """See `Rows.rows`: on the right they are those of the gradients."""
        _, samples, positions, out = self.left.shape
        return samples * positions, samples * out

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Lookups | Dense:
        """Return the gradients ``L^T W R``, with None for the identity."""
        if right is not None:
            return Dense(self.dense()).rotated(left, right)
        return Lookups(_rotated(self.left, left), self.indices, self.size)

    def dense(self) -> Tensor:
        """Return the gradients, ``[samples, 1, out, in]``."""
        _, samples, _, out = self.left.shape
        offsets = torch.arange(samples, device=self.indices.device).view(-1, 1) * self.size
        columns = self.left.new_zeros(samples * self.size, out)
        places = (self.indices[0, :, :, 0] + offsets).flatten()
        columns.index_add_(0, places, self.left.flatten(0, 2))
        return columns.view(samples, 1, self.size, out).mT

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, 1, out, in]``: ``[vectors, samples]``."""
        columns = matrices[:, 0].mT  # [vectors, in, out]
        chosen = columns[:, self.indices[0, :, :, 0]]  # [vectors, samples, positions, out]
        return (chosen * self.left).sum((2, 3))


@dataclass(frozen=True)
class Sum:
    """Gradients that are the sum of two, such as of a table that is a head, too."""

    first: Rows | Lookups | Dense
    second: Rows | Lookups | Dense

    @property
    def rows(self) -> tuple[int, int]:
        """See `Rows.rows`."""
        (left, right), (more_left, more_right) = self.first.rows, self.second.rows
        return left + more_left, right + more_right

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Sum:
        """Return the gradients ``L^T W R``, with None for the identity."""
        return Sum(self.first.rotated(left, right), self.second.rotated(left, right))

    def dense(self) -> Tensor:
        """Return the gradients, ``[samples, groups, out, in]``."""
        return self.first.dense() + self.second.dense()

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, groups, out, in]``: ``[vectors, samples]``."""
        return self.first.dot(matrices) + self.second.dot(matrices)


@dataclass(frozen=True)
class Dense:
    """The gradients of samples in a block, ``[samples, groups, out, in]``."""

    matrices: Tensor

    @property
    def rows(self) -> tuple[int, int]:
        """See `Rows.rows`."""
        samples, _, out, into = self.matrices.shape
        return samples * into, samples * out

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Dense:
        """Return the gradients ``L^T W R``, with None for the identity."""
        matrices = self.matrices
        if left is not None:
            matrices = left.mT @ matrices
        if right is not None:
            matrices = matrices @ right
        return Dense(matrices)

    def dense(self) -> Tensor:
        """Return the gradients."""
        return self.matrices

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, groups, out, in]``: ``[vectors, samples]``."""
        return matrices.flatten(1) @ self.matrices.flatten(1).T


Gradients = Rows | Lookups | Dense | Sum
"""The gradients of samples in a block."""


@dataclass(frozen=True, eq=False)
class SampleGradients:
    """The gradients of the samples of a batch.

    Attributes:
        blocks: The gradients in each block.
        samples: The number of samples.
    """

    blocks: Mapping[Block, Gradients]
    samples: int
    coordinates: Coordinates

    def __len__(self) -> int:
        return self.samples

    def dense(self) -> dict[str, Tensor]:
        """Return the gradients by parameter, ``[samples, *shape]``, in the blocks' dtype."""
        matrices = {block: gradients.dense() for block, gradients in self.blocks.items()}
        return self.coordinates.vector(matrices)

    def dot(self, vector: Vector) -> Tensor:
        """Return inner products with vectors ``[..., *shape]``: ``[..., samples]``.

        Raises:
            ValueError: If names or shapes do not fit.
        """
        leading = self.coordinates.leading(vector)
        products = []  # of each block [vectors, samples]
        for block, matrices in self.coordinates.matrices(vector).items():
            products.append(self.blocks[block].dot(matrices.reshape(-1, *block.shape)))
        return total(products).reshape(*leading, self.samples)


def sample_gradients(
    model: nn.Module,
    placed: PlacedBlocks,
    coordinates: Coordinates,
    loss: LossOf,
    batch: Any,
    precision: Precision,
) -> SampleGradients:
    """Return the gradients of the samples of a batch.

    Raises:
        ValueError: If a module mixes samples, or its calls do not show which rows are of which
            sample.
    """
    _require_apart(model)
    capture = Capture(model=model, precision=precision)
    collected = _Collected(placed.blocks)
    names: dict[LayerHelper, str] = {}
    for block in placed.blocks:
        names.update(dict.fromkeys(block.helpers, block.name))
    capture.listen(collected.add, names, roots=[model])
    capture.begin(Calls(), enabled=True)
    try:
        with kept(model), torch.enable_grad():
            _, value = loss(model, batch)
            value.backward()
    finally:
        capture.close()
    with torch.no_grad():
        return SampleGradients(collected.gradients(), collected.samples, coordinates)


class _Collected:
    """The rows of the calls of a backward pass."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._block_of: dict[LayerHelper, Block] = {}
        for block in blocks:
            self._block_of.update(dict.fromkeys(block.helpers, block))
        self._rows: dict[Block, list[tuple[Tensor, Tensor]]] = {block: [] for block in blocks}
        # Of tables, whose rows of inputs are indices.
        self._lookups: dict[Block, list[tuple[Tensor, Tensor]]] = {block: [] for block in blocks}
        self.samples = 0

    def add(self, call: LayerCall) -> None:
        """Keep the rows of a call."""
        helper, block = call.helper, self._block_of[call.helper]
        call = batch_first(call)
        rows = helper.output_rows(call.gradient).to(block.dtype)
        size = call.batch.root.size or rows.shape[1]
        self.samples = self.samples or size
        if call.is_ragged or rows.shape[1] != size or size != self.samples:
            raise ValueError(
                f"{block.name}: a call of {type(helper.module).__name__} has {rows.shape[1]} rows "
                f"in a batch of {self.samples} samples, and does not show which sample each is of: "
                f"call it with [samples, ...] (expand tensors without a batch), or skip it"
            )
        left, right = helper.sample_rows(call.inputs, rows)
        calls = self._rows if right.is_floating_point() else self._lookups
        calls[block].append((left * size, right))

    def gradients(self) -> dict[Block, Gradients]:
        """Return the gradients by block; zeros for a block that was not called."""
        return {block: self._of(block) for block in self._rows}

    def _of(self, block: Block) -> Gradients:
        parts: list[Rows | Lookups | Dense] = []
        if self._rows[block]:
            rows = Rows(*_joined(self._rows[block]))
            parts.append(rows if rows.pays else Dense(rows.dense()))
        if self._lookups[block]:
            parts.append(Lookups(*_joined(self._lookups[block]), block.shape.in_features))
        if not parts:
            shape = (self.samples, *block.shape)
            return Dense(torch.zeros(shape, dtype=block.dtype, device=block.device))
        return parts[0] if len(parts) == 1 else Sum(*parts)


def _joined(calls: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the positions of calls, dimension 2."""
    if len(calls) == 1:
        ((left, right),) = calls
        return left.detach(), right.detach()
    lefts, rights = zip(*calls, strict=True)
    return torch.cat(lefts, 2), torch.cat(rights, 2)


def _require_apart(model: nn.Module) -> None:
    """Raise if a batch norm mixes the samples of a batch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"{name} normalises with the statistics of the batch, so that a sample has no "
                f"gradient of its own: call model.eval() before"
            )
