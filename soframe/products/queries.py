"""Inner products of many samples with few queries, through a matrix of a curvature.

In a block with the spectrum ``(R ⊗ L) diag(S) (R ⊗ L)^T`` the product of a query W_q and a sample
W_t is the inner product of ``S * (L^T W_q R)`` and ``L^T W_t R``. Queries are kept as the former.
Samples are rotated, which costs little as long as their gradients are rows. Over a long stream it
would cost more than to rotate the queries back: each side is, when its samples have cost as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.products.operator import Operator
from soframe.products.samples import Gradients, SampleGradients
from soframe.products.vectors import total


@dataclass(eq=False)
class BlockQueries:
    """Products of the matrix with the queries of a block."""

    matrices: Tensor  # [queries, groups, out, in], rotated by the bases below
    left: Tensor | None = None  # L, [groups, out, out]; None for the identity
    right: Tensor | None = None  # R, [groups, in, in]; None for the identity
    left_rows: int = 0  # of samples that were rotated by L
    right_rows: int = 0

    def dot(self, gradients: Gradients) -> Tensor:
        """Return inner products, ``[queries, samples]``."""
        products = gradients.rotated(self.left, self.right).dot(self.matrices)
        left_rows, right_rows = gradients.rows
        self.left_rows += left_rows
        self.right_rows += right_rows
        queries, _, out, into = self.matrices.shape
        if self.left is not None and self.left_rows > queries * into:
            self.matrices, self.left = self.left @ self.matrices, None
        if self.right is not None and self.right_rows > queries * out:
            self.matrices, self.right = self.matrices @ self.right.mT, None
        return products


@dataclass(frozen=True, eq=False)
class Queries:
    """Products of a matrix with the gradients of queries."""

    blocks: Mapping[Block, BlockQueries]

    def __len__(self) -> int:
        first = next(iter(self.blocks.values()))
        return len(first.matrices)

    def dot(self, samples: SampleGradients) -> Tensor:
        """Return inner products with the gradients of samples, ``[queries, samples]``."""
        products = [queries.dot(samples.blocks[block]) for block, queries in self.blocks.items()]
        return total(products)


def queries_of(operator: Operator, batches: Iterable[SampleGradients]) -> Queries | None:
    """Return the products of a matrix with the gradients of batches; None without a batch.

    Every rank must call, with the same batches unless all ranks have all second-order data.
    """
    parts: dict[Block, list[Tensor]] = {}
    for batch in batches:
        for block, _, matrices in _products(operator, batch):
            parts.setdefault(block, []).append(matrices)
    if not parts:
        return None
    blocks = {}
    for block in list(parts):
        tensors = parts.pop(block)  # freed when they are joined
        matrices = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        blocks[block] = BlockQueries(matrices)
        if operator.is_local:
            spectrum = operator.spectra[block]
            blocks[block] = BlockQueries(matrices, spectrum.left, spectrum.right)
    return Queries(blocks)


def squares(operator: Operator, samples: SampleGradients) -> Tensor:
    """Return ``g^T M g`` of each sample, with a matrix M; every rank must call as for `queries_of`.

    A local operator has the dense gradients of a block at a time.
    """
    squared = []
    for _, gradients, products in _products(operator, samples):
        squared.append((gradients * products).flatten(1).sum(1))
    return total(squared)


def _products(operator: Operator, batch: SampleGradients) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield blocks, gradients and products ``[samples, groups, out, in]``; rotated if local."""
    if operator.is_local:
        for block, spectrum in operator.spectra.items():
            rotated = batch.blocks[block].rotated(spectrum.left, spectrum.right).dense()
            yield block, rotated, rotated * operator.values(spectrum)
        return
    dense = {block: gradients.dense() for block, gradients in batch.blocks.items()}
    for block, products in operator.apply(dense).items():
        yield block, dense[block], products
