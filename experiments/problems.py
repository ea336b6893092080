"""Small problems of many kinds, which the trust region was not tuned on.

Each trains in a few seconds of a processor. Data are synthetic, or come with scikit-learn; models
are small, and their last layer is called ``head``, which Muon leaves to AdamW.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.data import digits
from experiments.libraries import require
from experiments.tasks import Task, cross_entropy, half_square
from soframe.losses import BinaryCrossEntropy, Gaussian, SumLoss, Term
from soframe.losses.base import Loss


def _mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def _named(*layers: nn.Module) -> nn.Sequential:
    """A chain whose last layer is called ``head``."""
    model = nn.Sequential()
    for number, layer in enumerate(layers[:-1]):
        model.add_module(str(number), layer)
    model.add_module("head", layers[-1])
    return model


def _digits(count: int) -> tuple[Tensor, Tensor]:
    pixels, labels = digits()
    return pixels[:count].float(), labels[:count]


def logistic(seed: int) -> Task:
    features, labels = require("sklearn.datasets").load_breast_cancer(return_X_y=True)
    torch.manual_seed(seed)
    data = torch.tensor(features, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)
    return Task(_named(nn.Identity(), nn.Linear(30, 2)), "cross-entropy", cross_entropy, data)


def narrow_tanh(seed: int) -> Task:
    torch.manual_seed(seed)
    x = 2 * torch.rand(500, 3) - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:].square()
    widths = [3, *[10] * 20]
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), nn.Tanh()]
        nn.init.xavier_uniform_(layers[-2].weight)  # type: ignore[arg-type]
    return Task(_named(*layers, nn.Linear(10, 1)), "mse", _mse, (x, y))


def autoencoder(seed: int) -> Task:
    x, _ = _digits(1000)
    torch.manual_seed(seed)
    widths = [64, 40, 8, 40]
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), nn.Tanh()]
    model = _named(*layers, nn.Linear(40, 64))
    return Task(model, "squared-error", half_square, (x, x))


class Residuals(nn.Module):
    """``u'' + pi^2 sin(pi x) = 0`` with ``u(0) = u(1) = 0``, by derivatives inside of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        width = 24
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            u = self.head(self.net(x))
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        inside = second + 10 * math.pi**2 * torch.sin(math.pi * x.detach())
        edge = (x.detach() <= 0) | (x.detach() >= 1)
        return torch.where(edge, 10 * u, inside)


def pinn(seed: int) -> Task:
    torch.manual_seed(seed)
    x = torch.linspace(0, 1, 128).unsqueeze(1)
    return Task(Residuals(), "mse", _mse, (x, torch.zeros_like(x)))


class NaturalGaussian(Loss):
    """``b y^2 / 2 - a y + a^2 / (2 b) - log(b) / 2`` in the natural parameters ``(a, b)``.

    The outputs are ``[N, 2]``: ``a = mean / variance`` and ``b``, the precision.
    """

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """Return the Hessian of ``a^2 / (2 b) - log(b) / 2`` in ``(a, b)`` times vectors."""
        a, b = outputs.unbind(1)
        u, v = vectors.unbind(1)
        return torch.stack(
            [u / b - v * a / b**2, -u * a / b**2 + v * (a**2 / b**3 + 0.5 / b**2)], 1
        )

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        """Yield the columns of the Cholesky factor."""
        a, b = outputs.unbind(1)
        yield torch.stack([b.rsqrt(), -a / b**1.5], 1)
        yield torch.stack([torch.zeros_like(a), math.sqrt(0.5) / b], 1)


class NaturalNet(nn.Module):
    """Returns natural parameters, the second one positive."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, raw = self.head(self.net(x)).unbind(1)
        return torch.stack([a, F.softplus(raw) + 1e-3], 1)


def _spread(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x = 4 * torch.rand(400, 1) - 2
    return x, torch.sin(3 * x) + (0.05 + 0.3 * x.abs()) * torch.randn_like(x)


def natural_nll(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean of ``b y^2 / 2 - a y + a^2 / (2 b) - log(b) / 2``."""
    a, b = model(x).unbind(1)
    y = y.squeeze(1)
    loss: Tensor = (b * y**2 / 2 - a * y + a**2 / (2 * b) - b.log() / 2).mean()
    return loss


def gaussian_natural(seed: int) -> Task:
    data = _spread(seed)
    return Task(NaturalNet(), NaturalGaussian(), natural_nll, data)


def mean_variance_nll(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean of ``log-variance / 2 + (y - mean)^2 / (2 variance)``."""
    mean, log = model(x).unbind(1)
    loss: Tensor = (log / 2 + (y.squeeze(1) - mean) ** 2 * (-log).exp() / 2).mean()
    return loss


def gaussian_variance(seed: int) -> Task:
    data = _spread(seed)
    model = _named(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    return Task(model, Gaussian(), mean_variance_nll, data)


class Attention(nn.Module):
    """Causal self-attention with two heads, and a layer of twice the width behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.before(x)).view(samples, length, 6, width // 2).transpose(1, 2)
        q, k, v = parts.split(2, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        outputs: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return outputs


class Transformer(nn.Module):
    """Two layers of attention over sequences of symbols; returns ``[N, symbols, length]``."""

    def __init__(self, symbols: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(Attention(width), Attention(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.symbols(x) + self.places(torch.arange(x.shape[1]))
        logits: Tensor = self.head(self.layers(hidden)).transpose(1, 2)
        return logits


def transformer(seed: int) -> Task:
    """The next symbol of a chain of second order."""
    generator = torch.Generator().manual_seed(7)
    symbols, length = 12, 24
    table = (3 * torch.randn(symbols, symbols, symbols, generator=generator)).softmax(2)
    rows = [torch.randint(symbols, (512,), generator=generator) for _ in range(2)]
    for _ in range(length - 1):
        p = table[rows[-2], rows[-1]]
        rows.append(torch.multinomial(p, 1, generator=generator).squeeze(1))
    data = torch.stack(rows, 1)
    torch.manual_seed(seed)
    model = Transformer(symbols, length)
    parts = data[:, :-1], data[:, 1:]
    return Task(model, "cross-entropy", cross_entropy, parts)


class Recurrent(nn.Module):
    """An LSTM, whose last state is read."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        outputs: Tensor = self.head(states[:, -1])
        return outputs


def recurrent(seed: int) -> Task:
    """Rows of digits, one after the other."""
    x, y = _digits(1280)
    torch.manual_seed(seed)
    model = Recurrent(8, 32, 10)
    return Task(model, "cross-entropy", cross_entropy, (x.view(-1, 8, 8), y))


def cnn(seed: int) -> Task:
    x, y = _digits(1536)
    torch.manual_seed(seed)
    model = _named(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    data = x.view(-1, 1, 8, 8), y
    return Task(model, "cross-entropy", cross_entropy, data)


class Variational(nn.Module):
    """Returns logits of pixels, and the mean and log-variance of the code that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.Tanh())
        self.mean, self.log = nn.Linear(48, 6), nn.Linear(48, 6)
        self.decoder = nn.Sequential(nn.Linear(6, 48), nn.Tanh())
        self.head = nn.Linear(48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log = self.mean(hidden), self.log(hidden)
        code = mean + torch.randn_like(mean) * (log / 2).exp()
        return self.head(self.decoder(code)), mean, log


class Exponential(Loss):
    """``(e^s - s) / 2``, summed over features: of a log-variance's divergence from 0."""

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """See `Loss.hessian_product`."""
        return vectors * outputs.exp() / 2

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        """See `Loss.half_factor`."""
        for feature in range(outputs.shape[1]):
            column = torch.zeros_like(outputs)
            column[:, feature] = (outputs[:, feature].exp() / 2).sqrt()
            yield column


def _elbo(model: nn.Module, x: Tensor) -> Tensor:
    logits, mean, log = model(x)
    pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    loss: Tensor = (pixels + (mean.square() + log.exp() - log - 1).sum(1) / 2).mean()
    return loss


def vae(seed: int) -> Task:
    x, _ = _digits(1280)
    torch.manual_seed(seed)
    loss = SumLoss(
        [
            Term(BinaryCrossEntropy(features="sum"), output=0),
            Term("squared-error", output=1),
            Term(Exponential(), output=2),
        ]
    )
    return Task(Variational(), loss, _elbo, (x,))


class Graph(nn.Module):
    """Two graph convolutions (Kipf and Welling, 2017) over one graph."""

    def __init__(self, adjacency: Tensor, features: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.first, self.head = nn.Linear(features, 32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.adjacency @ self.first(x))
        outputs: Tensor = self.adjacency @ self.head(hidden)
        return outputs


def graph(seed: int) -> Task:
    """A community of each node in a stochastic block model."""
    generator = torch.Generator().manual_seed(3)
    nodes, classes = 300, 5
    y = torch.randint(classes, (nodes,), generator=generator)
    p = torch.where(y.unsqueeze(0) == y.unsqueeze(1), 0.06, 0.02)
    upper = (torch.rand(nodes, nodes, generator=generator) < p).float().triu(1)
    edges = upper + upper.T + torch.eye(nodes)
    root = edges.sum(1).rsqrt()
    x = torch.randn(nodes, 24, generator=generator) + 0.3 * F.one_hot(y, 24)
    torch.manual_seed(seed)
    model = Graph(root * edges * root.unsqueeze(1), 24, classes)
    return Task(model, "cross-entropy", cross_entropy, (x, y))


class NormedLayer(nn.Module):
    """A residual layer behind a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + F.silu(self.linear(self.norm(x)))
        return outputs


def norms(seed: int) -> Task:
    x, y = _digits(1536)
    torch.manual_seed(seed)
    layers = [NormedLayer(48) for _ in range(4)]
    model = _named(nn.Linear(64, 48), nn.BatchNorm1d(48), *layers, nn.Linear(48, 10))
    return Task(model, "cross-entropy", cross_entropy, (x, y))


class Factorisation(nn.Module):
    """``u_i . v_j + a_i + b_j`` of embeddings."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(rows, rank), nn.Embedding(columns, rank)
        self.row, self.column = nn.Embedding(rows, 1), nn.Embedding(columns, 1)
        for module in (self.rows, self.columns, self.row, self.column):
            nn.init.normal_(module.weight, std=0.3)

    def forward(self, pairs: Tensor) -> Tensor:
        i, j = pairs.unbind(1)
        both = (self.rows(i) * self.columns(j)).sum(1, keepdim=True)
        outputs: Tensor = both + self.row(i) + self.column(j)
        return outputs


def factorisation(seed: int) -> Task:
    generator = torch.Generator().manual_seed(5)
    rows, columns, rank = 80, 60, 6
    left, right = (torch.randn(n, rank, generator=generator) for n in (rows, columns))
    pairs = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[:2048]]
    y = (left[pairs[:, 0]] * right[pairs[:, 1]]).sum(1, keepdim=True)
    y = y + 0.1 * torch.randn(y.shape, generator=generator)
    torch.manual_seed(seed)
    return Task(Factorisation(rows, columns, rank), "mse", _mse, (pairs, y))


def multi_task(seed: int) -> Task:
    """The digit, and how its ink is spread over the rows."""
    x, y = _digits(1000)
    ink = x.view(-1, 8, 8).sum(2)

    def both(model: nn.Module, x: Tensor, y: Tensor, ink: Tensor) -> Tensor:
        outputs = model(x)
        square = (outputs[:, 10:] - ink).square().sum() / (2 * len(x))
        loss: Tensor = F.cross_entropy(outputs[:, :10], y) + square
        return loss

    loss = SumLoss([Term("cross-entropy", slice(0, 10)), Term("squared-error", slice(10, None))])
    torch.manual_seed(seed)
    model = _named(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 18))
    return Task(model, loss, both, (x, y, ink))


class ConvolutionalAutoencoder(nn.Module):
    """Two strided convolutions, a code of 12 numbers, and their transposes; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64, 12),
        )
        self.decoder = nn.Sequential(
            nn.Linear(12, 64),
            nn.GELU(),
            nn.Unflatten(1, (16, 2, 2)),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.GELU(),
        )
        self.head = nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.decoder(self.encoder(x)))
        return outputs


def _pixels(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x)
    return F.binary_cross_entropy_with_logits(logits, x, reduction="none").flatten(1).sum(1).mean()


def conv_autoencoder(seed: int) -> Task:
    x, _ = _digits(1280)
    torch.manual_seed(seed)
    data = (x.view(-1, 1, 8, 8),)
    loss = BinaryCrossEntropy(features="sum")
    return Task(ConvolutionalAutoencoder(), loss, _pixels, data)


def heavy_tails(seed: int) -> Task:
    """A smooth function, and noise of Student's t with two degrees of freedom."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(2048, 8, generator=generator)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.5 * x[:, 3:4].abs()
    normal, other = (torch.randn(2048, n, generator=generator) for n in (1, 2))
    y = y + 0.3 * normal / (other.square().mean(1, keepdim=True)).sqrt()
    torch.manual_seed(seed)
    model = _named(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    return Task(model, "mse", _mse, (x, y))


class Bag(nn.Module):
    """The mean embedding of a bag of words, and two layers."""

    def __init__(self, words: int, classes: int, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.hidden, self.head = nn.Linear(width, 32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.hidden(self.words(x).mean(1))))
        return logits


def bag(seed: int) -> Task:
    """Which of eight topics a bag of twenty words is from; words are as rare as Zipf's."""
    generator = torch.Generator().manual_seed(13)
    words, topics, count = 500, 8, 2048
    common = 1.0 / torch.arange(1, words + 1)
    table = common * (1.5 * torch.randn(topics, words, generator=generator)).exp()
    y = torch.randint(topics, (count,), generator=generator)
    x = torch.multinomial(table[y], 20, replacement=True, generator=generator)
    torch.manual_seed(seed)
    return Task(Bag(words, topics), "cross-entropy", cross_entropy, (x, y))


def label_noise(seed: int) -> Task:
    """Two moons of each class in ten dimensions; every fifth label is another."""
    generator = torch.Generator().manual_seed(17)
    count, classes = 3000, 6
    y = torch.randint(classes, (count,), generator=generator)
    angle = math.pi * torch.rand(count, generator=generator)
    arc = torch.stack([angle.cos(), angle.sin()], 1)
    places = torch.randn(classes, 2, generator=generator)
    lift = torch.randn(2, 10, generator=generator)
    x = (arc + places[y]) @ lift + 0.3 * torch.randn(count, 10, generator=generator)
    other = torch.randint(classes, (count,), generator=generator)
    y = torch.where(torch.rand(count, generator=generator) < 0.2, other, y)
    torch.manual_seed(seed)
    model = _named(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    return Task(model, "cross-entropy", cross_entropy, (x, y))


class SetNet(nn.Module):
    """Elements of a set, pooled by attention of one learned query, and two layers."""

    def __init__(self, features: int, outputs: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.query = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        embedded = torch.relu(self.embed(x))
        weights = (self.key(embedded) @ self.query).softmax(-1)
        pooled = (weights.unsqueeze(-1) * self.value(embedded)).sum(1)
        outputs: Tensor = self.head(torch.relu(self.hidden(pooled)))
        return outputs


def sets(seed: int) -> Task:
    """Of twelve numbers with colours, the sum of the three of the rarest colour."""
    generator = torch.Generator().manual_seed(19)
    count, size = 2048, 12
    numbers = torch.randn(count, size, 1, generator=generator)
    order = torch.rand(count, size, generator=generator).argsort(1)
    colours = F.one_hot((order >= 3).long() + (order >= 7).long(), 3).float()
    y = (numbers.squeeze(2) * colours[:, :, 0]).sum(1, keepdim=True)
    torch.manual_seed(seed)
    data = (torch.cat([numbers, colours], 2), y)
    return Task(SetNet(4, 1), "mse", _mse, data)


def denoising(seed: int) -> Task:
    """Digits from digits with noise, which is new in each batch."""
    x, _ = _digits(1280)
    torch.manual_seed(seed)
    model = _named(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 64))

    def criterion(model: nn.Module, x: Tensor) -> Tensor:
        return half_square(model, x + 0.3 * torch.randn_like(x), x)

    return Task(model, "squared-error", criterion, (x,))


class Experts(nn.Module):
    """A mixture of four small nets by a softmax of the input."""

    def __init__(self, features: int, experts: int = 4, width: int = 24) -> None:
        super().__init__()
        self.gate = nn.Linear(features, experts)
        self.first = nn.ModuleList(nn.Linear(features, width) for _ in range(experts))
        self.head = nn.Linear(width * experts, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        hidden = [torch.tanh(layer(x)) * weights[:, n, None] for n, layer in enumerate(self.first)]
        outputs: Tensor = self.head(torch.cat(hidden, 1))
        return outputs


def experts(seed: int) -> Task:
    """Another waved surface in each of four quarters of the plane, with a little noise."""
    generator = torch.Generator().manual_seed(23)
    x = 2 * torch.randn(3000, 2, generator=generator)
    quarter = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    waves = torch.randn(4, 2, generator=generator)
    y = torch.sin((x * waves[quarter]).sum(1, keepdim=True)) + 0.5 * quarter[:, None]
    y = y + 0.05 * torch.randn(y.shape, generator=generator)
    torch.manual_seed(seed)
    return Task(Experts(2), "mse", _mse, (x, y))


class Ranking(nn.Module):
    """How much more a user wants one thing than another, by embeddings and a linear head."""

    def __init__(self, users: int, things: int, width: int = 12) -> None:
        super().__init__()
        self.user, self.thing = nn.Embedding(users, width), nn.Embedding(things, width)
        self.head = nn.Linear(width, 1, bias=False)
        for table in (self.user, self.thing):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, triples: Tensor) -> Tensor:
        user, chosen, other = triples.unbind(1)
        difference = self.thing(chosen) - self.thing(other)
        outputs: Tensor = self.head(self.user(user) * difference)
        return outputs


def ranking(seed: int) -> Task:
    """Choices of 100 users between two of 150 things, a tenth of them by mistake."""
    generator = torch.Generator().manual_seed(29)
    users, things, count = 100, 150, 6000
    tastes, kinds = (torch.randn(n, 5, generator=generator) for n in (users, things))
    who = torch.randint(users, (count,), generator=generator)
    pair = torch.randint(things, (count, 2), generator=generator)
    better = (tastes[who, None] * kinds[pair]).sum(2).argmax(1)
    mistaken = torch.rand(count, generator=generator) < 0.1
    better = torch.where(mistaken, 1 - better, better)
    rows = torch.arange(count)
    triples = torch.stack([who, pair[rows, better], pair[rows, 1 - better]], 1)

    def criterion(model: nn.Module, triples: Tensor) -> Tensor:
        return F.softplus(-model(triples)).mean()

    torch.manual_seed(seed)
    loss = "binary-cross-entropy"
    return Task(Ranking(users, things), loss, criterion, (triples,))


#: By name: its maker, a few words, and the examples of a step, None for all of them.
PROBLEMS = {
    "logistic": (logistic, "logistic regression, raw ill-conditioned features", None),
    "narrow-tanh": (narrow_tanh, "20 narrow layers, tanh", None),
    "autoencoder": (autoencoder, "autoencoder of digits", None),
    "pinn": (pinn, "Poisson's equation, derivatives inside of the model", None),
    "gaussian-natural": (gaussian_natural, "Gaussian likelihood, natural parameters", None),
    "gaussian-variance": (gaussian_variance, "Gaussian likelihood, mean and log-variance", None),
    "transformer": (transformer, "transformer", 32),
    "recurrent": (recurrent, "LSTM", 64),
    "cnn": (cnn, "convolutions on digits", 128),
    "vae": (vae, "variational autoencoder", 128),
    "graph": (graph, "graph convolutions", None),
    "norms": (norms, "residual layers with norms", 128),
    "factorisation": (factorisation, "matrix factorisation", 256),
    "multi-task": (multi_task, "classes and a regression, ReLU", None),
    "conv-autoencoder": (conv_autoencoder, "convolutional autoencoder", 64),
    "heavy-tails": (heavy_tails, "regression, heavy-tailed noise", 64),
    "bag": (bag, "bags of embedded words", 64),
    "label-noise": (label_noise, "classes with wrong labels", 100),
    "sets": (sets, "attention over sets", 64),
    "denoising": (denoising, "denoising autoencoder", 64),
    "experts": (experts, "mixture of experts", 64),
    "ranking": (ranking, "choices between two things", 128),
}

#: Problems on which the trust regions were run only once all else was done.
UNSEEN = (
    "graph",
    "norms",
    "factorisation",
    "multi-task",
    "conv-autoencoder",
    "heavy-tails",
    "bag",
    "label-noise",
    "sets",
    "denoising",
    "experts",
    "ranking",
)
