"""A rank on paper: the collectives it has entered, their bytes, and what it has after them."""

from __future__ import annotations

import torch

from soframe.comm import Recording

OWN, OTHERS = 3, (2, 1)  # elements of this rank's share, and of the other ranks'


def rank_on_paper() -> tuple[Recording, torch.Tensor, list[int]]:
    """Return rank 1 of 3, ones for all shares, and the sizes of shares by rank."""
    sizes = [OTHERS[0], OWN, OTHERS[1]]
    return Recording(rank=1, world_size=3), torch.ones(sum(sizes)), sizes


def test_every_collective_is_an_event_and_counts_its_bytes() -> None:
    backend, flat, sizes = rank_on_paper()
    backend.all_reduce(flat.clone(), "sum").wait()
    backend.reduce(flat.clone(), 0, (0, 1), "sum").wait()
    backend.broadcast(flat.clone(), 2, (1, 2), "copy").wait()
    backend.reduce_scatter(flat.clone(), sizes, "shares").wait()
    backend.all_gather_shares(flat.clone(), sizes, "shares").wait()
    backend.all_to_all(flat.clone(), [2, 2, 2], [1, 1, 1], "exchange")[1].wait()
    entered = [(event.operation, event.source, event.group) for event in backend.events]
    everyone = (0, 1, 2)
    assert entered == [
        ("all_reduce", None, everyone),
        ("reduce", 0, (0, 1)),
        ("broadcast", 2, (1, 2)),
        ("reduce_scatter", None, everyone),
        ("all_gather_shares", None, everyone),
        ("all_to_all", None, everyone),
    ]
    assert backend.traffic() == {
        "sum": {"bytes": 2 * 24, "calls": 2},
        "copy": {"bytes": 24, "calls": 1},
        "shares": {"bytes": 2 * 24, "calls": 2},
        "exchange": {"bytes": 24 + 12, "calls": 1},
        "total": {"bytes": 5 * 24 + 36, "calls": 6},
    }


def test_nothing_comes_from_ranks_on_paper() -> None:
    backend, flat, sizes = rank_on_paper()
    summed = flat.clone()
    backend.reduce_scatter(summed, sizes, "shares").wait()
    assert torch.equal(summed, flat)
    gathered = flat.clone()
    backend.all_gather_shares(gathered, sizes, "shares").wait()
    assert gathered.tolist() == [0, 0, 1, 1, 1, 0]
    copied = flat.clone()
    backend.broadcast(copied, 0, (0, 1), "copy").wait()
    assert not copied.any()
    sent = flat.clone()
    backend.broadcast(sent, 1, (0, 1), "copy").wait()
    assert torch.equal(sent, flat)
    taken, handle = backend.all_to_all(flat, [2, 2, 2], [1, 2, 3], "exchange")
    handle.wait()
    assert taken.tolist() == [0] * 6
