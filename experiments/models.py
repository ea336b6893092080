"""Models: autoencoders, convolutional networks, ResNets, GPTs, a Llama and a ViT."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.data import single_precision

AUTOENCODER_WIDTHS = (64, 256, 128, 64, 16)
CURVES_WIDTHS = (256, 128, 64, 32, 6)
BYTES = 256


@contextmanager
def own_randomness() -> Iterator[None]:
    """Keep initial weights off the caller's seed, and off its default dtype."""
    with single_precision(), torch.random.fork_rng(devices=[]):
        yield


def autoencoder(encoder: Sequence[int], seed: int, dtype: torch.dtype) -> nn.Sequential:
    """Return a deep tanh autoencoder, from `(batch, encoder[0])` to the same.

    Deep autoencoders are the classical test of second-order methods: no normalisation, no skip
    connections, a narrow middle (Hinton and Salakhutdinov 2006; Martens 2010). The decoder mirrors
    the encoder; code and reconstruction are linear; weights are Xavier uniform, biases zero.
    """
    widths = (*encoder, *encoder[-2::-1])
    linear = (len(encoder) - 2, len(widths) - 2)
    layers: list[nn.Module] = []
    with own_randomness():
        for index, (width_in, width_out) in enumerate(pairwise(widths)):
            layers.append(nn.Linear(width_in, width_out))
            if index not in linear:
                layers.append(nn.Tanh())
    model = nn.Sequential(*layers)
    _xavier(model, seed, gain=1.0)
    return model.to(dtype)


def digits_cnn(seed: int, dtype: torch.dtype) -> nn.Sequential:
    """Return three convolutions and two linear layers, from `(batch, 1, 8, 8)` to 10 logits.

    No layer is a normalisation, so that every parameter is in a layer that K-FAC covers.
    """
    with own_randomness():
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    _xavier(model, seed, gain=nn.init.calculate_gain("relu"))
    return model.to(dtype)


def _xavier(model: nn.Module, seed: int, gain: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight, gain=gain, generator=generator)
            assert module.bias is not None
            nn.init.zeros_(module.bias)


class Scaled(nn.Module):
    """Maps images of bytes to -2 to 2, in the model's dtype, channels last as the weights are."""

    middle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.tensor(127.5), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        scaled: Tensor = (images.to(self.middle.dtype) - self.middle) / 64.0
        return scaled.contiguous(memory_format=torch.channels_last)


class Residual(nn.Module):
    """Convolutions with batch norm, and a shortcut around them.

    Args:
        channels: Channels of the input.
        layers: For each convolution its output channels, kernel size and stride.
    """

    def __init__(self, channels: int, layers: list[tuple[int, int, int]]) -> None:
        super().__init__()
        convolutions, into = [], channels
        for out, kernel, stride in layers:
            convolutions.append(convolution(into, out, kernel, stride))
            into = out
        self.convolutions = nn.ModuleList(convolutions)
        stride = max(stride for _, _, stride in layers)
        plain = into == channels and stride == 1
        self.shortcut = nn.Identity() if plain else convolution(channels, into, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for index, layer in enumerate(self.convolutions):
            out = layer(out if index == 0 else out.relu())
        result: Tensor = F.relu(out + self.shortcut(x))
        return result


def convolution(channels: int, out: int, kernel: int, stride: int) -> nn.Sequential:
    """Return a convolution, padded by half of its odd kernel, and its batch norm."""
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


def _resnet_of_32(widths: Sequence[int], blocks: int) -> nn.Sequential:
    layers: list[nn.Module] = [convolution(3, widths[0], 3, 1), nn.ReLU()]
    channels = widths[0]
    for width in widths:
        for _ in range(blocks):
            layers.append(Residual(channels, [(width, 3, width // channels), (width, 3, 1)]))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def resnet20() -> nn.Sequential:
    """Return ResNet-20 for images of 32 x 32 (He et al., 2016, section 4.2): 0.27 million."""
    return _resnet_of_32((16, 32, 64), 3)


def resnet18() -> nn.Sequential:
    """Return ResNet-18 as it is used for images of 32 x 32, nothing pooled: 11.2 million."""
    return _resnet_of_32((64, 128, 256, 512), 2)


def resnet50() -> nn.Sequential:
    """Return ResNet-50 for images of 224 x 224 (He et al., 2016): 25.6 million parameters."""
    layers = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            stride = 2 if index == 0 and width > 64 else 1
            sizes = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
            layers.append(Residual(channels, sizes))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def resnet20_of_bytes(seed: int, dtype: torch.dtype) -> nn.Sequential:
    """Return ResNet-20 behind `Scaled`, channels last, initialised as published.

    From `(batch, 3, 32, 32)`, uint8, to `(batch, 10)`.
    """
    with own_randomness():
        torch.manual_seed(seed)
        model = nn.Sequential(Scaled(), *resnet20())
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    # torch's stubs leave out a call with a memory format.
    return model.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT; by default GPT-2's, its vocabulary rounded up to a multiple of 128."""

    vocabulary: int = 50304
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12


BYTE_SIZES = Sizes(vocabulary=BYTES, context=128, width=128, layers=4, heads=4)


class Layer(nn.Module):
    """Causal attention and a perceptron of four times the width, each behind a layer norm.

    Args:
        sizes: Sizes of the model.
        fused: Whether queries, keys and values have a matrix each, and attention one kernel, as on
            a GPU; else they share a matrix, and attention is written out, so that any derivative
            of it is one of common operations.
    """

    def __init__(self, sizes: Sizes, *, fused: bool) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.fused = sizes.heads, fused
        self.norm_attention = nn.LayerNorm(width)
        if fused:
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        else:
            self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm_attention(x)
        if self.fused:
            parts = (self.query(normed), self.key(normed), self.value(normed))
        else:
            parts = self.qkv(normed).chunk(3, dim=-1)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(shape[-1])
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        form = "tanh" if self.fused else "none"
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x)), approximate=form))
        return out


class GPT(nn.Module):
    """A decoder-only transformer: `(batch, length)` to logits `(batch, vocabulary, length)`.

    Weights are GPT-2's (Radford et al., 2019): normal with deviation 0.02, divided by the
    square root of the number of residual additions where a layer ends in one; biases are zero.

    Args:
        sizes: Sizes of the model.
        fused: Whether it is made for a GPU: see `Layer`; the head is then the embedding's
            transpose and has no bias, and the logits are of single precision.
        seed: Seed of the initial weights.
    """

    def __init__(self, sizes: Sizes = BYTE_SIZES, *, fused: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.fused = fused
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.layers = nn.Sequential(*(Layer(sizes, fused=fused) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=not fused)
        if fused:
            self.head.weight = self.tokens.weight
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.named_modules():
            tied = fused and module is self.head
            if isinstance(module, nn.Linear | nn.Embedding) and not tied:
                last = name.endswith((".out", ".narrow"))
                std = 0.02 / math.sqrt(2 * sizes.layers) if last else 0.02
                nn.init.normal_(module.weight, std=std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.layers(self.tokens(tokens) + self.positions(places)))
        logits: Tensor = self.head(hidden)
        return (logits.float() if self.fused else logits).transpose(1, 2)


def next_token_loss(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy of the tokens that follow, in nats."""
    logits = model(tokens).transpose(1, 2)  # vocabulary last again, where it is contiguous
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def byte_gpt(seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a `GPT` over bytes, of width 128 with four layers."""
    with own_randomness():
        return GPT(seed=seed).to(dtype)


class Gated(nn.Module):
    """A Llama's layer: grouped-query attention with rotated positions, and a gated perceptron.

    Args:
        width: Width of the stream.
        heads: Heads of the queries.
        shared: Heads of keys and values; each serves ``heads / shared`` queries.
        hidden: Width of the perceptron.
    """

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.size, bias=False)
        self.value = nn.Linear(width, shared * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm_attention(x)
        q, k, v = (
            part(normed).view(batch, length, -1, self.size).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        k, v = (part.repeat_interleave(self.heads // self.shared, 1) for part in (_rotated(k), v))
        mixed = F.scaled_dot_product_attention(_rotated(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_mlp(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def _rotated(x: Tensor) -> Tensor:
    """Rotate pairs of features by their position (Su et al., 2021); ``[..., length, features]``."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(length, dtype=x.dtype, device=x.device)[:, None] * rates
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Llama(nn.Module):
    """A small Llama over bytes (Touvron et al., 2023): `(batch, length)` to logits, as `GPT`."""

    def __init__(self, seed: int, width: int = 96, layers: int = 6, hidden: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.layers = nn.Sequential(*(Gated(width, 6, 2, hidden) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        _normal(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.layers(self.tokens(tokens))))
        return logits.transpose(1, 2)


class ViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al., 2021), for images of `Scaled`'s bytes.

    From `(batch, 3, 32, 32)`, uint8, to `(batch, 10)`: patches of 4 x 4, the mean of all tokens.
    """

    def __init__(self, seed: int, width: int = 64, layers: int = 5, heads: int = 4) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(torch.empty(64, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 3 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        _normal(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(self.scaled(images)).flatten(2).mT + self.positions
        logits: Tensor = self.head(self.norm(self.layers(tokens)).mean(1))
        return logits


def _normal(model: nn.Module, seed: int) -> None:
    """Draw matrices from a normal distribution of deviation 0.02; biases are zero, gains one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def byte_llama(seed: int, dtype: torch.dtype) -> Llama:
    """Return a `Llama` over bytes, of width 96 with six layers."""
    with own_randomness():
        return Llama(seed).to(dtype)


def vit(seed: int, dtype: torch.dtype) -> ViT:
    """Return a `ViT` of width 64 with five layers."""
    with own_randomness():
        return ViT(seed).to(dtype)


def bert_large_layer() -> nn.Sequential:
    """Return the six linear layers of one encoder layer of BERT-Large, one behind the other."""
    layers: list[nn.Module] = []
    for into, out in [(1024, 1024)] * 4 + [(1024, 4096), (4096, 1024)]:
        layers += [nn.Linear(into, out), nn.GELU()]
    return nn.Sequential(*layers)
