"""The batch is what the root's inputs and outputs agree on; more forward passes, more samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.blocks.block import unpack
from soframe.settings import KL_CLIP
from soframe.testing import compare
from tests.curvature import blocks, closing, factors, fill, half_square, preconditioner, randn
from tests.distributed.harness import run_ranks

SAMPLES, POSITIONS, WORDS = 4, 7, 11


def with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


def directions(
    model: nn.Module, loss: Callable[[], Tensor], method: str = "kfac", **settings: Any
) -> dict[str, Tensor]:
    """The preconditioned gradients of a third step, of the same loss."""
    with closing(preconditioner(model, method=method, **{"solve_every": 2, **settings})) as own:
        for _ in range(3):
            model.zero_grad()
            loss().backward()
            own.step()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# -- the batch in another place than the first dimension ---------------------------------------


class Encoder(nn.Module):
    """A transformer layer in either layout, to a score for each sequence."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 1, 5, dropout=0.0, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(self.inner(x).tanh()).tanh()
        return self.head(hidden.mean(1 if self.batch_first else 0))


METHODS = ["kfac", "kfac-reduce", "ekfac", "foof", "tnt", "diagonal"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_sequences_first_are_sequences_second(method: str) -> None:
    x, y = randn(POSITIONS, SAMPLES, 3), randn(SAMPLES, 2, seed=1)
    first, second = fill(Encoder(True)), fill(Encoder(False))
    wanted = directions(
        first, lambda: half_square(first(x.transpose(0, 1)), y), method, layers="all"
    )
    found = directions(second, lambda: half_square(second(x), y), method, layers="all")
    for name, gradient in wanted.items():
        compare(found[name], gradient, name, rtol=1e-10)


class Rows(nn.Module):
    """A layer that is called with samples first, with positions first, or with rows of both."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "positions first":
            hidden = self.inner(x.transpose(0, 1)).transpose(0, 1)
        elif self.layout == "rows":
            hidden = self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        else:
            hidden = self.inner(x)
        return self.head(hidden.tanh().mean(1))


@pytest.mark.parametrize("layout", ["positions first", "rows"])
def test_forward_passes_of_one_count_have_numbers_of_samples_of_their_own(layout: str) -> None:
    x, y = randn(6, POSITIONS, 3), randn(6, 2, seed=1)
    found = []
    for model, sizes in ((fill(Rows("samples first")), [6]), (fill(Rows(layout)), [2, 4])):
        with closing(preconditioner(model, method="kfac-reduce", solve_every=1)) as own:
            for _ in range(2):
                model.zero_grad()
                own.count(6)
                loss = torch.zeros(()).double()
                for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
                    loss = loss + (model(part) - target).square().sum() / 12
                loss.backward()
                own.step()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for whole, in_parts in zip(*found, strict=True):
        compare(in_parts, whole, "direction", rtol=1e-9)


def test_a_layer_over_sequences_first_is_dense() -> None:
    """A and G by hand, of N = 4 and T = 7."""
    model, x = fill(nn.Sequential(Swapped(3, 2))), randn(POSITIONS, SAMPLES, 3)
    with closing(preconditioner(model)) as own:
        output = model(x)
        output.retain_grad()
        output.square().sum().div(SAMPLES).backward()
        own.step()
        a, g = factors(own, "0.inner")
        rows = with_ones(x).flatten(0, 1)
        compare(a[0], rows.T @ rows / SAMPLES, "A")
        assert output.grad is not None
        rows = (SAMPLES * output.grad).expand(POSITIONS, SAMPLES, 2).flatten(0, 1)
        compare(g[0], rows.T @ rows / (SAMPLES * POSITIONS), "G")


class Swapped(nn.Module):
    """Sums over the first dimension."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(into, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum(0)


@dataclass(slots=True)
class Scores:
    """What a model returns."""

    scores: Tensor


@pytest.mark.parametrize("out", [2, 1])
def test_outputs_in_a_dataclass(out: int) -> None:
    """Rows of scores, or a score for each sample."""

    class Wrapped(Swapped):
        def forward(self, x: Tensor) -> Any:
            return Scores(super().forward(x).squeeze(1))

    model, x = fill(Wrapped(3, out)), randn(POSITIONS, SAMPLES, 3)
    with closing(preconditioner(model)) as own:
        model(x).scores.square().sum().div(SAMPLES).backward()
        own.step()
        rows = with_ones(x).flatten(0, 1)
        compare(factors(own, "inner")[0][0], rows.T @ rows / SAMPLES, "A")


class Recogniser(nn.Module):
    """Images or sequences, the batch first, to scores ``[T, N, classes]`` for a CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x).tanh().permute(3, 0, 1, 2).flatten(2)
        return self.head(hidden).log_softmax(2)


def ctc(scores: Tensor) -> Tensor:
    times, samples = scores.shape[:2]
    targets = torch.arange(2 * samples).reshape(samples, 2) % 4 + 1
    lengths = torch.full((samples,), times), torch.full((samples,), 2)
    return F.ctc_loss(scores, targets, *lengths, reduction="sum") / samples


@pytest.mark.parametrize("method", METHODS)
def test_scores_of_sequences_first(method: str) -> None:
    """As of the same model with its outputs transposed."""

    class BatchFirst(Recogniser):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1)

    x = randn(SAMPLES, 1, 3, POSITIONS)
    first, second = fill(Recogniser()), fill(BatchFirst())
    wanted = directions(second, lambda: ctc(second(x).transpose(0, 1)), method)
    found = directions(first, lambda: ctc(first(x)), method)
    for name, gradient in wanted.items():
        compare(found[name], gradient, name, rtol=1e-10)


@pytest.mark.parametrize("shape", [(SAMPLES, 1, 3, 2 * SAMPLES), (SAMPLES, POSITIONS, 3)])
def test_scores_that_may_be_of_crops_are_asked_once(shape: tuple[int, ...]) -> None:
    """Scores [8, 4, 5] may be of two crops of each sample, [7, 4, 5] of 7 samples [4, 7, 3]."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.squeeze(1).mT if x.dim() == 4 else x
            return self.head(rows).transpose(0, 1).log_softmax(2)

    model, x = fill(Scored()), randn(*shape)
    with closing(preconditioner(model)) as own:
        ctc(model(x)).backward()
        with pytest.warns(UserWarning, match=r"either may be the batch.*4 samples.*count\(n\)"):
            own.step()
        own.count(SAMPLES)
        ctc(model(x)).backward()  # warnings are errors here
        own.step()
        rows = with_ones(x.squeeze(1).mT if x.dim() == 4 else x).flatten(0, 1)
        compare(factors(own, "head")[0][0], rows.T @ rows / SAMPLES, "A")


class Draws(nn.Module):
    """An autoencoder with K draws of the latent variable of each sample."""

    def __init__(self, draws: int) -> None:
        super().__init__()
        self.noise = randn(draws, SAMPLES, 2, seed=1)
        self.encode, self.decode = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        decoded = self.decode(self.encode(x) + self.noise)  # [K, N, 3]
        return -(decoded - x).square().sum(-1)  # log weights [K, N]


@pytest.mark.parametrize("draws", [SAMPLES, SAMPLES + 1, POSITIONS])
def test_draws_of_a_latent_variable_are_of_the_batch(draws: int) -> None:
    """Log weights [K, N] of importance weighting have the batch second, and are asked of."""
    model, x = fill(Draws(draws)), randn(SAMPLES, 3)
    with closing(preconditioner(model)) as own:
        model(x).logsumexp(0).neg().mean().backward()
        if draws == SAMPLES:
            own.step()
        else:
            with pytest.warns(UserWarning, match=r"either may be the batch.* N is taken for 4"):
                own.step()
        rows = with_ones((model.encode(x) + model.noise).detach()).flatten(0, 1)
        compare(factors(own, "decode")[0][0], rows.T @ rows / SAMPLES, "A")
        rows = with_ones(x)
        compare(factors(own, "encode")[0][0], rows.T @ rows / SAMPLES, "A")


class Recurrent(nn.Module):
    """Sequences to sequences, in either layout."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x).tanh())[0]


class Inside(Recurrent):
    """Takes the batch first, and transposes for its layer."""

    def __init__(self) -> None:
        super().__init__(batch_first=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


def loss_of_sequences(output: Tensor) -> Tensor:
    return output.square().sum() / SAMPLES


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_layer_of_sequences_first_shows_the_batch(method: str, is_inside: bool) -> None:
    """[T, N] to [T, N], or [N, T] transposed within the model; nothing is asked."""
    plain, x = fill(Recurrent(True)), randn(POSITIONS, SAMPLES, 3)
    wanted = directions(plain, lambda: loss_of_sequences(plain(x.transpose(0, 1))), method)
    model = fill(Inside() if is_inside else Recurrent(False))
    inputs = x.transpose(0, 1) if is_inside else x
    found = directions(model, lambda: loss_of_sequences(model(inputs)), method)
    compare(found["inner.weight"], wanted["inner.weight"], "inner", rtol=1e-10)


def test_a_root_that_takes_sequences_first_shows_the_batch() -> None:
    """It has the attribute of torch's layers, and no such layer."""
    model, x = fill(nn.Sequential(nn.Linear(3, 2))), randn(POSITIONS, SAMPLES, 3)
    model.batch_first = False  # type: ignore[assignment]
    with closing(preconditioner(model)) as own:
        loss_of_sequences(model(x)).backward()
        own.step()
        rows = with_ones(x).flatten(0, 1)
        compare(factors(own, "0")[0][0], rows.T @ rows / SAMPLES, "A")


class Packed(Recurrent):
    """Its layer gets packed sequences, which show no layout."""

    def forward(self, x: Tensor) -> Tensor:
        batch_first = self.last.batch_first
        lengths = torch.full((SAMPLES,), POSITIONS)
        packed = nn.utils.rnn.pack_padded_sequence(self.inner(x).tanh(), lengths, batch_first)
        return nn.utils.rnn.pad_packed_sequence(self.last(packed)[0], batch_first)[0]


@pytest.mark.parametrize("method", METHODS)
def test_sequences_of_which_no_layer_shows_the_batch_are_asked_once(method: str) -> None:
    """[T, N] to [T, N], packed for the layer; `count(n)` says which of the two is the batch."""
    first, second, x = fill(Packed(False)), fill(Packed(True)), randn(POSITIONS, SAMPLES, 3)
    with closing(preconditioner(first, method=method, solve_every=2)) as own:
        loss_of_sequences(first(x)).backward()
        with pytest.warns(UserWarning, match=r"batch_first=False: \[7, 4\] may be \[T, N\].*count"):
            own.step()
    gradients = []
    for model, inputs in ((first, x), (second, x.transpose(0, 1))):
        model.zero_grad()
        with closing(preconditioner(model, method=method, solve_every=2)) as own:
            own.count(SAMPLES)
            loss_of_sequences(model(inputs)).backward()
            own.step()
        gradients.append(model.inner.weight.grad)
    compare(*gradients, "inner", rtol=1e-10)


def test_positions_of_sequences_first_are_positions() -> None:
    """Of a mean over all positions nothing is asked with samples="positions"."""
    model, x = fill(Recurrent(False)), randn(POSITIONS, SAMPLES, 3)
    with closing(preconditioner(model, samples="positions")) as own:
        model(x).square().mean().backward()
        own.step()
        rows = with_ones(x).flatten(0, 1)
        compare(factors(own, "inner")[0][0], rows.T @ rows / len(rows), "A")


class Images(nn.Module):
    """Takes a list of images, as detectors do; with targets it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Conv2d(3, 2, 2), nn.Linear(8, 2)

    def forward(self, images: list[Tensor] | Tensor, targets: Tensor | None = None) -> Any:
        if isinstance(images, list):
            images = torch.stack(images)
        outputs = self.head(self.inner(images).flatten(1))
        return outputs if targets is None else {"loss": half_square(outputs, targets)}


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 4, 2)])
def test_a_list_of_images(shape: tuple[int, ...]) -> None:
    """A and G by hand: the samples are the images, of which some have N channels or pixels."""
    model, images, y = fill(Images()), randn(SAMPLES, *shape), randn(SAMPLES, 2)
    model.head = fill(nn.Linear(2 * (shape[1] - 1) * (shape[2] - 1), 2))
    with closing(preconditioner(model)) as own:
        half_square(model(list(images)), y).backward()
        own.step()
        rows = with_ones(model.inner(images).flatten(1)).detach()
        a, g = factors(own, "head")
        compare(a[0], rows.T @ rows / SAMPLES, "A")
        errors = model(list(images)).detach() - y
        compare(g[0], errors.T @ errors / SAMPLES, "G")


@pytest.mark.parametrize("method", METHODS)
def test_a_list_of_images_is_their_stack(method: str) -> None:
    images, y = randn(SAMPLES, 3, 3, 3), randn(SAMPLES, 2)
    listed, stacked = fill(Images()), fill(Images())
    found = directions(listed, lambda: half_square(listed(list(images)), y), method)
    wanted = directions(stacked, lambda: half_square(stacked(images), y), method)
    for name, gradient in wanted.items():
        compare(found[name], gradient, name, rtol=1e-10)


def test_a_list_to_a_loss_is_asked_once() -> None:
    model, images, y = fill(Images()), randn(SAMPLES, 3, 3, 3), randn(SAMPLES, 2)
    with closing(preconditioner(model)) as own:
        for step in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(list(images), y)["loss"].backward()
                own.step()
            texts = [str(one.message) for one in caught]
            assert len(texts) == (step == 0)
            assert all("list of tensors" in text and "count(n)" in text for text in texts)
            # The first four tensors are enough.
            assert all(text.count("[3, 3, 3]") == 4 and "[4, 2]" not in text for text in texts)
        own.count(SAMPLES)
        rows = with_ones(model.inner(images).flatten(1)).detach()
        compare(factors(own, "head")[0][0], rows.T @ rows / SAMPLES, "A")


class Graph(nn.Module):
    """Messages along edges ``[2, E]``; with ``batch`` a score for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor | None = None) -> Tensor:
        hidden = self.inner(x)
        hidden = hidden.index_add(0, edges[1], hidden[edges[0]]).tanh()
        if batch is not None:
            hidden = hidden.new_zeros(int(batch.max()) + 1, 4).index_add(0, batch, hidden)
        return self.head(hidden)


@pytest.mark.parametrize("pooled", [False, True])
def test_nodes_and_graphs(pooled: bool) -> None:
    """Nodes are samples if each has an output; else graphs are."""
    model, x = fill(Graph()), randn(6, 3)
    edges, batch = torch.tensor([[0, 1, 3, 4], [1, 2, 4, 5]]), torch.tensor([0, 0, 0, 1, 1, 2])
    samples = 3 if pooled else 6
    hidden: list[Tensor] = []
    with closing(preconditioner(model)) as own:
        handle = model.inner.register_forward_hook(lambda *call: hidden.append(call[2]))
        outputs = model(x, edges, batch if pooled else None)
        handle.remove()
        hidden[0].retain_grad()
        half_square(outputs, torch.zeros_like(outputs)).backward()
        own.step()
        rows = with_ones(x)
        a, g = factors(own, "inner")
        compare(a[0], rows.T @ rows / samples, "A")
        assert hidden[0].grad is not None
        rows = samples * hidden[0].grad
        compare(g[0], rows.T @ rows / 6, "G")
        errors = outputs.detach()
        compare(factors(own, "head")[1][0], errors.T @ errors / samples, "G of the head")


class Mixed(Graph):
    """The messages within three graphs of two nodes, by a matrix instead of a list of edges.

    Args:
        pooled: Takes ``[3, 2, features]`` and returns scores of graphs; else flat nodes, scores of
            nodes.
    """

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mix = torch.eye(6).double()
        mix[[1, 3, 5, 0], [0, 2, 4, 1]] = 1.0
        hidden = self.inner(x)
        hidden = (mix @ hidden.reshape(6, 4)).tanh()
        return self.head(hidden.reshape(3, 2, 4).sum(1) if self.pooled else hidden)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pooled", [False, True])
def test_flat_edges_are_a_matrix(pooled: bool, method: str) -> None:
    x = randn(3, 2, 3)
    edges, batch = torch.tensor([[0, 2, 4, 1], [1, 3, 5, 0]]), torch.arange(6) // 2
    flat, padded = fill(Graph()), fill(Mixed(pooled))

    def of_edges() -> Tensor:
        outputs = flat(x.flatten(0, 1), edges, batch if pooled else None)
        return half_square(outputs, torch.zeros_like(outputs))

    def of_matrix() -> Tensor:
        outputs = padded(x if pooled else x.flatten(0, 1))
        return half_square(outputs, torch.zeros_like(outputs))

    found, wanted = directions(flat, of_edges, method), directions(padded, of_matrix, method)
    for name, gradient in wanted.items():
        compare(found[name], gradient, name, rtol=1e-10)


def test_crops_of_a_sample_are_terms() -> None:
    """Each sample makes two rows of the outputs; with `"batch"` it stays one sample."""

    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(0, 1))

    x = randn(SAMPLES, 2, 3)
    rows = with_ones(x.flatten(0, 1))
    for samples, number in ((None, 2 * SAMPLES), ("batch", SAMPLES)):
        model = fill(Crops())
        with closing(preconditioner(model, samples=samples)) as own:
            model(x).square().mean(0).sum().backward()
            own.step()
            compare(factors(own, "inner")[0][0], rows.T @ rows / number, "A")


# -- language models ---------------------------------------------------------------------------


class Language(nn.Module):
    """Tokens to scores of the next ones, in the layouts that models have.

    Args:
        out: The features of the outputs; None for as many as there are words.
        how: The output: ``"scores"``, ``"flat"``, ``"with loss"`` or ``"loss"``.
    """

    def __init__(self, how: str = "scores", out: int = WORDS) -> None:
        super().__init__()
        self.how = how
        self.table, self.places = nn.Embedding(WORDS, 5), nn.Embedding(POSITIONS, 5)
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, out)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        places = self.places(torch.arange(tokens.shape[1])[None])
        scores = self.head(self.inner(self.table(tokens) + places).tanh())
        if self.how == "flat":
            return scores.flatten(0, 1)
        if labels is None:
            return scores
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": scores} if self.how == "with loss" else loss


class OfUser(Tensor):
    """A tensor of a kind whose memory is not looked at."""


def tokens(seed: int = 0, size: int = SAMPLES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (size, POSITIONS), generator=generator)


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    labels = ids.roll(-1, 1)
    if model.how == "with loss":
        return model(ids, labels=labels)["loss"]
    if model.how == "loss":
        return model(ids, labels)
    scores = model(ids)
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.flatten())


def language_factors(model: nn.Module, **settings: Any) -> dict[tuple[str, str], Tensor]:
    """Factors of a step in two micro-batches."""
    with closing(preconditioner(model, layers="all", **settings)) as own:
        for part in tokens().chunk(2):
            (language_loss(model, part) / 2).backward()
        own.step()
        return {(n, k): f.clone() for n, b in blocks(own).items() for k, f in b.running.items()}


@pytest.mark.parametrize("method", ["kfac", "ekfac", "foof"])
@pytest.mark.parametrize("how", ["scores", "flat", "with loss"])
def test_tokens_are_terms_of_a_language_model(how: str, method: str) -> None:
    """Nothing is declared; the factors are those of `samples="positions"`."""
    found = language_factors(fill(Language(how)), method=method, solve_every=2)
    wanted = language_factors(
        fill(Language(how)), method=method, solve_every=2, samples="positions"
    )
    for key, factor in wanted.items():
        compare(found[key], factor, str(key))


def test_a_language_models_factors_are_those_of_its_tokens() -> None:
    """A and G by hand: each token has a loss of its own."""
    model, ids = fill(Language()), tokens()
    with closing(preconditioner(model)) as own:
        language_loss(model, ids).backward()
        own.step()
        hidden = model.table(ids) + model.places.weight
        rows = with_ones(model.inner(hidden).tanh()).flatten(0, 1).detach()
        scores = model.head(rows[:, :-1]).detach().requires_grad_()
        F.cross_entropy(scores, ids.roll(-1, 1).flatten(), reduction="sum").backward()
        a, g = factors(own, "head")
        compare(a[0], rows.T @ rows / len(rows), "A")
        assert scores.grad is not None
        compare(g[0], scores.grad.T @ scores.grad / len(rows), "G")


def test_batch_stays_batch() -> None:
    found = language_factors(fill(Language()), samples="batch")
    tokens_alone = language_factors(fill(Language()))
    compare(found["inner", "A"], POSITIONS * tokens_alone["inner", "A"], "A")
    compare(found["inner", "G"], tokens_alone["inner", "G"] / POSITIONS**2, "G")


@pytest.mark.parametrize(
    ("how", "out"), [("scores", 5), ("scores", 1), ("flat", 5), ("loss", WORDS)]
)
def test_tokens_or_samples_is_asked_once(how: str, out: int) -> None:
    """Integers [N, T] to features of another number, or to a loss."""
    model = fill(Language(how, out))

    def loss() -> Tensor:
        if out == 1:
            return model(tokens()).square().mean()
        return language_loss(model, tokens() % 5)

    with closing(preconditioner(model)) as own:
        loss().backward()
        with pytest.warns(
            UserWarning, match=r"perhaps a mean over tokens.*'positions'.*count\(n\)"
        ):
            own.step()
        loss().backward()  # warnings are errors here
        own.step()
    for samples in ("batch", "positions", lambda: SAMPLES):
        with closing(preconditioner(model, samples=samples)) as own:
            loss().backward()
            own.step()


@pytest.mark.parametrize("batch", [torch.Tensor, OfUser])
def test_a_model_that_returns_nothing_is_seen_once(batch: type[Tensor]) -> None:
    """Its outputs are an attribute, of which the head is called outside."""

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> None:
            self.hidden = self.inner(x).tanh()

    model, x = fill(Silent()), randn(SAMPLES, 3)
    with closing(preconditioner(model)) as own:
        model(x.as_subclass(batch))
        model.head(model.hidden).square().sum().div(SAMPLES).backward()
        own.step()
        rows = with_ones(x)
        compare(factors(own, "inner")[0][0], rows.T @ rows / SAMPLES, "A")


def test_tokens_of_a_model_that_returns_nothing_are_asked_for() -> None:
    """Its loss is an attribute."""

    class Silent(Language):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> None:
            self.loss = super().forward(tokens, labels)

    model = fill(Silent("loss"))
    with closing(preconditioner(model)) as own:
        model(tokens(), tokens())
        model.loss.backward()
        with pytest.warns(UserWarning, match=r"perhaps a mean over tokens"):
            own.step()


def test_a_pooled_language_model_is_not_asked() -> None:
    """One row of outputs for each sequence."""

    class Pooled(Language):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
            return super().forward(tokens).mean(1)

    model = fill(Pooled())
    with closing(preconditioner(model)) as own:
        F.cross_entropy(model(tokens()), tokens()[:, 0]).backward()
        own.step()
        hidden = with_ones(model.table(tokens()) + model.places.weight).flatten(0, 1)
        compare(factors(own, "inner")[0][0], hidden.T @ hidden / SAMPLES, "A")


# -- several forward passes in one backward pass -----------------------------------------------


def perceptron(layers: int = 2) -> nn.Sequential:
    last = [nn.Tanh(), nn.Linear(5, 2)] if layers > 1 else []
    return fill(nn.Sequential(nn.Linear(3, 5 if layers > 1 else 2), *last))


CHUNKS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "equal": lambda x: list(x.chunk(4)),
    "one each": lambda x: list(x.split(1)),
    "unequal": lambda x: list(x.split([5, 3])),
    "columns": lambda x: list(x.T.contiguous().T.split(4)),
    "every other of more": lambda x: list(x.repeat_interleave(2, 0).clone()[::2].chunk(4)),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", CHUNKS)
def test_a_batch_in_chunks_is_the_batch(name: str, micro: int, layers: int) -> None:
    found = []
    for chunked in (True, False):
        model = perceptron(layers)

        def loss(x: Tensor, model: nn.Module = model, chunked: bool = chunked) -> Tensor:
            parts = CHUNKS[name](x) if chunked else [x]
            outputs = torch.cat([model(part) for part in parts])
            return (outputs.square().sum(1) + outputs[:, 0]).logsumexp(0)

        with closing(preconditioner(model)) as own:
            for number in range(micro):
                (loss(randn(8, 3, seed=number)) / micro).backward()
            own.step()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for key, gradient in found[1].items():
        compare(found[0][key], gradient, key, rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_in_chunks_is_the_batch_under_the_default_clip(method: str) -> None:
    """The clip shortens both alike."""

    def loss(model: nn.Module, chunks: int) -> Tensor:
        outputs = torch.cat([model(part) for part in randn(8, 3).chunk(chunks)])
        return (outputs.square().sum(1) + outputs[:, 0]).logsumexp(0)

    def direction(chunks: int, clip: float | None) -> dict[str, Tensor]:
        model = perceptron()
        return directions(model, lambda: loss(model, chunks), method, kl_clip=clip)

    whole, chunked, unclipped = direction(1, KL_CLIP), direction(4, KL_CLIP), direction(4, None)
    for key, gradient in whole.items():
        compare(chunked[key], gradient, key, rtol=1e-9)
        assert gradient.norm() < 0.9 * unclipped[key].norm()


class Sum(nn.Module):
    """Sums over the positions, which are the second dimension, or another one."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.inner, self.dim = nn.Linear(3, 4), dim

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh().sum(self.dim)


SLICES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "halves of sequences": lambda x: [x[:, :3], x[:, 3:]],
    "every other position": lambda x: [x[:, ::2], x[:, 1::2]],
    "halves of the batch": lambda x: list(x.chunk(2)),
    "halves of the batch without their ends": lambda x: list(x[:, :5].chunk(2)),
}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("name", SLICES)
def test_slices_of_sequences(name: str, is_transposed: bool) -> None:
    """N is the batch's, in whichever order the memory is, and nothing is asked."""
    model, x = fill(Sum()), randn(4, 6, 3)
    if is_transposed:
        x = randn(6, 4, 3).transpose(0, 1)
    parts = SLICES[name](x)
    with closing(preconditioner(model)) as own:
        outputs = [model(part) for part in parts]
        output = torch.cat(outputs) if "batch" in name else outputs[0] + outputs[1]
        output.square().sum(1).mean().backward()
        own.step()
        rows = torch.cat([with_ones(part).flatten(0, 1) for part in parts])
        compare(factors(own, "inner")[0][0], rows.T @ rows / 4, "A")


@pytest.mark.parametrize("of_positions", [False, True])
def test_slices_of_sequences_first(of_positions: bool) -> None:
    """Slices of ``[T, N, features]`` are other samples along the second dimension alone."""
    model, x = fill(Sum(0)), randn(6, 5, 3)
    with closing(preconditioner(model)) as own:
        first, second = [model(part) for part in x.split(3, 0 if of_positions else 1)]
        output = first + second if of_positions else torch.cat([first, second])
        output.square().sum(1).mean().backward()
        own.step()
        rows = with_ones(x).flatten(0, 1)
        compare(factors(own, "inner")[0][0], rows.T @ rows / 5, "A")


def test_every_second_sample_is_asked_once() -> None:
    """Taken for other samples: their memory is also that of steps of flat sequences."""
    model, x = perceptron(), randn(8, 3)

    def loss() -> Tensor:
        return torch.cat([model(x[::2]), model(x[1::2])]).square().sum(1).mean()

    with closing(preconditioner(model)) as own:
        loss().backward()
        with pytest.warns(UserWarning, match=r"2 forward passes .*mean over 8 terms.*count\(n\)"):
            own.step()
        loss().backward()  # warnings are errors here
        own.step()
        rows = with_ones(x)
        compare(factors(own, "0")[0][0], rows.T @ rows / 8, "A")


def test_forward_passes_of_two_losses_in_any_order() -> None:
    """Two forward passes with a backward pass each are two micro-batches."""
    found = []
    for together in (True, False):
        model, (x, y) = perceptron(), (randn(6, 3), randn(4, 3, seed=1))
        with closing(preconditioner(model)) as own:
            if together:
                first, second = model(x), model(y)
                (first.square().mean() / 2).backward()
                (second.square().mean() / 2).backward()
            else:
                for part in (x, y):
                    (model(part).square().mean() / 2).backward()
            own.step()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for key, gradient in found[1].items():
        compare(found[0][key], gradient, key)


def test_forward_passes_of_one_autocast_have_losses_of_their_own() -> None:
    """The casts of weights are parts of both graphs: no common backward pass."""
    found = []
    for together in (True, False):
        model, (x, y) = perceptron().float(), (randn(6, 3).float(), randn(4, 3, seed=1).float())
        with closing(preconditioner(model)) as own:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = [model(x), model(y)] if together else []
            for part in (x, y):
                with torch.autocast("cpu", torch.bfloat16):
                    output = outputs.pop(0) if together else model(part)
                (output.float().square().mean() / 2).backward()
            own.step()
            found.append(blocks(own)["0"].running["A"].clone())
    assert torch.equal(*found)


def test_forward_passes_of_one_graph_have_losses_of_their_own() -> None:
    """A generator's images go through the model twice, with a backward pass each."""
    model, made, x = perceptron(), fill(nn.Linear(3, 3)), randn(6, 3)
    with closing(preconditioner(model)) as own:
        images = made(x)
        outputs = [model(images), model(images)]
        for output in outputs:
            (output.square().sum(1).mean() / 2).backward(retain_graph=True)
        own.step()
        rows = with_ones(images.detach())
        compare(factors(own, "0")[0][0], rows.T @ rows / 6, "A")


def test_the_same_inputs_twice_are_the_same_samples() -> None:
    """As under dropout with two draws: positions of the samples."""
    model, x = perceptron(), randn(6, 3)
    with closing(preconditioner(model)) as own:
        (model(x) + model(x).tanh()).square().sum(1).mean().backward()
        own.step()
        rows = with_ones(x)
        compare(factors(own, "0")[0][0], 2 * rows.T @ rows / 6, "A")


class Step(nn.Module):
    """One step of a recurrent model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return (self.inner(x) + self.state(state)).tanh()


@pytest.mark.parametrize("layout", ["[N, T]", "[T, N]", "separate"])
def test_steps_are_positions(layout: str) -> None:
    """A model that is called once a step, on slices or with its own outputs."""
    model, x = fill(Step()), randn(6, 5, 3)
    steps = list(x.unbind(1))
    if layout == "[T, N]":
        steps = list(x.transpose(0, 1).contiguous().unbind(0))
    elif layout == "separate":
        steps = [step.clone() for step in steps]
    with closing(preconditioner(model)) as own:
        state = torch.zeros(6, 4).double()
        for step in steps:
            state = model(step, state)
        state.square().sum(1).mean().backward()
        own.step()
        rows = with_ones(x).flatten(0, 1)
        compare(factors(own, "inner")[0][0], rows.T @ rows / 6, "A")


class Timed(nn.Module):
    """A layer over samples, and one over their time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.time = nn.Linear(3, 4), nn.Linear(1, 4)

    def forward(self, time: Tensor, x: Tensor) -> Tensor:
        return (self.inner(x) + self.time(time)).tanh()


@pytest.mark.parametrize("times", [[0, 1], [0, 0]])
@pytest.mark.parametrize("inputs", ["a batch in halves", "the same samples", "separate batches"])
def test_a_time_that_is_expanded_does_not_tell_samples_apart(inputs: str, times: list[int]) -> None:
    """One time for all samples of a call is one number in memory, which calls may share."""
    model, time, x = fill(Timed()), randn(2), randn(8, 3)
    if inputs == "a batch in halves":
        parts, size = list(x.chunk(2)), 8
    elif inputs == "the same samples":
        parts, size = [x, x], 8
    else:
        parts, size = [x, randn(8, 3, seed=1)], 16
    with closing(preconditioner(model)) as own:
        calls = zip(times, parts, strict=True)
        outputs = torch.stack([model(time[i].expand(len(part), 1), part) for i, part in calls])
        (outputs.square().sum() / size).backward()
        asked = pytest.warns(UserWarning, match="2 forward passes .*mean over 16 terms")
        with asked if inputs == "separate batches" else nullcontext():
            own.step()
        rows = with_ones(torch.cat(parts))
        compare(factors(own, "inner")[0][0], rows.T @ rows / size, "A")


def test_two_batches_of_their_own_are_asked_once() -> None:
    """Labelled and unlabelled data, or pairs: taken for other samples."""
    model, x, y = perceptron(), randn(6, 3), randn(4, 3, seed=1)

    def loss() -> Tensor:
        return torch.cat([model(x), model(y)]).square().sum(1).mean()

    with closing(preconditioner(model)) as own:
        loss().backward()
        with pytest.warns(UserWarning, match=r"2 forward passes .*mean over 10 terms.*count\(n\)"):
            own.step()
        loss().backward()  # warnings are errors here
        own.step()
        rows = with_ones(torch.cat([x, y]))
        compare(factors(own, "0")[0][0], rows.T @ rows / 10, "A")


# -- nested tensors ------------------------------------------------------------------------------

LENGTHS = (3, 5, 2)


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("method", ["kfac", "foof"])
def test_sequences_of_several_lengths_have_no_padding(method: str) -> None:
    """The rows of a nested tensor are its values; N is the number of sequences."""
    parts = [randn(n, 3, seed=n) for n in LENGTHS]
    model = perceptron()
    with closing(preconditioner(model, method=method)) as own:
        for _ in range(2):  # micro-batches
            (model(nested(parts)).values().square().sum() / len(parts) / 2).backward()
        own.step()
        rows = with_ones(torch.cat(parts))
        compare(blocks(own)["0"].running["A"][0], rows.T @ rows / len(parts), "A")
        if method == "kfac":
            hidden = model[:2](torch.cat(parts)).detach()
            gradients = 2 * model[2](hidden).detach()
            compare(factors(own, "2")[1][0], gradients.T @ gradients / len(rows), "G")


def test_tokens_of_several_lengths() -> None:
    """A language model without padding: each token has a term."""
    model = fill(nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)))
    parts = [tokens(seed=n)[0, :n] for n in LENGTHS]
    with closing(preconditioner(model)) as own:
        F.cross_entropy(model(nested(parts)).values(), torch.cat(parts)).backward()
        own.step()
        rows = with_ones(model[0](torch.cat(parts))).detach()
        compare(factors(own, "1")[0][0], rows.T @ rows / len(rows), "A")


def test_methods_of_samples_refuse_nested_tensors_by_the_layers_name() -> None:
    model, parts = perceptron(), [randn(n, 3, seed=n) for n in LENGTHS]
    with closing(preconditioner(model, method="ekfac", solve_every=2)) as own:
        loss = model(nested(parts)).values().square().sum()
        with pytest.raises(ValueError, match=r"nested tensor.*pad them") as raised:
            loss.backward()
        assert "statistics of '2'" in "".join(raised.value.__notes__)
        own.reset_batch()


# -- ranks -------------------------------------------------------------------------------------


def on_ranks(rank: int, ranks: int, kind: str) -> list[Tensor]:
    """Factors of a step in two micro-batches on each rank's part of the batch."""
    models: dict[str, Callable[[], nn.Module]] = {
        "language": Language,
        "scores first": Recogniser,
        "sequences first": lambda: Encoder(False),
        "list": Images,
    }
    model: nn.Module = fill(models[kind]()) if kind in models else perceptron()
    with closing(preconditioner(model)) as own:
        for number in range(2):
            if kind == "language":
                part = tokens(number, size=8).chunk(ranks)[rank]
                loss = language_loss(model, part)
            elif kind == "scores first":
                part = randn(8, 1, 3, POSITIONS, seed=number).chunk(ranks)[rank]
                loss = ctc(model(part))
            elif kind == "sequences first":
                part = randn(POSITIONS, 8, 3, seed=number).chunk(ranks, 1)[rank]
                loss = model(part).square().sum(1).mean()
            elif kind == "list":
                part = randn(8, 3, 3, 3, seed=number).chunk(ranks)[rank]
                loss = model(list(part)).square().sum(1).mean()
            else:
                part = randn(8, 3, seed=number).chunk(ranks)[rank]
                loss = torch.cat([model(x) for x in part.chunk(2)]).square().sum(1).mean()
            (loss / 2).backward()
        own.step()
        return [
            unpack(stored, factor)
            for block in own.blocks
            for factor, stored in zip(block.factors, block.running.values(), strict=True)
        ]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["language", "scores first", "sequences first", "list", "chunks"])
def test_two_ranks_are_one_process(kind: str) -> None:
    alone = on_ranks(0, 1, kind)
    for found in run_ranks(on_ranks, 2, kind):
        for one, other in zip(found, alone, strict=True):
            compare(one, other, kind)
