"""torch's Join, within which ranks have unequal numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import classes_of, deep

pytestmark = pytest.mark.distributed


def optimizer_of(kind: str, wrapped: DistributedDataParallel) -> Any:
    if kind == "stochastic":
        return soframe.StochasticTrustRegion(wrapped)
    return soframe.Optimizer(wrapped, "kfac", lr=0.1)


def joined(rank: int, ranks: int, kind: str, throws: bool) -> tuple[int, str]:
    """Take two steps, on the first rank four, and return how many there were and the error."""
    wrapped = DistributedDataParallel(deep())
    optimizer, taken, error = optimizer_of(kind, wrapped), 0, "none"
    try:
        with wrapped.join(throw_on_early_termination=throws):
            for step in range(4 if rank == 0 else 2):
                x, y = classes_of(step)
                if kind == "stochastic":
                    optimizer.step(lambda: F.cross_entropy(wrapped(x), y))  # noqa: B023
                else:
                    optimizer.zero_grad()
                    F.cross_entropy(wrapped(x), y).backward()
                    optimizer.step()
                taken += 1
    except RuntimeError as raised:
        error = str(raised)
    dist.barrier()
    return taken, error


@pytest.mark.parametrize("kind", ["optimizer", "stochastic"])
def test_a_rank_that_would_go_on_alone_is_an_error_on_all(kind: str) -> None:
    for taken, error in run_ranks(joined, 2, kind, False, timeout=60):
        assert taken == 0
        assert "needs all ranks: give every rank as many batches" in error


def test_ranks_that_end_together_are_served() -> None:
    first, second = run_ranks(joined, 2, "optimizer", True, timeout=60)
    assert (first[0], second[0]) == (2, 2)
    assert "exhausted" in first[1]
    assert "exhausted" in second[1]
