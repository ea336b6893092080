"""The bytes of scores: factors, one batch of rows and the queries, of any number of samples."""

from __future__ import annotations

import weakref
from typing import Any

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


def peak(batches: int) -> tuple[int, int]:
    """Return the most bytes of scores of so many batches, and the bytes of the scores."""
    model = fill(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))

    def data(number: int, size: int) -> list[Batch]:
        seeds = range(number)
        inputs = [randn(size, WIDTH, seed=seed) for seed in seeds]
        targets = [randn(size, WIDTH, seed=50 + seed) for seed in seeds]
        return list(zip(inputs, targets, strict=True))

    train, queries = data(batches, SAMPLES), data(1, QUERIES)
    curvature = soframe.Curvature(model, "ekfac").fit(train, loss)
    held = [*model.parameters(), *(t for batch in (*train, *queries) for t in batch)]
    for spectrum in curvature._operator().spectra.values():
        held += [t for t in (spectrum.values, spectrum.left, spectrum.right) if t is not None]
    with Live(*held) as live:
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
    assert QUERIES * parameters < few < 2 * QUERIES * parameters + 2 * gradients + 6 * rows
