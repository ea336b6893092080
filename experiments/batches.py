"""The batches of a run: the examples of a rank at a step, and in an evaluation.

The order of an epoch is determined by seed and epoch, the draws of an item by seed, epoch and
index. So a checkpoint needs no state of a sampler, and W ranks share the batch of one.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from experiments.data import Examples, Source, size, take
from experiments.launch import Place
from experiments.recipes.loaders import Stream, number


@dataclass
class Batches:
    """The examples of a run on one rank; those left over at the end of an epoch are dropped.

    Raises:
        ValueError: If a batch cannot be split evenly, or exceeds the training set; or if the test
            set has fewer examples than there are ranks.
    """

    train: Source | Stream
    test: Source | Stream | None
    place: Place
    batch_size: int  # of a step, over all ranks and micro-batches
    accumulate: int = 1  # micro-batches of a step on each rank
    steps: int | None = None  # of the run; None for those of its epochs, or no end
    epochs: int | None = None
    seed: int = 0
    workers: int = 0  # processes that read data, for each rank

    def __post_init__(self) -> None:
        ranks, test = self.place.size, self.test
        self.micro, rest = divmod(self.batch_size, ranks * self.accumulate)
        if rest:
            raise ValueError(
                f"a batch of {self.batch_size} cannot be split evenly over {ranks} rank(s) with "
                f"{self.accumulate} micro-batch(es) each"
            )
        if isinstance(self.train, Stream):
            self._samples = self.train.samples
        else:
            self._samples = size(self.train)
        self.per_epoch = self._samples // self.batch_size
        if self.per_epoch == 0:
            raise ValueError(f"a batch of {self.batch_size} exceeds the {self._samples} samples")
        if test is not None and not isinstance(test, Stream) and size(test) < ranks:
            raise ValueError(f"{ranks} ranks cannot share {size(test)} test samples")
        if self.steps is None and self.epochs is not None:
            self.steps = self.epochs * self.per_epoch

    def training(self, step: int) -> Iterator[Examples]:
        """Yield this rank's micro-batches from a step on, each epoch in a new order."""
        begin, per_epoch = step * self.accumulate, self.per_epoch * self.accumulate
        if isinstance(self.train, Stream):
            self.train.place(self.place.rank, self.place.size, self.micro, per_epoch, begin)
            yield from self._loader(self.train, batch_size=self.micro)
        else:
            yield from self._taken(self.train, self._order(begin, per_epoch))

    def shares(self, examples: Source | Stream, at_once: int) -> Iterator[Examples]:
        """Yield this rank's share of a set, so many examples at once."""
        if isinstance(examples, Stream):
            examples.place(self.place.rank, self.place.size)
            yield from self._loader(examples, batch_size=at_once)
        else:
            indices = torch.arange(self.place.rank, size(examples), self.place.size)
            yield from self._taken(examples, ((0, part) for part in indices.split(at_once)))

    def _order(self, begin: int, per_epoch: int) -> Iterator[tuple[int, Tensor]]:
        """Yield epoch and indices of this rank's micro-batches, from one on."""
        width = self.micro * self.place.size
        positions: Iterable[int] = itertools.count(begin)
        if self.steps is not None:
            positions = range(begin, self.steps * self.accumulate)
        order: Tensor | None = None
        for position in positions:
            epoch, part = divmod(position, per_epoch)
            if order is None or part == 0:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(self._samples, generator=generator)
                if width == self._samples:
                    order = order.sort().values  # the same sums, to the bit, at every step
            batch = order[part * width : (part + 1) * width]
            yield epoch, batch[self.place.rank :: self.place.size]

    def _taken(self, examples: Source, order: Iterable[tuple[int, Tensor]]) -> Iterator[Examples]:
        if isinstance(examples, tuple):
            for _, indices in order:
                yield take(examples, indices)
            return
        yield from self._loader(_Seeded(examples, self.seed), batch_sampler=map(_placed, order))

    def _loader(self, dataset: Any, **options: Any) -> DataLoader[Examples]:
        return DataLoader(
            dataset,
            num_workers=self.workers,
            pin_memory=self.place.device.type == "cuda",
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # its draws are not the model's
            **options,
        )


class _Seeded(Dataset[Any]):
    """A dataset whose items are found by epoch and index, which also seed their draws."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner, self._seed = inner, seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number(self._seed, *place))
            return self._inner[place[1]]


def _placed(batch: tuple[int, Tensor]) -> list[tuple[int, int]]:
    epoch, indices = batch
    return [(epoch, index) for index in indices.tolist()]


def _ignore_interrupts(worker: int) -> None:
    """Let the process that reads the data answer interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
