"""Parts of tensors come to the workers, and back, whatever the parts and the copies are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.comm import Handle, Recording, TorchDistributed
from soframe.comm.base import Backend
from soframe.comm.shards import Split, gather, scatter
from soframe.specs import Shards
from tests.distributed.harness import run_ranks

ROWS = Shards((5, 2), 0, ((0, 2), (2, 4), (4, 5), (5, 5)), (0, 0, 0, 0), "float64")
COLUMNS = Shards((2, 4), 1, ((0, 1), (1, 2), (2, 3), (3, 4)), (0, 0, 0, 0), "float64")
COPIES = Shards((3,), 0, ((0, 2), (2, 3), (0, 2), (2, 3)), (0, 0, 1, 1), "float64")
WHOLE = Shards.none((2, 3), 4, "float64")
SCALAR = Shards.none((), 4, "float64")
EVERY = (ROWS, COLUMNS, COPIES, WHOLE, SCALAR)


class Plain(TorchDistributed):
    """An engine without an all-to-all of its own."""

    def _all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        return Backend._all_to_all(self, flat, gives, takes)


def tensor(index: int) -> Tensor:
    numbers = torch.arange(EVERY[index].whole, dtype=torch.float64) + 100 * index
    return numbers.view(EVERY[index].shape)


def there_and_back(
    rank: int, ranks: int, plain: bool, workers: tuple[int, ...], sources: tuple[int, ...]
) -> tuple[list[Any], list[Tensor], dict[str, dict[str, int]], list[Any]]:
    backend = Recording((Plain if plain else TorchDistributed)())
    cpu = torch.device("cpu")

    def splits(**of: Any) -> list[Split]:
        return [
            Split(shards=s, dtype=torch.float64, device=cpu, workers=workers, **of) for s in EVERY
        ]

    there = splits()
    for index, split in enumerate(there):
        split.part = split.shards.part(tensor(index), rank).clone()
    gather(backend, there, "there")
    wholes = [split.whole for split in there]
    back = splits(sources=sources)
    for index, split in enumerate(back):
        # On workers alone, and other than what was gathered.
        split.whole = -tensor(index) if rank in workers else None
    scatter(backend, back, "back")
    parts = [split.part for split in back if split.part is not None]
    return wholes, parts, backend.traffic(), backend.events


@pytest.mark.distributed
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("workers", "sources"),
    [((2,), (2, 2, 2, 2)), ((0, 3), (0, 0, 3, 3)), ((0, 1, 2, 3), (0, 1, 2, 3))],
)
def test_there_and_back(plain: bool, workers: tuple[int, ...], sources: tuple[int, ...]) -> None:
    results = run_ranks(there_and_back, 4, plain, workers, sources)
    given = taken = 0
    for rank, (wholes, parts, traffic, _) in enumerate(results):
        for index, whole in enumerate(wholes):
            if rank in workers:
                assert torch.equal(whole, tensor(index))
            else:
                assert whole is None
        for index, part in enumerate(parts):
            assert torch.equal(part, EVERY[index].part(-tensor(index), rank))
        assert len(parts) == len(EVERY)
        there = traffic.get("there", {"bytes": 0})["bytes"]
        lacks = [s.whole - s.numel(rank) for s in EVERY] if rank in workers else []
        taken += 8 * sum(lacks)
        given += there - 8 * sum(lacks)
    assert given == taken


def gathered(rank: int, ranks: int) -> Tensor | None:
    split = Split(shards=ROWS, dtype=torch.float64, device=torch.device("cpu"), workers=(1,))
    split.part = ROWS.part(tensor(0), rank).clone()
    gather(TorchDistributed(), [split], "there")
    return split.whole


@pytest.mark.distributed
def test_a_single_tensor_comes_alone() -> None:
    first, worker, *others = run_ranks(gathered, 4)
    assert torch.equal(worker, tensor(0))
    assert [first, *others] == [None] * 3


def test_an_exchange_on_paper_has_the_numbers_that_a_rank_takes() -> None:
    backend = Recording(world_size=3)
    received, _ = backend.all_to_all(torch.ones(6), [0, 2, 4], [0, 5, 2], "there")
    assert torch.equal(received, torch.zeros(7))
    assert backend.traffic()["there"] == {"bytes": 4 * (6 + 7), "calls": 1}


def test_who_sends_what() -> None:
    """Parts on their way by owner, sender and receiver."""
    assert ROWS.moves(0, (2,)) == [(0, 0, 2)]
    assert ROWS.moves(2, (2,)) == [(0, 0, 2), (1, 1, 2)]
    assert ROWS.moves(3, (2,)) == []  # it has nothing
    assert ROWS.moves(1, (2, 0)) == [(1, 1, 2), (1, 1, 0)]
    assert COPIES.moves(2, (2,)) == [(3, 3, 2)]  # of its own copy
    assert COPIES.moves(1, (2,)) == []
    back = (2,) * 4
    assert ROWS.moves(2, (2,), back) == [(0, 2, 0), (1, 2, 1)]  # rank 3 has nothing to get
    assert ROWS.moves(1, (2,), back) == [(1, 2, 1)]
    assert WHOLE.part_shape(2) == (2, 3)
    assert SCALAR.part_shape(2) == ()
    assert not WHOLE.travels((2,))
    assert not WHOLE.moves(2, (2,))
    assert WHOLE.moves(2, (2,), back) == [(0, 2, 0), (1, 2, 1), (3, 2, 3)]
