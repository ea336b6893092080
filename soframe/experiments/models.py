"""The models of the experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from soframe.experiments.precision import single_precision

#: Widths of the digits autoencoder's encoder; the decoder mirrors them.
AUTOENCODER_WIDTHS = (64, 256, 128, 64, 16)

#: Likewise of the autoencoder of curves.
CURVES_WIDTHS = (256, 128, 64, 32, 6)


def digits_autoencoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A deep tanh autoencoder, 64-256-128-64-16 and back; see `autoencoder`.

    Args:
        seed: Of the initial weights.
        dtype: The floating type of the parameters.

    Returns:
        A model from `(batch, 64)` to `(batch, 64)`.
    """
    return autoencoder(AUTOENCODER_WIDTHS, seed, dtype)


def curves_autoencoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A deep tanh autoencoder, 256-128-64-32-6 and back; see `autoencoder`.

    Args:
        seed: Of the initial weights.
        dtype: The floating type of the parameters.

    Returns:
        A model from `(batch, 256)` to `(batch, 256)`.
    """
    return autoencoder(CURVES_WIDTHS, seed, dtype)


def autoencoder(encoder: Sequence[int], seed: int, dtype: torch.dtype) -> nn.Sequential:
    """A deep tanh autoencoder.

    Deep autoencoders are the classical test of second-order methods: no normalisation, no skip
    connections, a narrow middle (Hinton and Salakhutdinov 2006; Martens 2010). Hidden layers are
    tanh, the code and the reconstruction are linear. Weights are Xavier uniform, biases zero.

    Args:
        encoder: Widths of the encoder, the input's first; the decoder mirrors them.
        seed: Of the initial weights.
        dtype: The floating type of the parameters.

    Returns:
        A model from `(batch, encoder[0])` to the same.
    """
    widths = (*encoder, *encoder[-2::-1])
    code = len(encoder) - 2
    last = len(widths) - 2
    layers: list[nn.Module] = []
    with own_randomness():
        for index, (width_in, width_out) in enumerate(pairwise(widths)):
            layers.append(nn.Linear(width_in, width_out))
            if index not in (code, last):
                layers.append(nn.Tanh())
    model = nn.Sequential(*layers)
    _initialise(model, seed, gain=1.0)
    return model.to(dtype)


class DigitsCNN(nn.Module):
    """Three convolutions, the second with stride 2, and two linear layers.

    There is no normalisation layer, so that every parameter belongs to a layer that K-FAC covers.
    It maps `(batch, 1, 8, 8)` to `(batch, 10)` logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape `(batch, 10)` for images of shape `(batch, 1, 8, 8)`."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def digits_cnn(seed: int = 0, dtype: torch.dtype = torch.float32) -> DigitsCNN:
    """A `DigitsCNN` with Xavier uniform weights of gain sqrt(2), made for ReLU.

    Args:
        seed: Of the initial weights.
        dtype: The floating type of the parameters.

    Returns:
        The model.
    """
    with own_randomness():
        model = DigitsCNN()
    _initialise(model, seed, gain=nn.init.calculate_gain("relu"))
    return model.to(dtype)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Keeps initial weights off the caller's seed, and off its default dtype.

    Yields:
        Nothing. Parameters are made in single precision, whatever torch's default is.
    """
    with single_precision(), torch.random.fork_rng(devices=[]):
        yield


def _initialise(model: nn.Module, seed: int, gain: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight, gain=gain, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
