"""A linear layer whose weight is the table of an embedding, laid out as the embedding lays it out.

With the table ``W [num_embeddings, embedding_dim]`` an embedding computes ``e_i^T W`` and the head
``W h``: the inputs of one are the outputs of the other. The block's matrix is the transposed
table for both, ``[1, embedding_dim, num_embeddings]``, so a row's gradient here is ``h g^T``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from soframe.kernels.samples import sample_moments
from soframe.layers.base import Inputs, LayerHelper
from soframe.layers.embedding import EmbeddingHelper
from soframe.layers.linear import LinearHelper, TransposedLinearHelper
from soframe.specs import FactorSpec


class TiedHeadHelper(TransposedLinearHelper):
    """``nn.Linear`` as the head of an embedding, for methods that read moments of both sides.

    The matrix is the transposed weight; rows are as of a linear layer.
    """

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """Keep the diagonal of the side of the table's rows, as the embedding does."""
        return replace(spec, kind="diagonal") if spec.side == "right" else spec

    def sample_rows(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.input_rows(*inputs).to(output_rows.dtype), output_rows

    def sample_moments(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.input_rows(*inputs).to(output_rows.dtype)
        right, left = sample_moments(rows, output_rows, diagonal=(True, False))
        return left, right


def tables_and_heads(helpers: Sequence[LayerHelper]) -> tuple[LayerHelper, ...]:
    """Return the helpers of tables and heads with one weight, tables first; none for others."""
    tables: list[LayerHelper] = []
    heads: list[LayerHelper] = []
    for helper in helpers:
        if isinstance(helper, EmbeddingHelper):
            tables.append(helper)
        elif type(helper) is LinearHelper and helper.bias is None:
            heads.append(TiedHeadHelper(helper.module, bias=False))
        else:
            return ()
    return tuple(tables + heads) if tables else ()
