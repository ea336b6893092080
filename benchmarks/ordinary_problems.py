"""Ordinary problems: what people train with the first lines that they copy, in seconds.

Data come with scikit-learn and mlxtend, or are made. A problem has the same data for every seed,
split into train and held-out examples by the seed, which draws the weights, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import canvases
from experiments.data import digits
from experiments.libraries import require
from experiments.problems import Recurrent, Transformer

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """Data, a model and a loss.

    Attributes:
        inputs: ``[N, ...]``.
        targets: ``[N, ...]``.
        model: Makes the model, by torch's global generator.
        loss: The mean loss, from the model, inputs and targets.
        fisher_loss: The name of the loss of the task's Fisher; empty if soframe has none.
    """

    inputs: Tensor
    targets: Tensor
    model: Callable[[], nn.Module]
    loss: Objective
    fisher_loss: str = ""


def _of_outputs(function: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return function(model(inputs), targets)

    return loss


squared = _of_outputs(F.mse_loss)
cross_entropy = _of_outputs(F.cross_entropy)
binary = _of_outputs(F.binary_cross_entropy_with_logits)


def _standard(values: np.ndarray) -> Tensor:
    """Return columns with mean zero and variance one, float32."""
    tensor = torch.tensor(np.asarray(values), dtype=torch.float64)
    if tensor.dim() == 1:
        tensor = tensor.unsqueeze(1)
    deviation = tensor.std(0)
    return ((tensor - tensor.mean(0)) / (deviation + 1e-6)).float()


def perceptron(
    inputs: int, width: int, hidden: int, outputs: int, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Return linear layers with activations between them, ``hidden`` of them of one width."""
    layers: list[nn.Module] = []
    widths = [inputs, *[width] * hidden]
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _sklearn() -> Any:
    return require("sklearn.datasets")


def friedman1() -> Problem:
    """Six layers of GELU on a smooth function of five of twenty features."""
    x, y = _sklearn().make_friedman1(6000, 20, noise=0.1, random_state=0)
    model = partial(perceptron, 20, 64, 5, 1, nn.GELU)
    return Problem(_standard(x), _standard(y), model, squared, "mse")


def linear_regression() -> Problem:
    """A linear function of ten of thirty features, with noise."""
    x, y = _sklearn().make_regression(3000, 30, n_informative=10, noise=5.0, random_state=1)
    return Problem(_standard(x), _standard(y), lambda: perceptron(30, 64, 2, 1), squared, "mse")


def diabetes() -> Problem:
    """442 patients, ten features."""
    x, y = _sklearn().load_diabetes(return_X_y=True)
    return Problem(_standard(x), _standard(y), lambda: perceptron(10, 32, 2, 1), squared, "mse")


def heavy_tails() -> Problem:
    """A smooth function with noise of Student's t with two degrees of freedom."""
    generator = np.random.default_rng(3)
    x = generator.standard_normal((4000, 8))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.2 * generator.standard_t(2, 4000)
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y[:, None], dtype=torch.float32)
    return Problem(inputs, targets, lambda: perceptron(8, 64, 3, 1, nn.SiLU), squared, "mse")


def raw_prices() -> Problem:
    """Skewed prices around two, up to forty, features of several scales."""
    generator = np.random.default_rng(5)
    x = generator.lognormal(0.0, 0.7, (3000, 6))
    y = 40 * x[:, 0] * x[:, 1] + 25 * np.sqrt(x[:, 2]) + 10 * generator.standard_normal(3000)
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y[:, None] / 40, dtype=torch.float32)
    return Problem(inputs, targets, lambda: perceptron(6, 64, 3, 1), squared, "mse")


def breast_cancer() -> Problem:
    """569 patients, thirty features, two classes."""
    x, y = _sklearn().load_breast_cancer(return_X_y=True)
    model = partial(perceptron, 30, 32, 2, 2)
    return Problem(_standard(x), torch.tensor(y).long(), model, cross_entropy, "cross-entropy")


def imbalanced() -> Problem:
    """One positive example of twenty, a logit."""
    x, y = _sklearn().make_classification(
        4000, 20, n_informative=8, weights=[0.95], class_sep=0.8, random_state=4
    )
    targets = torch.tensor(y[:, None], dtype=torch.float32)
    model = partial(perceptron, 20, 64, 3, 1)
    return Problem(_standard(x), targets, model, binary, "binary-cross-entropy")


def many_classes() -> Problem:
    """Eight overlapping classes; layer norms and dropout."""
    x, y = _sklearn().make_classification(
        4000, 24, n_informative=12, n_classes=8, n_clusters_per_class=2, random_state=6
    )

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for into in (24, 64, 64):
            layers += [nn.Linear(into, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers, nn.Linear(64, 8))

    return Problem(_standard(x), torch.tensor(y).long(), model, cross_entropy, "cross-entropy")


def counts() -> Problem:
    """Poisson counts, whose rate is the exponential of the output."""
    generator = np.random.default_rng(7)
    x = generator.standard_normal((4000, 10))
    rate = np.exp(0.8 * np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.5)
    y = generator.poisson(rate)
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y[:, None], dtype=torch.float32)
    loss = _of_outputs(F.poisson_nll_loss)
    return Problem(inputs, targets, lambda: perceptron(10, 64, 3, 1, nn.Tanh), loss)


class _Ratings(nn.Module):
    """A rating from the embeddings of a user and a thing."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.thing = nn.Embedding(60, 16), nn.Embedding(80, 16)
        for table in (self.user, self.thing):
            nn.init.normal_(table.weight, std=0.3)
        self.layers = perceptron(48, 32, 2, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, thing = pairs.unbind(1)
        left, right = self.user(user), self.thing(thing)
        ratings: Tensor = self.layers(torch.cat([left, right, left * right], 1))
        return ratings


def ratings() -> Problem:
    """Ratings of 80 things by 60 users."""
    generator = torch.Generator().manual_seed(8)
    users = torch.randn(60, 2, generator=generator)
    things = torch.randn(80, 2, generator=generator)
    pairs = torch.stack(
        [torch.randint(count, (20000,), generator=generator) for count in (60, 80)], 1
    )
    noise = 0.3 * torch.randn(20000, generator=generator)
    scores = (users[pairs[:, 0]] * things[pairs[:, 1]]).sum(1) / 2 + noise
    return Problem(pairs, scores.unsqueeze(1), _Ratings, squared, "mse")


@lru_cache
def _digits() -> tuple[Tensor, Tensor]:
    pixels, labels = digits()
    return pixels.float(), labels.long()


_mnist = lru_cache(canvases.mnist)


def _small_mnist() -> tuple[Tensor, Tensor]:
    """Return images of 14 x 14 pixels, ``[N, 1, 14, 14]``."""
    pixels, labels = _mnist()
    return F.avg_pool2d(pixels.view(-1, 1, 28, 28), 2), labels


def _classes(pixels: Tensor, labels: Tensor, model: Callable[[], nn.Module]) -> Problem:
    return Problem(pixels, labels, model, cross_entropy, "cross-entropy")


def digits_mlp() -> Problem:
    """Three hidden layers on digits."""
    return _classes(*_digits(), lambda: perceptron(64, 64, 3, 10))


def mnist_mlp() -> Problem:
    """Two hidden layers on raw pixels."""
    return _classes(*_mnist(), lambda: perceptron(784, 128, 2, 10))


def few_rows() -> Problem:
    """200 digits in all."""
    pixels, labels = _digits()
    return _classes(pixels[:200], labels[:200], lambda: perceptron(64, 64, 2, 10))


def _convolution(into: int, out: int, norm: bool, stride: int = 1) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Conv2d(into, out, 3, stride, padding=1, bias=not norm)]
    if norm:
        layers.append(nn.BatchNorm2d(out))
    return [*layers, nn.ReLU()]


def _convolutional(norm: bool, stride: int) -> nn.Module:
    features = [*_convolution(1, 16, norm, stride), *_convolution(16, 32, norm, stride)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def digits_cnn() -> Problem:
    """Two convolutions without norms."""
    pixels, labels = _digits()
    return _classes(pixels.view(-1, 1, 8, 8), labels, lambda: _convolutional(False, 1))


def digits_cnn_norms() -> Problem:
    """Two convolutions with batch norm."""
    pixels, labels = _digits()
    return _classes(pixels.view(-1, 1, 8, 8), labels, lambda: _convolutional(True, 1))


def mnist_cnn() -> Problem:
    """Two strided convolutions without norms."""
    return _classes(*_small_mnist(), lambda: _convolutional(False, 2))


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inside)))


def residual() -> Problem:
    """Seven convolutions with shortcuts and batch norm."""
    pixels, labels = _digits()

    def model() -> nn.Module:
        blocks = [_ResidualBlock(16) for _ in range(3)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
        return nn.Sequential(*_convolution(1, 16, True), *blocks, *head)

    return _classes(pixels.view(-1, 1, 8, 8), labels, model)


def _autoencoder(widths: list[int], activation: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(into, out), activation()]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


def autoencoder() -> Problem:
    """Digits through a code of twelve numbers."""
    pixels, _ = _digits()
    widths = [64, 48, 32, 12, 32, 48, 64]
    return Problem(pixels, pixels, lambda: _autoencoder(widths, nn.Tanh), squared, "mse")


def mnist_autoencoder() -> Problem:
    """Images through a code of sixteen numbers, by the cross-entropy of pixels."""
    pixels, _ = _mnist()
    widths = [784, 128, 64, 16, 64, 128, 784]
    model = partial(_autoencoder, widths, nn.Tanh)
    return Problem(pixels, pixels, model, binary, "binary-cross-entropy")


class _RowClassifier(nn.Module):
    """torch's own encoder over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.places = nn.Parameter(torch.zeros(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(x) + self.places)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def transformer() -> Problem:
    """Attention over the rows of digits."""
    pixels, labels = _digits()
    return _classes(pixels.view(-1, 8, 8), labels, _RowClassifier)


class _LanguageModel(Transformer):
    """Two layers of causal attention; logits ``[N, T, symbols]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def language_model() -> Problem:
    """The next symbol of a chain of second order; a loss that is a mean over tokens."""
    generator = torch.Generator().manual_seed(9)
    symbols, length = 12, 16
    table = (3 * torch.randn(symbols, symbols, symbols, generator=generator)).softmax(2)
    rows = [torch.randint(symbols, (2000,), generator=generator) for _ in range(2)]
    for _ in range(length - 1):
        chances = table[rows[-2], rows[-1]]
        rows.append(torch.multinomial(chances, 1, generator=generator).squeeze(1))
    text = torch.stack(rows, 1)

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    model = partial(_LanguageModel, symbols, length)
    return Problem(text[:, :-1], text[:, 1:], model, loss, "cross-entropy")


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        logits: Tensor = self.head(states[:, -1])
        return logits


def gru() -> Problem:
    """The rows of digits, one after the other."""
    pixels, labels = _digits()
    return _classes(pixels.view(-1, 8, 8), labels, _Gated)


class _Residuals(nn.Module):
    """``u'' / (10 pi^2) + sin(pi x)``, and u at the edges, where it is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(1, 32, 2, 1, nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            u = self.net(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        inside = second / (10 * math.pi**2) + torch.sin(math.pi * x.detach())
        is_edge = (x.detach() <= 0) | (x.detach() >= 1)
        return torch.where(is_edge, u, inside)


def pinn() -> Problem:
    """Poisson's equation on random points, derivatives inside of the model."""
    generator = torch.Generator().manual_seed(10)
    points = torch.rand(2000, 1, generator=generator)
    points[::16] = (points[::16] > 0.5).float()  # the edges
    return Problem(points, torch.zeros_like(points), _Residuals, squared, "mse")


OPEN = {
    problem.__name__.replace("_", "-"): problem
    for problem in (
        friedman1,
        linear_regression,
        diabetes,
        heavy_tails,
        raw_prices,
        breast_cancer,
        imbalanced,
        many_classes,
        counts,
        ratings,
        digits_mlp,
        mnist_mlp,
        few_rows,
        digits_cnn,
        digits_cnn_norms,
        mnist_cnn,
        residual,
        autoencoder,
        mnist_autoencoder,
        transformer,
        language_model,
        gru,
        pinn,
    )
}
"""The problems on which defaults were chosen."""


def friedman3() -> Problem:
    """A deep narrow net on an angle."""
    x, y = _sklearn().make_friedman3(5000, noise=0.05, random_state=11)
    return Problem(_standard(x), _standard(y), lambda: perceptron(4, 48, 6, 1, nn.Tanh), squared)


def wine() -> Problem:
    """178 wines, three classes."""
    x, y = _sklearn().load_wine(return_X_y=True)
    return _classes(_standard(x), torch.tensor(y).long(), lambda: perceptron(13, 32, 2, 3))


def outliers() -> Problem:
    """A tenth of the targets is wrong; Huber's loss."""
    generator = np.random.default_rng(12)
    x = generator.uniform(-1, 1, (4000, 6))
    y = np.cos(3 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2
    y = np.where(generator.random(4000) < 0.1, y + 10 * generator.standard_normal(4000), y)
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y[:, None], dtype=torch.float32)
    loss = _of_outputs(F.smooth_l1_loss)
    return Problem(inputs, targets, lambda: perceptron(6, 64, 3, 1, nn.GELU), loss)


def group_norms() -> Problem:
    """Strided convolutions with group norm on MNIST."""

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for into, out in ((1, 16), (16, 32)):
            layers += [nn.Conv2d(into, out, 3, 2, padding=1), nn.GroupNorm(4, out), nn.SiLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))

    return _classes(*_small_mnist(), model)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(perceptron(64, 64, 1, 64), nn.ReLU())
        self.label, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.label(hidden), self.ink(hidden)


def two_heads() -> Problem:
    """The class of a digit, and its ink."""
    pixels, labels = _digits()

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        logits, ink = model(inputs)
        amount = inputs.mean(1, keepdim=True) * 5
        return F.cross_entropy(logits, targets) + F.mse_loss(ink, amount)

    return Problem(pixels, labels, _TwoHeads, loss)


def denoising() -> Problem:
    """Convolutions that clean noisy digits."""
    pixels, _ = _digits()
    clean = pixels.view(-1, 1, 8, 8)
    noisy = clean + 0.5 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(13))

    def model() -> nn.Module:
        inside = [*_convolution(1, 16, False), *_convolution(16, 16, False)]
        return nn.Sequential(*inside, nn.Conv2d(16, 1, 3, padding=1))

    return Problem(noisy, clean, model, squared)


def forecast() -> Problem:
    """The next value of a noisy sum of two waves, by an LSTM."""
    generator = torch.Generator().manual_seed(14)
    phases = 2 * math.pi * torch.rand(2000, 2, generator=generator)
    times = torch.arange(21.0)
    waves = torch.sin(0.5 * times + phases[:, :1]) + 0.5 * torch.sin(1.3 * times + phases[:, 1:])
    waves = waves + 0.05 * torch.randn(waves.shape, generator=generator)
    return Problem(waves[:, :20, None], waves[:, 20:], lambda: Recurrent(1, 32, 1), squared)


def several_labels() -> Problem:
    """Any number of five labels for a text of words."""
    x, y = _sklearn().make_multilabel_classification(4000, 30, n_classes=5, random_state=15)
    targets = torch.tensor(y, dtype=torch.float32)
    return Problem(_standard(x), targets, lambda: perceptron(30, 64, 2, 5, nn.SiLU), binary)


UNSEEN = {
    problem.__name__.replace("_", "-"): problem
    for problem in (
        friedman3,
        wine,
        outliers,
        group_norms,
        two_heads,
        denoising,
        forecast,
        several_labels,
    )
}
"""The problems that were run once, when all else was done."""


def boston() -> Problem:
    """506 towns, thirteen features, the price of a house."""
    x, y = require("mlxtend.data").boston_housing_data()
    return Problem(_standard(x), _standard(y), lambda: perceptron(13, 64, 2, 1), squared, "mse")


def miles_per_gallon() -> Problem:
    """392 cars, seven features."""
    x, y = require("mlxtend.data").autompg_data()
    features = x[:, :7].astype(float)
    model = partial(perceptron, 7, 48, 2, 1, nn.SiLU)
    return Problem(_standard(features), _standard(y), model, squared, "mse")


def friedman2() -> Problem:
    """An impedance of four parts, by four wide layers."""
    x, y = _sklearn().make_friedman2(5000, noise=50.0, random_state=16)
    model = partial(perceptron, 4, 128, 4, 1, nn.ReLU)
    return Problem(_standard(x), _standard(y), model, squared, "mse")


def unrolled() -> Problem:
    """The place of a point along a rolled sheet, with noise."""
    x, y = _sklearn().make_swiss_roll(4000, noise=0.3, random_state=17)
    return Problem(_standard(x), _standard(y), lambda: perceptron(3, 64, 3, 1, nn.Tanh), squared)


def moons() -> Problem:
    """Two crescents that overlap, a logit."""
    x, y = _sklearn().make_moons(3000, noise=0.25, random_state=18)
    targets = torch.tensor(y[:, None], dtype=torch.float32)
    return Problem(_standard(x), targets, lambda: perceptron(2, 32, 3, 1), binary)


def quantile() -> Problem:
    """The ninth decile of a target whose noise grows, by the pinball loss."""
    generator = np.random.default_rng(19)
    x = generator.uniform(-1, 1, (4000, 5))
    spread = 0.2 + 0.6 * np.abs(x[:, 1])
    y = np.sin(3 * x[:, 0]) + spread * generator.standard_normal(4000)
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y[:, None], dtype=torch.float32)

    def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
        error = targets - outputs
        return torch.maximum(0.9 * error, -0.1 * error).mean()

    model = partial(perceptron, 5, 64, 3, 1, nn.GELU)
    return Problem(inputs, targets, model, _of_outputs(pinball))


def waiting_times() -> Problem:
    """Waiting times of an exponential distribution, whose rate is the exponential of the output."""
    generator = np.random.default_rng(20)
    x = generator.standard_normal((4000, 8))
    log_rate = 0.7 * x[:, 0] + np.cos(2 * x[:, 1]) * x[:, 2]
    y = generator.exponential(np.exp(-log_rate))
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y[:, None], dtype=torch.float32)

    def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.clamp(max=20).exp() * targets - outputs).mean()

    return Problem(inputs, targets, lambda: perceptron(8, 64, 3, 1), _of_outputs(likelihood))


def three_targets() -> Problem:
    """Three smooth functions of the same eight features."""
    generator = np.random.default_rng(21)
    x = generator.uniform(-1, 1, (4000, 8))
    first = np.sin(3 * x[:, 0]) * x[:, 1]
    second = np.exp(x[:, 2]) * np.cos(2 * x[:, 3])
    third = np.abs(x[:, 4] + x[:, 5]) - x[:, 6] ** 2
    y = np.stack([first, second, third], 1) + 0.05 * generator.standard_normal((4000, 3))
    return Problem(_standard(x), _standard(y), lambda: perceptron(8, 64, 3, 3, nn.GELU), squared)


def shells() -> Problem:
    """Six classes, one around the other, in ten dimensions."""
    x, y = _sklearn().make_gaussian_quantiles(
        n_samples=5000, n_features=10, n_classes=6, random_state=22
    )
    return _classes(_standard(x), torch.tensor(y).long(), lambda: perceptron(10, 64, 3, 6))


def waves() -> Problem:
    """Which of five frequencies a noisy signal has, by convolutions over time."""
    generator = torch.Generator().manual_seed(23)
    labels = torch.randint(5, (3000,), generator=generator)
    phases = 2 * math.pi * torch.rand(3000, 1, generator=generator)
    frequencies = 0.25 * (labels[:, None] + 2)
    signals = torch.sin(frequencies * torch.arange(48.0) + phases)
    signals = signals + 1.0 * torch.randn(signals.shape, generator=generator)

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for into, out in ((1, 16), (16, 32)):
            layers += [nn.Conv1d(into, out, 5, 2, padding=2), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 5))

    return _classes(signals.unsqueeze(1), labels, model)


class _OfSet(nn.Module):
    """A number of a set: the sum of what a perceptron makes of each member."""

    def __init__(self) -> None:
        super().__init__()
        self.member, self.whole = perceptron(3, 32, 2, 32), perceptron(32, 32, 1, 1)

    def forward(self, members: Tensor) -> Tensor:
        inside: Tensor = self.whole(self.member(members).mean(1))
        return inside


def spread_of_set() -> Problem:
    """How far twelve points are from each other on average."""
    generator = torch.Generator().manual_seed(24)
    scales = 0.3 + 1.5 * torch.rand(3000, 1, 3, generator=generator)
    points = scales * torch.randn(3000, 12, 3, generator=generator)
    distances = torch.cdist(points, points).mean((1, 2))
    return Problem(points, _standard(distances.numpy()), _OfSet, squared)


LATER = {
    problem.__name__.replace("_", "-"): problem
    for problem in (
        boston,
        miles_per_gallon,
        friedman2,
        unrolled,
        moons,
        quantile,
        waiting_times,
        three_targets,
        shells,
        waves,
        spread_of_set,
    )
}
"""Problems written down after every default and rule, eight of them with one output; run once."""
