"""Models and training runs that are the same on a processor and on a GPU."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from tests.curvature import fill, randn

DEVICE = torch.device(os.environ.get("SOFRAME_GPU", "cuda"))
"""Where the tests of this folder run; ``cpu`` is for a look at the tests themselves."""
NEEDS_GPU = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"
)
ROTATED = {"ekfac", "soap", "soap-muon", "soap-normuon", "kl-soap", "tnt"}
"""Methods that scale the coordinates of eigenbases. Where eigenvalues are equal, as those of a null
space are, rounding decides on a basis; the layers of ``"square"`` have no such factors."""
SAMPLES, CLASSES, TOKENS = 24, 5, 4


class Tokens(nn.Module):
    """An embedding, a layer of a transformer, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[N, classes]`` of tokens ``[N, T]``."""
        return self.head(self.norm(self.layer(self.embedding(tokens)))[:, -1])


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, classes]`` of ``[N, T, 5]``."""
        return self.head(self.lstm(x)[0][:, -1])


class Others(nn.Module):
    """Attention to something else, a bag, a GRU and convolutions of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 6, mode="sum")
        self.along = nn.Conv1d(1, 4, 3, padding=1, padding_mode="circular")
        self.back = nn.ConvTranspose1d(4, 6, 3, padding=1, bias=False)  # a norm takes it off
        self.norm = nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.gru = nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[N, classes]`` of tokens ``[N, T]``."""
        of_bag = self.bag(tokens).unsqueeze(1)
        seen = self.norm(self.back(self.along(of_bag).tanh())).mT
        attended, _ = self.attention(of_bag, seen, seen, need_weights=False)
        return self.head(self.gru(attended + seen)[0][:, -1])


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=4),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 6, 1),
        nn.Flatten(),
        nn.Linear(6 * 9, CLASSES),
    )


def _mlp(into: int, first: int, second: int) -> nn.Module:
    hidden = [nn.Linear(into, first), nn.Tanh(), nn.Linear(first, second), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(second, CLASSES))


def _dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES)
    )


def _square() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, CLASSES)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "square": (_square, lambda seed: randn(SAMPLES, 5, seed=seed)),
    "dense": (_dense, lambda seed: randn(SAMPLES, 5, seed=seed)),
    "images": (_images, lambda seed: randn(SAMPLES, 3, 8, 8, seed=seed)),
    "tokens": (Tokens, lambda seed: (3 * randn(SAMPLES, TOKENS, seed=seed)).long() % 7),
    "others": (Others, lambda seed: (3 * randn(SAMPLES, TOKENS, seed=seed)).long() % 7),
    "recurrent": (Recurrent, lambda seed: randn(SAMPLES, TOKENS, 5, seed=seed)),
}
"""What makes a model and the inputs of a step, on the processor, in float64."""


def model_on(device: torch.device, name: str) -> nn.Module:
    """Return a model with the same weights on every device."""
    with torch.device("cpu"):  # whatever the default device is
        model = fill(MODELS[name][0]())
    return model.to(device)


def batch_on(device: torch.device, name: str, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a step."""
    with torch.device("cpu"):
        inputs, targets = MODELS[name][1](step), torch.arange(SAMPLES) * (step + 2) % CLASSES
    return inputs.to(device), targets.to(device)


def method_of(name: str) -> Any:
    """Return a method whose products are of full precision on every device."""
    kind = soframe.available("method")[name]
    parameters = inspect.signature(kind).parameters
    # NewtonMuon and its kin hand their settings on.
    return kind(dtype="float64") if {"dtype", "settings"} & parameters.keys() else name


@dataclass
class Trained:
    """What has become of a run.

    Attributes:
        weights: On the processor.
        losses: Of the steps.
        model: Where it was trained.
        optimizer: Likewise.
    """

    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    model: Any = None
    optimizer: Any = None


def train(
    device: torch.device,
    name: str,
    make: Callable[[nn.Module], Any],
    *,
    steps: int = 4,
    closure: bool = False,
    observe: bool = False,
    seed: int = 0,
) -> Trained:
    """Train a model, and return its weights.

    Args:
        device: Where.
        name: Of `MODELS`.
        make: Makes an optimizer, or a pair of a preconditioner and an optimizer.
        steps: How many.
        closure: Whether the optimizer takes its steps by a closure without a backward pass.
        observe: Whether the preconditioner is shown the outputs.
        seed: Of what is drawn.
    """
    model = model_on(device, name)
    made = make(model)
    torch.manual_seed(seed)
    optimizers = made if isinstance(made, tuple) else (made,)
    losses = []
    for step in range(steps):
        inputs, targets = batch_on(device, name, step)

        def loss(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            outputs = model(inputs)
            if observe:
                optimizers[0].observe(outputs)
            return nn.functional.cross_entropy(outputs, targets)

        if closure:
            losses.append(float(torch.as_tensor(made.step(loss), device="cpu").detach()))
            continue
        model.zero_grad()
        value = loss()
        value.backward()
        losses.append(float(value.detach()))
        for one in optimizers:
            one.step()
    weights = {key: p.detach().cpu().clone() for key, p in model.named_parameters()}
    return Trained(weights, losses, model, made)


def assert_same(one: Trained, other: Trained, tolerance: float = 1e-7) -> None:
    """Two runs must have led to the same weights."""
    for key, weight in one.weights.items():
        torch.testing.assert_close(
            other.weights[key],
            weight,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, k=key: f"{k}: {m}",
        )


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Collect the places at which the host waits for the GPU, as torch warns of them."""
    found: list[str] = []
    if DEVICE.type != "cuda":
        yield found
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [f"{w.filename}:{w.lineno}" for w in seen if "synchroni" in str(w.message)]
