"""Workloads: published models, to be built on the meta device, with inputs and a batch.

Layers and sides are the published ones, so that plans are; weights have torch's own initialisation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model to be planned.

    Attributes:
        name: Its name.
        make: Builds the model.
        inputs: From a batch to the model's positional inputs, on the meta device.
        batch: Samples of a rank in each step.
        note: The source of the model and of the batch.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    batch: int
    note: str

    def model(self) -> nn.Module:
        """Return the model on the meta device."""
        with torch.device("meta"):
            return self.make()


class Residual(nn.Module):
    """Convolutions with batch norm, and a shortcut around them."""

    def __init__(self, channels: int, layers: list[tuple[int, int, int]]) -> None:
        super().__init__()
        # For each convolution its output channels, kernel size and stride.
        convolutions, into = [], channels
        for out, kernel, stride in layers:
            convolutions.append(convolution(into, out, kernel, stride))
            into = out
        self.convolutions = nn.ModuleList(convolutions)
        stride = max(stride for _, _, stride in layers)
        self.shortcut: nn.Module = nn.Identity()
        if into != channels or stride != 1:
            self.shortcut = convolution(channels, into, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return activations, ``[batch, out, height, width]``."""
        first, *rest = self.convolutions
        out = first(x)
        for layer in rest:
            out = layer(out.relu())
        result: Tensor = F.relu(out + self.shortcut(x))
        return result


def convolution(channels: int, out: int, kernel: int, stride: int) -> nn.Sequential:
    """Return a convolution, padded by half of its odd kernel, and its batch norm."""
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


def resnet(counts: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return a ResNet for images of 224 x 224 (He et al., 2016), by bottlenecks of each width."""
    layers = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, first, count in zip((64, 128, 256, 512), (1, 2, 2, 2), counts, strict=True):
        for stride in [first] + [1] * (count - 1):
            sizes = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
            layers.append(Residual(channels, sizes))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def heads(x: Tensor, size: int) -> Tensor:
    """Split ``[batch, length, features]`` into heads, ``[batch, heads, length, size]``."""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


class Layer(nn.Module):
    """Attention and a perceptron of four times the width, with layer norms.

    GPT-2's is causal, with norms before attention and perceptron; BERT's has them behind the sums.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.size, self.causal = width // heads, causal
        self.norm_attention = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream, ``[batch, length, width]``."""
        if self.causal:
            x = x + self._attend(self.norm_attention(x))
            return x + self._widen(self.norm_mlp(x))
        x = self.norm_attention(x + self._attend(x))
        normed: Tensor = self.norm_mlp(x + self._widen(x))
        return normed

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part(x), self.size) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _widen(self, x: Tensor) -> Tensor:
        form = "tanh" if self.causal else "none"
        out: Tensor = self.narrow(F.gelu(self.widen(x), approximate=form))
        return out


def repeated(make: Callable[[], nn.Module], layers: int) -> nn.Sequential:
    """Return layers of one kind, one after another."""
    return nn.Sequential(*(make() for _ in range(layers)))


def _tied(head: nn.Linear, table: nn.Embedding) -> nn.Linear:
    """Return a head with an embedding's weight."""
    head.register_parameter("weight", table.get_parameter("weight"))
    return head


class GPT(nn.Module):
    """GPT-2 (Radford et al., 2019): ``[batch, length]`` to logits; the head is the embedding's."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.layers = repeated(partial(Layer, width, heads), layers)
        self.norm = nn.LayerNorm(width)
        self.head = _tied(nn.Linear(width, 50257, bias=False), self.tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, ``[batch, length, vocabulary]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.tokens(tokens) + self.positions(places))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class BERT(nn.Module):
    """BERT-Large (Devlin et al., 2019), with both heads of its pretraining.

    The head of masked words has the embedding's weight and a bias.
    """

    def __init__(self) -> None:
        super().__init__()
        width, vocabulary = 1024, 30522
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.layers = repeated(partial(Layer, width, 16, causal=False), 24)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = _tied(nn.Linear(width, vocabulary), self.tokens)
        self.follows = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, of words ``[batch, length, vocabulary]`` and of order ``[batch, 2]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        sums = self.tokens(tokens) + self.positions(places) + self.segments(segments)
        hidden = self.layers(self.norm(sums))
        return self.head(self.transform(hidden)), self.follows(hidden[:, 0])


class Gated(nn.Module):
    """A Llama's layer: grouped-query attention with rotated positions, and a gated perceptron.

    Each of the ``shared`` heads of keys and values serves ``heads / shared`` queries.
    """

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.queries, self.size = heads // shared, width // heads  # that keys serve, and features
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.size, bias=False)
        self.value = nn.Linear(width, shared * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream, ``[batch, length, width]``."""
        normed = self.norm_attention(x)
        q = rotated(heads(self.query(normed), self.size))
        k = rotated(heads(self.key(normed), self.size)).repeat_interleave(self.queries, 1)
        v = heads(self.value(normed), self.size).repeat_interleave(self.queries, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_mlp(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs of features by their position (Su et al., 2021); ``[..., length, features]``."""
    first, second = x.chunk(2, dim=-1)
    *_, length, half = first.shape
    rates = 10_000.0 ** -(torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(length, dtype=x.dtype, device=x.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Llama(nn.Module):
    """A Llama (Touvron et al., 2023): ``[batch, length]`` to logits, with a head of its own."""

    def __init__(
        self, vocabulary: int, layers: int, width: int, heads: int, shared: int, hidden: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = repeated(partial(Gated, width, heads, shared, hidden), layers)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, ``[batch, length, vocabulary]``."""
        logits: Tensor = self.head(self.norm(self.layers(self.tokens(tokens))))
        return logits


def _images(batch: int) -> tuple[Tensor, ...]:
    return (torch.empty(batch, 3, 224, 224, device="meta"),)


def _tokens(batch: int, *, length: int, inputs: int = 1) -> tuple[Tensor, ...]:
    tokens = torch.empty(batch, length, dtype=torch.long, device="meta")
    return tuple(itertools.repeat(tokens, inputs))


_LLAMA_2, _LLAMA_3 = "Llama 2, Touvron et al., 2023", "Llama 3, Grattafiori et al., 2024"
_EACH = "; queries, keys and values have a matrix each; a usual batch"


def _text(name: str, make: Callable[[], nn.Module], length: int, batch: int, note: str) -> Workload:
    return Workload(name, make, partial(_tokens, length=length), batch, note + _EACH)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("resnet50", resnet, _images, 32, "He et al., 2016; the batch of SPD-KFAC"),
        Workload(
            "resnet101", partial(resnet, (3, 4, 23, 3)), _images, 32, "He et al., 2016; as resnet50"
        ),
        Workload(
            "bert-large",
            BERT,
            partial(_tokens, length=512, inputs=2),
            8,
            "Devlin et al., 2019; the length is that of the second phase, which KAISA trains",
        ),
        _text("gpt2", partial(GPT, 768, 12, 12), 1024, 8, "Radford et al., 2019"),
        _text("gpt2-medium", partial(GPT, 1024, 24, 16), 1024, 8, "Radford et al., 2019"),
        _text("gpt2-large", partial(GPT, 1280, 36, 20), 1024, 8, "Radford et al., 2019"),
        _text("gpt2-xl", partial(GPT, 1600, 48, 25), 1024, 8, "Radford et al., 2019"),
        _text("llama-7b", partial(Llama, 32000, 32, 4096, 32, 32, 11008), 4096, 1, _LLAMA_2),
        _text("llama-8b", partial(Llama, 128256, 32, 4096, 32, 8, 14336), 8192, 1, _LLAMA_3),
        _text("llama-70b", partial(Llama, 128256, 80, 8192, 64, 8, 28672), 8192, 1, _LLAMA_3),
    )
}
"""Models by name."""
