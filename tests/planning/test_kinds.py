"""Kinds of models, recognised by classes and shapes: small models with traits of families."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import soframe
from tests import kit

WIDTH = 12


class Parts(nn.Module):
    """Modules under names; it is not called."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def convolution(channels: int = 4, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


def cnn(**parts: nn.Module) -> nn.Module:
    """A convolutional net with further modules in its block, and a head."""
    block = Parts(conv=convolution(), **parts)
    return nn.Sequential(nn.Conv2d(3, 4, 3), block, convolution(), nn.Linear(4, 3))


def linear(**shapes: tuple[int, int]) -> Parts:
    return Parts(**{name: nn.Linear(into, out) for name, (into, out) in shapes.items()})


def tokens(part: nn.Module, norm: nn.Module | None = None) -> nn.Module:
    """A language model around a part, with a norm of features."""
    norm = nn.LayerNorm(WIDTH) if norm is None else norm
    return nn.Sequential(nn.Embedding(9, WIDTH), norm, part, nn.Linear(WIDTH, 9))


def patches(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.LayerNorm(WIDTH), part, nn.Linear(WIDTH, 3))


def lenet() -> nn.Module:
    layers = [nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh()]
    dense = [nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), *dense)


def convnext() -> nn.Module:
    """Patches, then depthwise convolutions and perceptrons behind layer norms."""
    block = [nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)]
    mlp = [nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)]
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), *block, *mlp, nn.Linear(8, 3))


def separate(width: int = WIDTH, keys: int = WIDTH) -> Parts:
    shapes = {"a": width, "b": keys, "c": keys, "d": width}
    return linear(**{name: (width, out) for name, out in shapes.items()})


def lstm_language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 5), nn.LayerNorm(5), nn.Linear(5, 9))


def squeeze() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 1, 1), nn.ReLU(), nn.Conv2d(1, 4, 1))


class Chain(nn.Module):
    """Layers of one width in one module, as people write perceptrons."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for index in range(len(widths) - 1):
            setattr(self, f"fc{index}", nn.Linear(widths[index], widths[index + 1]))


def frozen(model: nn.Module, trained: int) -> nn.Module:
    """A model of which the last layers alone are trained."""
    for layer in list(model.children())[:-trained]:
        layer.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "identities named attn": (lambda: cnn(attn=nn.Identity(), attn_last=nn.Identity()), "conv"),
    "squeeze and excitation": (lambda: cnn(attn=squeeze()), "conv"),
    "channel attention": (lambda: cnn(attn=linear(fc1=(16, 4), fc2=(4, 16))), "conv"),
    "LeNet": (lenet, "conv"),
    "one convolution": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(64, 3)), "conv"),
    "ConvNeXt": (convnext, "conv"),
    "attention pooling": (lambda: cnn(pool=nn.MultiheadAttention(4, 1)), "conv"),
    "LSTM with a norm": (lstm_language_model, "recurrent"),
    "convolutions and an LSTM": (lambda: cnn(rnn=nn.LSTM(4, 5)), "recurrent"),
    "fused projections": (lambda: patches(linear(x=(WIDTH, 3 * WIDTH), y=(WIDTH, WIDTH))), "trans"),
    "fused, fewer keys": (lambda: linear(x=(WIDTH, WIDTH + 6), y=(WIDTH, WIDTH)), "trans"),
    "queries apart": (
        lambda: linear(x=(WIDTH, WIDTH), y=(WIDTH, 2 * WIDTH), z=(WIDTH, WIDTH)),
        "trans",
    ),
    "separate projections": (lambda: tokens(separate(), nn.Identity()), "trans"),
    "fewer keys": (lambda: tokens(separate(keys=4), nn.Identity()), "trans"),
    "without a way back": (
        lambda: patches(linear(x=(WIDTH, WIDTH), y=(WIDTH, WIDTH), z=(WIDTH, WIDTH))),
        "trans",
    ),
    "without norms": (
        lambda: tokens(linear(x=(8, 8), y=(8, 8), z=(8, 8)), nn.Identity()),
        "trans",
    ),
    "torch's": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 24), "trans"),
    "a hybrid's stem": (
        lambda: nn.Sequential(convolution(), nn.TransformerEncoderLayer(WIDTH, 2, 24)),
        "trans",
    ),
    "mixer": (lambda: patches(nn.Linear(WIDTH, WIDTH)), "trans"),
    "state spaces": (lambda: tokens(nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)), "trans"),
    "perceptron": (lambda: Chain(2, 16, 16, 16, 16, 1), "regression"),
    "ratings": (
        lambda: nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 9), nn.Linear(9, 1)),
        "dense",
    ),
    "perceptron in a part": (lambda: Parts(body=Chain(2, 16, 16, 1)), "regression"),
    "two heads, and another way back": (lambda: linear(x=(8, 24), y=(8, 9), z=(12, 8)), "dense"),
    "perceptron, all alike": (lambda: Chain(16, 16, 16, 16, 16), "dense"),
    "inverted": (lambda: Chain(8, 24, 8, 8), "dense"),
    "gated": (lambda: linear(gate=(8, 16), up=(8, 16), down=(16, 8)), "dense"),
    "the upper layers are trained": (lambda: frozen(Chain(256, 64, 64, 64, 10), 3), "dense"),
    "a narrow layer is trained": (lambda: frozen(Chain(256, 96, 32, 96), 2), "dense"),
    "the head is trained": (lambda: frozen(lenet(), 1), "conv"),
    "the last convolution is trained": (lambda: frozen(cnn(), 2), "conv"),
    "low rank": (lambda: frozen(Chain(64, 96, 4, 96), 2), "adapters"),
    "low rank, and a head": (lambda: frozen(Chain(64, 96, 4, 96, 10), 3), "adapters"),
    "gated, fused": (lambda: linear(both=(8, 32), down=(16, 8)), "dense"),
}
KINDS = {"conv": "convolutional", "trans": "transformer"}


@pytest.mark.parametrize("name", MODELS)
def test_a_kind_is_seen_in_classes_and_shapes(name: str) -> None:
    build, kind = MODELS[name]
    assert soframe.recommend(build()).kind == KINDS.get(kind, kind)


# -- what is printed runs --------------------------------------------------------------------------


class Tied(nn.Module):
    """A language model whose head is its table, with nothing that K-FAC has a block for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A matrix for each expert, in raw parameters, around a small router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up, self.down = nn.Parameter(torch.rand(3, 4, 8)), nn.Parameter(torch.rand(3, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("ni,eio->neo", x, self.up).relu()
        outputs = torch.einsum("neo,eoi->nei", hidden, self.down)
        return (self.router(x).softmax(-1)[..., None] * outputs).sum(1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(torch.complex64)).abs()  # type: ignore[no-any-return]


class Functional(nn.Module):
    """A linear layer whose weight is used without calling it, beside a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ParameterDict({"weight": nn.Parameter(torch.rand(5, 4))})
        self.second = nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.first["weight"]).tanh()
        return self.second(hidden, hidden)  # type: ignore[no-any-return]


def reparametrised(*widths: int) -> nn.Module:
    """Layers whose weights K-FAC does not see."""
    model = Chain(*widths)
    return nn.Sequential(*map(weight_norm, model.children()))


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (Tied, "dense"),
        (Experts, "dense"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)), "dense"),
        (Complex, "dense"),
        (Functional, "dense"),
        (lambda: reparametrised(4, 8, 3), "dense"),
        (lambda: reparametrised(4, 8, 1), "dense"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "dense"),
    ],
    ids=[
        "tied",
        "experts",
        "norms",
        "complex",
        "functional",
        "weights",
        "a number",
        "some norms",
    ],
)
def test_what_is_printed_runs_where_k_fac_has_few_blocks(
    build: Callable[[], nn.Module], kind: str
) -> None:
    torch.manual_seed(0)
    model = build()
    advice = soframe.recommend(model)
    assert advice.kind == kind
    scope: dict[str, object] = {"model": model, "soframe": soframe}
    exec(advice.call, scope)
    x = torch.arange(6) % 9 if isinstance(model, Tied) else torch.rand(6, 4)
    target = torch.rand_like(model(x))

    def loss(model: nn.Module, step: int) -> Tensor:
        return (model(x) - target).square().mean()

    before = loss(model, 0).item()
    kit.train(model, loss, range(20), scope["optimizer"])  # type: ignore[arg-type]
    assert loss(model, 0).item() < before
