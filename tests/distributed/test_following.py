"""Solvers that remember the last solve, or follow between solves, on several ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe import Placement, Preconditioner
from soframe.comm import Recording
from soframe.settings import grouped
from soframe.solvers import Eigen, Lazy, NewtonSchulz, OrthogonalIteration, Solver
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
@pytest.mark.covering(together=1)
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
    for own in run_ranks(train, ranks, cases):
        for name, (weights, _) in zip(names, own, strict=True):
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (Halves(), r"strategy 'halves', since rank\(s\) \[1\] precondition the block, and do not"),
        (Sharded(deferred=True, colocate=True), "reduces statistics at the solves only"),
        (Sharded(group=None), r"do not hold its factor A: pass .* Sharded\(colocate=True\)"),
    ],
    ids=["halves", "deferred", "apart"],
)
@pytest.mark.parametrize("solver", [Eigen(follows=True), Lazy(Eigen(follows=True))], ids=repr)
def test_what_cannot_follow_everywhere_is_refused(
    strategy: Strategy, why: str, solver: Solver
) -> None:
    """Results would depend on the strategy; every rank finds it before the first collective."""
    if isinstance(solver, Lazy) and "do not hold" in why:
        pytest.skip("its solves start from the last one's data, so its owner is a gradient worker")
    sizes = [40, 56, 48, 40]  # the factors of some block lie elsewhere than its second-order data
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    for rank in range(2):
        backend = Recording(rank=rank, world_size=2)
        options = {"strategy": strategy, "backend": backend, "kl_clip": None}
        model = nn.Sequential(*layers)
        with pytest.raises(ValueError, match=f"follow the factors between solves.*{why}"):
            Preconditioner(model, solver=solver, **grouped(options))
        Preconditioner(model, solver="eigen", **grouped(options))


@pytest.mark.slow
def test_solves_that_go_on_from_the_last_have_its_data() -> None:
    """Under a strategy whose owners are no gradient workers, they become some."""
    case = Case({"solver": OrthogonalIteration(), "strategy": Apart(), **EVERY})
    expected = train_alone(Case({"solver": OrthogonalIteration(), **EVERY}))
    for own in run_ranks(train, 2, [case]):
        torch.testing.assert_close(own[0][0], expected, rtol=0, atol=1e-10)
