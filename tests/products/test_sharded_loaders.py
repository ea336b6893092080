"""Loaders of ranks that run a sharded model together, for a curvature."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import soframe
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import classes_of, deep

pytestmark = pytest.mark.distributed

Batch = tuple[Tensor, Tensor]


class Loader:
    """As many batches as this rank has; perhaps the last one cannot be read."""

    def __init__(self, batches: int, *, damaged: bool) -> None:
        self.batches, self.damaged = batches, damaged

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.batches):
            if self.damaged and step == self.batches - 1:
                raise OSError("no such file")
            yield classes_of(step)


def loss_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs = model(batch[0])
    return outputs, F.cross_entropy(outputs, batch[1])


def fitted(rank: int, ranks: int, batches: tuple[int, ...], damaged: bool) -> str:
    model = deep()
    fully_shard(model)
    curvature = soframe.Curvature(model, strategy="mem-opt")
    loader = Loader(batches[rank], damaged=damaged and rank == 1)
    try:
        curvature.fit(loader, loss_of)
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fitted"


@pytest.mark.parametrize(
    "batches", [(3, 1), pytest.param((3, 3, 1, 3), marks=pytest.mark.thorough)]
)
def test_a_rank_without_a_batch_is_an_error_on_all(batches: tuple[int, ...]) -> None:
    for said in run_ranks(fitted, len(batches), batches, False, timeout=60):
        assert said.startswith(
            f"ValueError: 1 of {len(batches)} ranks have fewer batches than the others"
        )


def test_a_loader_that_raises_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(fitted, 2, (2, 2), True, timeout=60)
    assert first.startswith("RuntimeError")
    assert "rank 1: OSError: no such file" in first
    assert second == "OSError: no such file"


def test_as_many_batches_are_served() -> None:
    assert run_ranks(fitted, 2, (2, 2), False, timeout=60) == ["fitted", "fitted"]


def scored(rank: int, ranks: int, batches: tuple[int, ...]) -> str:
    model = deep()
    fully_shard(model)
    curvature = soframe.Curvature(model).fit(Loader(2, damaged=False), loss_of)
    train = Loader(batches[rank], damaged=False)
    try:
        soframe.influence.scores(curvature, [classes_of(0)], train, loss_of, damping=0.1)
    except ValueError as error:
        return str(error)
    return "scored"


@pytest.mark.parametrize(
    "batches", [(2, 1), pytest.param((2, 2, 0, 2), marks=pytest.mark.thorough)]
)
def test_scores_of_unequal_shares_are_an_error_on_all(batches: tuple[int, ...]) -> None:
    for said in run_ranks(scored, len(batches), batches, timeout=60):
        assert said.startswith(f"1 of {len(batches)} ranks have fewer batches than the others")
    assert run_ranks(scored, 2, (2, 2), timeout=60) == ["scored", "scored"]
