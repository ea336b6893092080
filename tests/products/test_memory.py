"""The bytes of fits and scores: of one batch, and the same for any number of batches."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import soframe
from tests.curvature import fill, randn
from tests.products.kinds import Batch, loss

WIDTH, QUERIES, SAMPLES = 48, 4, 8


class Live(TorchDispatchMode):
    """Counts the bytes of storages that are made within it and are alive: now, and the most."""

    def __init__(self, *earlier: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in earlier}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def network(layers: int) -> nn.Module:
    """Return linear layers of the same width."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return fill(nn.Sequential(*modules[:-1]))


def data(number: int, size: int) -> list[Batch]:
    seeds = range(number)
    inputs = [randn(size, WIDTH, seed=seed) for seed in seeds]
    targets = [randn(size, WIDTH, seed=50 + seed) for seed in seeds]
    return list(zip(inputs, targets, strict=True))


def held(curvature: soframe.Curvature, *batches: Batch) -> list[Tensor]:
    """Return the tensors of a curvature and of data."""
    tensors = [*curvature.parts.model.parameters(), *(t for batch in batches for t in batch)]
    for spectrum in curvature._operator().spectra.values():
        tensors += [t for t in (spectrum.values, spectrum.left, spectrum.right) if t is not None]
    return tensors


def peak(batches: int) -> tuple[int, int]:
    """Return the most bytes of scores of so many batches, and the bytes of the scores."""
    train, queries = data(batches, SAMPLES), data(1, QUERIES)
    curvature = soframe.Curvature(network(2), "ekfac").fit(train, loss)
    with Live(*held(curvature, *train, *queries)) as live:
        scores = soframe.influence.scores(curvature, queries, train, loss, damping=0.1)
    return live.most, scores.nbytes


def test_scores_need_the_queries_and_one_batch_of_rows() -> None:
    (few, of_few), (many, of_many) = peak(2), peak(12)
    parameters = 2 * WIDTH * (WIDTH + 1) * 8
    # The scores are kept by batch, and joined.
    assert many - few <= 2 * (of_many - of_few)
    gradients = parameters  # of the mean loss, which the backward pass makes
    rows = 2 * 2 * SAMPLES * (WIDTH + 1) * 8  # inputs and output gradients of two layers
    # The queries twice: as they are, and while they are multiplied or rotated.
    assert QUERIES * parameters < few < 2 * QUERIES * parameters + gradients + 2 * rows


def peak_of_fit(batches: int, size: int) -> int:
    """Return the most bytes of a fit to so many batches."""
    model, train = network(2), data(batches, size)
    curvature = soframe.Curvature(model, "ekfac")
    with Live(*model.parameters(), *(t for batch in train for t in batch)) as live:
        curvature.fit(train, loss)
    return live.most


@pytest.mark.parametrize("size", [8, 256])
def test_a_fit_needs_the_factors_and_one_batch_of_rows(size: int) -> None:
    few, many = peak_of_fit(3, size), peak_of_fit(7, size)
    assert many - few <= 4 * 8  # a loss of each batch
    factors = 2 * (WIDTH**2 + (WIDTH + 1) ** 2) * 8
    parameters = 2 * WIDTH * (WIDTH + 1) * 8
    rows = 2 * 2 * size * (WIDTH + 1) * 8
    # Factors and their eigenvectors; EKFAC's scale, eigenvalues, and the gradient of the loss;
    # rows, activations and their gradients.
    assert few < 2 * factors + 3 * parameters + 3 * rows


def test_self_influence_has_the_gradients_of_a_block_at_a_time() -> None:
    layers, train = 8, data(3, SAMPLES)
    curvature = soframe.Curvature(network(layers), "ekfac").fit(train, loss)
    with Live(*held(curvature, *train)) as live:
        soframe.influence.self_influence(curvature, train, loss, damping=0.1)
    block = WIDTH * (WIDTH + 1) * 8
    # Rotated gradients and their products, while the next block is rotated by two sides.
    assert live.most < 4 * SAMPLES * block + layers * block
