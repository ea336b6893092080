"""A table that is an embedding and its head: the dense Fishers of all uses, and their traces."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.damping.policies import RelativeDamping
from soframe.testing import compare
from tests import kit
from tests.curvature import closing, preconditioner, randn
from tests.distributed.harness import run_ranks
from tests.examples import examples

EVERY: Any = {"statistics_every": 1, "solve_every": 1, "kl_clip": 0.01}


class Model(nn.Module):
    """Tables and heads with one weight, around a layer; more of each, as in T5."""

    def __init__(self, words: int, size: int, more: int = 0, padding: int | None = None) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(size, words, bias=False) for _ in range(1 + more))
        self.tables = nn.ModuleList(nn.Embedding(words, size, padding) for _ in range(1 + more))
        self.between = nn.Linear(size, size)
        for tied in (*self.heads, *self.tables):
            tied.weight = self.heads[0].weight

    def forward(self, indices: Tensor) -> Tensor:
        features = sum(table(indices) for table in self.tables)
        hidden = self.between(features).tanh()
        return sum(head(hidden + number) for number, head in enumerate(self.heads))


def made(words: int, size: int, seed: int, **settings: Any) -> Model:
    model = Model(words, size, **settings).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed + number))
    return model


def sample_loss(output: Tensor) -> Tensor:
    """A loss of one sample, a sum over its positions, whose Hessian is the identity."""
    wanted = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return 0.5 * (output - wanted).square().sum()


def uses(model: Model, sample: Tensor, fisher: str) -> Iterator[Tensor]:
    """Yield the gradients ``[words, size]`` of one sample, by each use at each position.

    Each use at each position has a copy of the weight: plain products of one-hot rows. They are of
    the loss, or of each output, whose squares add up to the type-2 Fisher.
    """
    weight, flat = model.heads[0].weight.detach(), sample.flatten()
    count, padding = len(model.tables), model.tables[0].padding_idx
    copies = weight.repeat(2 * count, len(flat), 1, 1).requires_grad_()
    rows = nn.functional.one_hot(flat, len(weight)).to(weight)
    features: Any = 0
    for number in range(count):
        feature = torch.einsum("tw,tws->ts", rows, copies[number])
        kept = (flat != (-1 if padding is None else padding)).unsqueeze(1)
        features = features + torch.where(kept, feature, feature.detach())
    hidden = model.between(features).tanh()
    outputs: Any = 0
    for number in range(count):
        outputs = outputs + torch.einsum("ts,tws->tw", hidden + number, copies[count + number])
    values = outputs.flatten() if fisher == "type-2" else [sample_loss(outputs)]
    for value in values:
        (gradients,) = torch.autograd.grad(value, copies, retain_graph=True)
        yield from gradients.flatten(0, 1)


def traces(model: Model, batches: list[Tensor], fisher: str) -> tuple[Tensor, Tensor]:
    """The partial traces of the sum of all uses' Fishers, a mean over samples and over batches."""
    words, size = model.heads[0].weight.shape
    dense = torch.zeros(words * size, words * size, dtype=torch.float64)
    for batch in batches:
        for sample in batch:
            for gradient in uses(model, sample, fisher):
                vector = gradient.flatten()
                dense += torch.outer(vector, vector) / (len(batch) * len(batches))
    entries = dense.view(words, size, words, size)
    return entries.diagonal(dim1=0, dim2=2).sum(-1), torch.einsum("wsws->w", entries)


def backward(model: Model, batches: list[Tensor], own: soframe.Preconditioner | None) -> None:
    for batch in batches:
        output = model(batch)
        if own is not None:
            own.observe(output)
        (sum(map(sample_loss, output)) / (len(batch) * len(batches))).backward()


def check(model: Model, batches: list[Tensor], fisher: str, solver: str, damping: Any) -> None:
    """Hold the factors and the direction of a step to the dense Fisher."""
    words, size = model.heads[0].weight.shape
    observed = {"fisher": fisher, "loss": "squared-error"} if fisher == "type-2" else {}
    options = {
        "layers": "all",
        "solver": solver,
        "damping": damping,
        "samples": "batch",
        **observed,
    }
    with closing(preconditioner(model, **options)) as own:
        backward(model, batches, own if observed else None)
        raw = model.heads[0].weight.grad.clone()
        own.step()
        (block,) = [block for block in own.blocks if block.name == "heads.0"]
        left, right = traces(model, batches, fisher)
        compare(block.running["L"][0] * words, left, "L")
        compare(block.running["R"][0] * size, right, "R")
        trace = left.trace()
        mean = 1.0 if damping == 0.1 else trace / (words * size)
        if solver == "inverse":  # of factors with one mean eigenvalue: half of the damping each
            root = (0.1 * mean) ** 0.5
            scale = trace.sqrt()
            one = left / scale * (size / words) ** 0.5 + root * torch.eye(size).double()
            other = right / scale * (words / size) ** 0.5 + root
            direction = raw / other[:, None] @ torch.linalg.inv(one)
        else:
            matrix = torch.kron(right.diag(), left) / trace
            matrix += 0.1 * mean * torch.eye(len(matrix), dtype=matrix.dtype)
            direction = torch.linalg.solve(matrix, raw.flatten()).view(words, size)
        compare(model.heads[0].weight.grad, direction, "direction")


@given(
    words=st.integers(2, 5),
    size=st.integers(1, 4),
    positions=st.sampled_from([(), (1,), (3,), (2, 2)]),
    samples=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    more=st.integers(0, 1),
    padding=st.sampled_from([None, 0, 1]),
    fisher=st.sampled_from(["empirical", "type-2"]),
    solver=st.sampled_from(["eigen", "inverse"]),
    damping=st.sampled_from([0.1, RelativeDamping(0.1)]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(30))
def test_factors_are_partial_traces_of_all_uses(
    words: int,
    size: int,
    positions: tuple[int, ...],
    samples: list[int],
    more: int,
    padding: int | None,
    fisher: str,
    solver: str,
    damping: Any,
    seed: int,
) -> None:
    """Of any shapes, in micro-batches, with padding, of the empirical and of the type-2 Fisher."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(words, (n, *positions), generator=generator) for n in samples]
    check(made(words, size, seed, more=more, padding=padding), batches, fisher, solver, damping)


def trained(
    rank: int, ranks: int, strategy: str, steps: range, saved: Any = None
) -> tuple[Tensor, Any]:
    """The weights and states after some steps, of two micro-batches of this rank's samples."""
    model = made(5, 3, 0, more=1)
    options = {"layers": "all", "strategy": strategy, "solve_every": 3}
    with closing(preconditioner(model, **options)) as own:
        if saved is not None:
            model.load_state_dict(saved["model"])
            own.load_state_dict(saved["own"])

        def losses(model: nn.Module, step: int) -> Iterator[Tensor]:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randint(5, (8, 2), generator=generator).chunk(ranks)[rank]
            for micro in batch.chunk(2):
                yield sum(map(sample_loss, model(micro))) / len(batch)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = kit.train(model, losses, steps, kit.Averaging(model), own, optimizer)
        return weights, copy.deepcopy({"model": model.state_dict(), "own": own.state_dict()})


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy", [pytest.param("comm-opt", marks=pytest.mark.thorough), "mem-opt", "sharded"]
)
def test_four_ranks_take_the_steps_of_one_and_two_go_on(strategy: str) -> None:
    alone, _ = trained(0, 1, "comm-opt", range(5))
    for weights, _ in run_ranks(trained, 4, strategy, range(5)):
        compare(weights, alone, f"{strategy}, four ranks")
    _, saved = run_ranks(trained, 4, strategy, range(2))[0]
    for weights, _ in run_ranks(trained, 2, strategy, range(2, 5), saved):
        compare(weights, alone, f"{strategy}, resumed on two")


def test_a_head_with_a_bias_of_its_own_shares_its_table_alone() -> None:
    """While the bias is zero the table has the update of a head without one; the bias is raw."""
    updates = []
    for bias in (False, True):
        model, indices = made(7, 4, 0), torch.tensor([[0, 1, 2], [6, 3, 3], [5, 0, 4]])
        if bias:
            model.heads[0].bias = nn.Parameter(torch.zeros(7).double())
        with closing(soframe.Preconditioner(model, layers="all", lr=0.1, **EVERY)) as own:
            output = model(indices)
            (sum(map(sample_loss, output)) / 3).backward()
            raw = None if model.heads[0].bias is None else model.heads[0].bias.grad.clone()
            own.step()
            updates.append(model.heads[0].weight.grad.clone())
            assert raw is None or torch.equal(model.heads[0].bias.grad, raw)
    compare(updates[1], updates[0], "update of the table")


class LanguageModel(nn.Module):
    """A transformer of one layer as GPT-2 has it, with the head's weight in its table."""

    def __init__(self, words: int = 11, size: int = 6, length: int = 5) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, size), nn.Embedding(length, size)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = nn.Linear(size, 3 * size)
        self.inner, self.outer = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.head = nn.Linear(size, words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.words(indices) + self.places(torch.arange(indices.shape[1]))
        q, k, v = self.attention(self.first(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.outer(self.inner(self.second(x)).relu()))


def test_a_language_model_trains_with_a_block_of_its_table() -> None:
    torch.manual_seed(0)
    model, text = LanguageModel(), torch.arange(48).view(8, 6) * 3 % 11
    settings: dict[str, Any] = {**EVERY, "layers": "all", "damping": 1e-3, "kl_clip": 1.0}
    with closing(soframe.Optimizer(model, "kfac", lr=0.1, **settings)) as optimizer:
        (row,) = [row for row in optimizer.report() if row.parameter == "words.weight"]
        assert (row.block, row.method) == ("words", "kfac / inverse")
        assert row.note == "shared by words, head; R diagonal (11 rows)"
        losses = []
        for _ in range(12):
            output = model(text[:, :-1]).flatten(0, 1)
            losses.append(nn.functional.cross_entropy(output, text[:, 1:].flatten()))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert float(losses[-1].detach()) < 0.8 * float(losses[0].detach())
