"""A language model with two heads: what its factors are means over, beside sums by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.testing import compare
from tests.curvature import closing, factors, fill, preconditioner

SAMPLES, POSITIONS, WORDS, WIDTH = 4, 6, 11, 5
IGNORED = -100


class Encoder(nn.Module):
    """Words and places, one head of attention and a perceptron; keeps what its layers read.

    Args:
        picks: The flat places of the masked words, which alone the head of words reads; None for
            all.
    """

    def __init__(self, picks: Tensor | None = None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.picks = picks
        self.calls: dict[str, tuple[Tensor, Tensor]] = {}

    def run(self, name: str, x: Tensor) -> Tensor:
        output: Tensor = self.get_submodule(name)(x)
        output.retain_grad()
        self.calls[name] = x.detach(), output
        return output

    def encode(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight
        query, key, value = (self.run(name, x) for name in ("query", "key", "value"))
        x = x + (query @ key.mT).softmax(-1) @ value
        return x + self.run("outer", self.run("inner", x).tanh())


class Pretrained(Encoder):
    """Masked words, and whether the second sentence follows the first."""

    def __init__(self, picks: Tensor | None = None) -> None:
        super().__init__(picks)
        self.pooler, self.follows = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encode(ids)
        pooled = self.run("pooler", hidden[:, 0]).tanh()
        if self.picks is not None:
            hidden = hidden.flatten(0, 1)[self.picks]
        return self.run("decoder", hidden), self.run("follows", pooled)


class Answers(Encoder):
    """The first and the last word of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.span = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self.run("span", self.encode(ids)).unbind(-1)
        return start, end


def seeded(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def pretraining(masked: Tensor) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """The mean over masked words and that over sentences; 5, 1, 2 and 0 words are masked."""
    words = seeded(WORDS, SAMPLES, POSITIONS, seed=1).masked_fill(~masked, IGNORED)
    follows = seeded(2, SAMPLES, seed=2)

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        logits, next_logits = outputs
        labels = words if logits.dim() == 3 else words[masked]
        of_words = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
        return of_words + F.cross_entropy(next_logits, follows)

    return loss


def answering(outputs: tuple[Tensor, Tensor]) -> Tensor:
    start, end = outputs
    first, last = (seeded(POSITIONS, SAMPLES, seed=seed) for seed in (3, 4))
    return (F.cross_entropy(start, first) + F.cross_entropy(end, last)) / 2


def by_hand(x: Tensor, gradient: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The factors of a call, of this many samples with all their positions."""
    a = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1).flatten(0, -2)
    g = samples * gradient.flatten(0, -2)
    return a.T @ a / samples, g.T @ g / len(g)


MASKED = torch.arange(POSITIONS) < torch.tensor([5, 1, 2, 0]).unsqueeze(1)  # [samples, positions]


@pytest.mark.parametrize("task", ["words of all places", "masked words alone", "answers"])
@pytest.mark.parametrize("samples", [None, "batch"])
def test_factors_of_every_layer_count_the_samples(task: str, samples: str | None) -> None:
    ids = seeded(WORDS, SAMPLES, POSITIONS, seed=0)
    number = SAMPLES
    if task == "answers":
        model, loss = fill(Answers()), answering
    else:
        picks = None if task == "words of all places" else MASKED.flatten().nonzero().squeeze(1)
        model, loss = fill(Pretrained(picks)), pretraining(MASKED)
        if picks is None and samples is None:
            number = SAMPLES * POSITIONS  # each token has scores of words: tokens are the samples
    with closing(preconditioner(model, samples=samples)) as own:
        loss(model(ids)).backward()
        own.step()
        for name, (x, output) in model.calls.items():
            assert output.grad is not None
            a, g = by_hand(x, output.grad, number)
            found_a, found_g = factors(own, name)
            compare(found_a[0], a, f"A of {name}")
            compare(found_g[0], g, f"G of {name}")
