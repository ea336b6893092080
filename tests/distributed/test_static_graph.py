"""DistributedDataParallel(static_graph=True) learns its graph in a loss's backward pass alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.settings import Statistics
from soframe.testing import compare
from tests.distributed.harness import RankFailure, run_ranks
from tests.trust_region.kit import classes_of, deep, vector

pytestmark = pytest.mark.distributed

SAMPLES = 8


def observed(rank: int, ranks: int) -> Tensor:
    """Train on this rank's samples with the type-2 Fisher, which probes before the loss's pass."""
    model = deep()
    net: nn.Module = DistributedDataParallel(model, static_graph=True) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = soframe.Preconditioner(
        net,
        optimizer=optimizer,
        statistics=Statistics(fisher="type-2", loss="cross-entropy"),
        statistics_every=1,
        solve_every=1,
    )
    for step in range(3):
        x, y = classes_of(step, SAMPLES)
        part = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        optimizer.zero_grad()
        outputs = net(x[part])
        preconditioner.observe(outputs)
        F.cross_entropy(outputs, y[part]).backward()
        preconditioner.step()
        optimizer.step()
    preconditioner.close()
    return vector(model)


def test_a_probe_is_not_taken_for_the_first_backward_pass() -> None:
    expected = observed(0, 1)
    for weights in run_ranks(observed, 2):
        compare(weights, expected, "weights")


def trust_region(rank: int, ranks: int, kind: str) -> None:
    wrapped = DistributedDataParallel(deep(), static_graph=True)
    x, y = classes_of(rank)
    own: torch.optim.Optimizer
    if kind == "stochastic":
        own = soframe.StochasticTrustRegion(wrapped)
    else:
        own = soframe.TrustRegion(wrapped, "cross-entropy")
    own.step(lambda: F.cross_entropy(wrapped(x), y))


@pytest.mark.parametrize("kind", ["stochastic", "trust region"])
def test_a_trust_region_names_the_remedy(kind: str) -> None:
    for failure in run_ranks(trust_region, 2, kind, check=False):
        assert isinstance(failure, RankFailure)
        assert "build it without static_graph=True" in failure.summary
