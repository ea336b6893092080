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

from experiments.data import CONTEXT, single_precision
from soframe.planning import workloads
from soframe.planning.workloads import Residual, convolution

AUTOENCODER_WIDTHS = (64, 256, 128, 64, 16)
CURVES_WIDTHS = (256, 128, 64, 32, 6)
MNIST_WIDTHS = (784, 250, 125, 60, 30)
PUBLISHED_WIDTHS = (784, 1000, 500, 250, 30)  # of Hinton and Salakhutdinov (2006)
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
    widths = list(encoder) + list(encoder[-2::-1])
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
    """GPT-2's layer with common operations alone, so that any derivative of it is one of them.

    Queries, keys and values share a matrix, and attention is written out.

    Args:
        sizes: Sizes of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(shape[-1])
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))
        return out


class GPT(nn.Module):
    """A decoder-only transformer: `(batch, length)` to logits `(batch, vocabulary, length)`.

    Weights are GPT-2's (Radford et al., 2019): normal with deviation 0.02, divided by the
    square root of the number of residual additions where a layer ends in one; biases are zero.

    Args:
        sizes: Sizes of the model.
        fused: Whether it is made for a GPU: its layers are `soframe.planning.workloads.Layer`, the
            head is the embedding's transpose and has no bias, and the logits are of single
            precision. Else its layers are `Layer`.
        seed: Seed of the initial weights.
    """

    def __init__(self, sizes: Sizes = BYTE_SIZES, *, fused: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.fused = fused
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        layers = (
            workloads.Layer(sizes.width, sizes.heads) if fused else Layer(sizes)
            for _ in range(sizes.layers)
        )
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=not fused)
        if fused:
            self.head.weight = self.tokens.weight
        self._initialise(sizes.layers, torch.Generator().manual_seed(seed))

    def _initialise(self, layers: int, generator: torch.Generator) -> None:
        """Draw the weights, smaller ones where an output is added to the residual stream."""
        for name, module in self.named_modules():
            tied = self.fused and module is self.head
            if isinstance(module, nn.Linear | nn.Embedding) and not tied:
                last = name.endswith((".out", ".narrow"))
                std = 0.02 / math.sqrt(2 * layers) if last else 0.02
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


class SmallLayer(nn.Module):
    """A layer of `SmallGPT`; each matrix is a module of its own, without a bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        inputs = self.norm_attention(x)
        parts = []
        for layer in (self.q, self.k, self.v):
            part = layer(inputs).view(batch, length, self.heads, -1)
            parts.append(part.transpose(1, 2))  # [batch, heads, length, width / heads]
        q, k, v = parts
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.narrow(F.relu(self.widen(self.norm_mlp(x))).square())
        return out


class SmallGPT(nn.Module):
    """A GPT over bytes in the style of modded-nanogpt: `(batch, length)` to logits, as `GPT`.

    The last matrix of each branch is zero at first, as in most entries of the optimization track.
    Entries that keep the norms of weights cannot begin there, and have larger weights
    (https://github.com/KellerJordan/modded-nanogpt/pull/272).

    Args:
        seed: Seed of the initial weights.
        kept: Whether the norms of hidden matrices are kept.
        width: Of hidden states.
        layers: How many.
        heads: Of attention.
    """

    def __init__(
        self, seed: int, *, kept: bool = False, width: int = 64, layers: int = 3, heads: int = 2
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(CONTEXT // 2, width)
        self.layers = nn.Sequential()
        for _ in range(layers):
            self.layers.append(SmallLayer(width, heads))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        gains = {"widen": 1.5, "out": 1.25, "narrow": 3.0} if kept else {"out": 0.0, "narrow": 0.0}
        gains["head"] = 0.0
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = gains.get(name.rpartition(".")[2], 1.0) / math.sqrt(3 * module.in_features)
                nn.init.normal_(module.weight, std=std, generator=generator)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        hidden = self.layers(F.rms_norm(hidden, hidden.shape[-1:]))
        logits: Tensor = self.head(self.norm(hidden))
        return logits.transpose(1, 2)


def small_gpt(seed: int, dtype: torch.dtype, *, kept: bool) -> SmallGPT:
    """Return a `SmallGPT` of width 64 with three layers."""
    with own_randomness():
        return SmallGPT(seed, kept=kept).to(dtype)


class Llama(workloads.Llama):
    """A small Llama over bytes (Touvron et al., 2023): `(batch, length)` to logits, as `GPT`."""

    def __init__(self, seed: int, width: int = 96, layers: int = 6, hidden: int = 256) -> None:
        super().__init__(BYTES, layers, width, 6, 2, hidden)
        _normal(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).transpose(1, 2)


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
