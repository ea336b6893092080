"""A small transformer that predicts the next byte."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soframe.experiments.models import own_randomness

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention, written out.

    Args:
        width: Of the residual stream.
        heads: How many.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes `(batch, length, width)` over positions up to each one's own."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(shape[-1])
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Layer(nn.Module):
    """Attention and a perceptron of four times the width, each behind a layer norm.

    Args:
        width: Of the residual stream.
        heads: Of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(batch, length, width)` to the same."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))
        return out


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes.

    Args:
        width: Of the residual stream.
        layers: How many.
        heads: Of each attention.
        context: The greatest length.
    """

    def __init__(
        self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """Maps bytes `(batch, length)` to logits `(batch, 256, length)` of those that follow."""
        places = torch.arange(text.shape[1], device=text.device)
        logits: Tensor = self.head(
            self.norm(self.layers(self.bytes(text) + self.positions(places)))
        )
        return logits.transpose(1, 2)


def byte_gpt(seed: int = 0, dtype: torch.dtype = torch.float32) -> ByteGPT:
    """A `ByteGPT` of width 128 with four layers, initialised as GPT-2 is.

    Args:
        seed: Of the initial weights: normal with deviation 0.02, divided by the square root of the
            number of residual additions where a layer ends in one; biases are zero.
        dtype: The floating type of the parameters.

    Returns:
        The model.
    """
    with own_randomness():
        model = ByteGPT()
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.endswith((".out", ".narrow"))
            std = 0.02 / math.sqrt(2 * len(model.layers)) if last else 0.02
            nn.init.normal_(module.weight, std=std, generator=generator)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model.to(dtype)
