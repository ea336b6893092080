"""GPT-2 of any size, for a GPU: fused attention, the head tied to the embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Attributes:
        vocabulary: Different tokens; 50257 of GPT-2's, rounded up to a multiple of 128.
        context: Tokens of a window.
        width: Of the residual stream.
        layers: How many.
        heads: Of each attention.
    """

    vocabulary: int = 50304
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12


class Layer(nn.Module):
    """Causal attention and a perceptron of four times the width, each behind a layer norm.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_attention = nn.LayerNorm(width)
        # Apart, so that a method that makes matrices orthogonal has each of the three by itself.
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(batch, length, width)` to the same."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        normed = self.norm_attention(x)
        parts = (linear(normed) for linear in (self.query, self.key, self.value))
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x)), approximate="tanh"))
        return out


class GPT2(nn.Module):
    """A decoder-only transformer (Radford et al., 2019): 124 million parameters as it comes.

    Args:
        sizes: Of the model.
        seed: Of the initial weights: normal with deviation 0.02, divided by the square root of the
            number of residual additions where a layer ends in one; biases are zero.
    """

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.layers = nn.Sequential(*(Layer(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module is not self.head:
                last = name.endswith((".out", ".narrow"))
                std = 0.02 / math.sqrt(2 * sizes.layers) if last else 0.02
                nn.init.normal_(module.weight, std=std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Maps tokens and those that follow, `(batch, length)`, to the mean cross entropy, nats."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.layers(self.tokens(tokens) + self.positions(places)))
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())
