"""Solvers that remember the last solve, or follow between solves, on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe import Placement
from soframe.solvers import Eigen, NewtonSchulz, OrthogonalIteration
from soframe.strategies import BlockPlacement, MemOpt, Sharded, Strategy
from tests.distributed.harness import run_ranks
from tests.distributed.test_accounting import Apart
from tests.distributed.training import Case, snapshot, train_alone, train_rank

pytestmark = pytest.mark.distributed

# Without the layer that has more inputs than samples: where eigenvalues are equal, here zero, the
# basis of the last solve is that of rounding errors.
EVERY = {"statistics_every": 1, "solve_every": 3, "skip": ["hidden"]}


@dataclass(frozen=True)
class Halves(Strategy):
    """Two workers; both hold G, one holds A."""

    def place(self, work: Any, ranks: int) -> Placement:
        own: dict[str, Any] = {"holders": ((0,), (0, 1))}
        blocks = [BlockPlacement(b.name, (0, 1), (0, 1), (0, 1), **own) for b in work]
        return Placement("halves", ranks, tuple(work), tuple(blocks))


def train(rank: int, ranks: int, cases: list[Case]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    runs = [train_rank(rank, ranks, case) for case in cases]
    return [(run.weights(), snapshot(run.preconditioner)) for run in runs]


SOLVERS = {"follow": Eigen(follows=True), "orthogonal": OrthogonalIteration()}
SOLVERS["newton"] = NewtonSchulz()
STRATEGIES: dict[str, Any] = {
    "mem": MemOpt(),
    "comm": "comm-opt",
    "hybrid": "hybrid-opt",
    "sharded": Sharded(group=None, colocate=True),
}


@pytest.mark.parametrize(
    ("solver", "ranks"),
    [
        ("follow", 2),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in SOLVERS),
    ],
)
def test_ranks_are_one_process(solver: str, ranks: int) -> None:
    """Where owners are gradient workers, and gradient workers hold the factors."""
    names = list(STRATEGIES) if ranks > 2 else ["comm"]
    options = {"solver": SOLVERS[solver], **EVERY}
    cases = [Case({"strategy": STRATEGIES[name], **options}, steps=6) for name in names]
    alone = train_alone(Case(options, steps=6))
    plain = Eigen() if solver != "newton" else "inverse"
    usual = train_alone(Case({**options, "solver": plain}, steps=6))
    # Newton-Schulz is exact, the others are on their way to it.
    assert torch.allclose(alone, usual, rtol=0, atol=1e-10) == (solver == "newton")
    for own in run_ranks(train, ranks, cases, timeout=60):
        for name, (weights, _) in zip(names, own, strict=True):
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9, msg=name)


@pytest.mark.slow
def test_what_cannot_follow_everywhere_follows_nowhere() -> None:
    """All gradient workers keep the same data, and the weights of ranks stay the same."""
    own = {"solver": Eigen(follows=True), "strategy": Halves(), **EVERY}
    (weights, data), (others, theirs) = (
        results[0] for results in run_ranks(train, 2, [Case(own, steps=3)], timeout=60)
    )
    assert torch.equal(weights, others)
    assert all(torch.equal(data[key], theirs[key]) for key in data if key.count(".") == 2)
    vectors, values = (data[f"head.{'A'}.{name}"] for name in ("vectors", "values"))
    diagonal = (vectors.mT @ data["head.A"] @ vectors).diagonal(dim1=-2, dim2=-1)
    assert not torch.allclose(values, diagonal, rtol=1e-6)  # of the last solve
    vectors, values = (data[f"head.G.{name}"] for name in ("vectors", "values"))
    diagonal = (vectors.mT @ data["head.G"] @ vectors).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(values, diagonal, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_owners_without_data_of_their_own_start_anew() -> None:
    """Each solve is an eigendecomposition, as if none were warm."""
    case = Case({"solver": OrthogonalIteration(), "strategy": Apart(), **EVERY})
    expected = train_alone(Case({"solver": "eigen", **EVERY}))
    for own in run_ranks(train, 2, [case], timeout=60):
        torch.testing.assert_close(own[0][0], expected, rtol=0, atol=1e-10)
