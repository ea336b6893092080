"""Inputs of any shape: the Kronecker product of the factors is the dense Fisher.

For a loss that is a square of a layer's outputs, K-FAC's independence of positions holds in
expectation over signs of the output gradients. Micro-batches run through all of a set of signs
without correlations, so the expectation is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.testing import compare, dense_fisher, layer_fisher
from tests.curvature import blocks, closing, factors, fill, half_square, preconditioner, randn
from tests.examples import examples

WORDS = 4


class Around(nn.Module):
    """A layer that may have the batch as its second dimension; arguments and outputs have not."""

    def __init__(self, layer: nn.Module, batch_first: bool) -> None:
        super().__init__()
        # Not `batch_first`, which would say that the arguments of this module are `[T, N, ...]`.
        self.layer, self.turns = layer, not batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.turns:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.layer(x)


def signs(columns: int) -> Tensor:
    """Rows of signs ``[power of two, columns]`` whose columns are orthogonal."""
    matrix = torch.ones(1, 1).double()
    while len(matrix) < columns:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    return matrix[:, :columns]


@st.composite
def cases(draw: Any) -> tuple[nn.Module, bool, Tensor]:
    """A layer, whether the batch is its first dimension, and an input, batch first."""
    kind = draw(st.sampled_from(["linear", "layer norm", "group norm", "embedding", "convolution"]))
    dims = draw(st.integers(1, 5))
    features = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=5, max_size=5))
    if kind in ("convolution", "group norm"):
        places = max(1, min(dims - 2, 3)) if kind == "convolution" else max(0, dims - 2)
        x = randn(sizes[0], 2 * features, *(2 for _ in range(places)))
        if kind == "group norm":
            return nn.GroupNorm(1, 2 * features), True, x
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[places - 1]
        return conv(2 * features, 2, 2, padding=draw(st.integers(0, 1)), groups=2), True, x
    shape = sizes[: dims - 1]
    batch_first = len(shape) != 2 or draw(st.booleans())
    if kind == "embedding":
        shape = shape or [1]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(WORDS, tuple(shape), generator=generator)
        return nn.Embedding(WORDS, features), batch_first, ids
    x = randn(*shape, features)
    return (nn.Linear(features, 2) if kind == "linear" else nn.LayerNorm(features)), batch_first, x


@given(case=cases())
@settings(max_examples=examples(40))
def test_the_factors_are_the_dense_fishers(case: tuple[nn.Module, bool, Tensor]) -> None:
    layer, batch_first, x = case
    model = fill(Around(layer, batch_first))
    batched = x if x.dim() > 1 or isinstance(layer, nn.Embedding) else x[None]
    with torch.no_grad():
        y = model(batched) + 1.0  # losses are no rounding errors
    # Hidden states of tokens leave open whether tokens or samples are the terms of the loss.
    told = {"samples": "batch"} if isinstance(layer, nn.Embedding) else {}
    with closing(preconditioner(model, layers="all", **told)) as own:
        rows = signs(y.numel())
        for row in rows:
            ((model(x) * row.view(model(x).shape)).sum() / (len(y) * len(rows))).backward()
        own.step()
        if isinstance(layer, nn.Embedding):
            a, g = blocks(own)["layer"].running["A"][0], factors(own, "layer")[1]
            exact = dense_fisher(model, x, half_square, y, kind="type-2")
            compare(torch.kron(a.diag(), g[0]), exact, "kron(A, G)")
            return
        if isinstance(layer, nn.LayerNorm | nn.GroupNorm):
            exact = dense_fisher(model, batched, half_square, y, kind="type-2")
            # Weights, then biases; each feature is a layer.
            each = torch.arange(layer.weight.numel())
            pairs = torch.stack([each, each + len(each)], 1)
            dense = [exact[pair][:, pair] for pair in pairs]
        else:
            dense = layer_fisher(model, "layer", batched, half_square, y, kind="type-2")
        for group, (a, g) in enumerate(zip(*factors(own, "layer"), strict=True)):
            compare(torch.kron(g, a), dense[group], f"group {group}")
