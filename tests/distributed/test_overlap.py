"""What travels while others are computed gives the same bits as what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from soframe import Preconditioner
from soframe.comm import Handle, Recording, TorchDistributed
from soframe.settings import grouped
from soframe.solvers import Eigen, Inverse, Solver
from tests.distributed.harness import run_ranks
from tests.distributed.test_equivalence import assert_same_traces
from tests.distributed.test_plans import EVERY
from tests.distributed.training import Case, Run, mean_over, same, snapshot
from tests.distributed.twins import Trace, assert_twins

pytestmark = pytest.mark.distributed

SEVERAL = ["comm", "hybrid", "spread", "sharded", "apart, deferred"]
BUCKET = 400  # bytes: several buckets for every route


class Late(TorchDistributed):
    """Ranks come to their collectives at different times, and each at another in every run."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._times = torch.Generator().manual_seed(100 * seed + self.rank)

    def _dawdle(self) -> None:
        time.sleep(2e-3 * float(torch.rand((), generator=self._times)) ** 4)

    def _all_reduce(self, tensor: Tensor) -> Handle:
        self._dawdle()
        return super()._all_reduce(tensor)

    def _reduce(self, tensor: Tensor, destination: int, group: tuple[int, ...]) -> Handle:
        self._dawdle()
        return super()._reduce(tensor, destination, group)

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        self._dawdle()
        return super()._broadcast(tensor, source, group)


def train(rank: int, ranks: int, case: Case, overlap: bool, fused: bool) -> Trace:
    backend = Recording(Late(seed=overlap, overlap=overlap, fused=fused))
    run = Run(case, rank, ranks, backend, mean_over())
    under_way = []
    for step in range(case.steps):
        run.step(step)
        own = run.preconditioner
        stacks = own.curvature.placed.stacks
        under_way.append(len({id(p) for stack in stacks for p in stack.pending}))
    run.preconditioner.close()
    return Trace(
        run.weights(),
        snapshot(run.preconditioner),
        run.preconditioner.counters,
        backend.events,
        under_way,
    )


def train_both_ways(
    rank: int, ranks: int, cases: list[Case], bucket: int, fused: bool = False
) -> list[tuple[Trace, Trace]]:
    import soframe.strategies.buckets

    soframe.strategies.buckets.BUCKET_BYTES = bucket
    return [
        (train(rank, ranks, case, True, fused), train(rank, ranks, case, False, fused))
        for case in cases
    ]


@pytest.mark.parametrize(
    ("ranks", "names", "solver", "bucket", "fused"),
    [
        pytest.param(2, ["comm", "pairs, deferred"], Inverse(), 2**27, False, id="2"),
        pytest.param(3, list(EVERY), Eigen(), BUCKET, True, id="3", marks=pytest.mark.thorough),
        pytest.param(4, SEVERAL, Inverse(), BUCKET, False, id="4", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_overlap_changes_no_bit_and_no_call(
    ranks: int, names: list[str], solver: Solver, bucket: int, fused: bool
) -> None:
    every = {"solver": solver, "statistics_every": 1, "solve_every": 3}
    cases = {
        (name, gradients): Case({"strategy": EVERY[name], "gradients": gradients, **every})
        for name in names
        for gradients in ("averaged", "local")
        if gradients == "averaged" or name in ("mem", "sharded", "hybrid")
    }
    results = run_ranks(train_both_ways, ranks, list(cases.values()), bucket, fused, timeout=120)
    assert_twins(results, cases)


def test_statistics_travel_while_the_model_goes_on() -> None:
    """Those of a step are there when the next one begins."""
    case = Case({"strategy": "comm-opt", "statistics_every": 2, "solve_every": 4})
    for own in run_ranks(train_both_ways, 2, [case], BUCKET):
        [(overlapped, waited)] = own
        assert torch.equal(overlapped.weights, waited.weights)
        assert same(overlapped.state, waited.state)
        # The first step and the last one solve, so that factors are needed at once.
        assert [number > 0 for number in overlapped.under_way[1:4]] == [False, True, False]


# -- whatever the order of hooks ---------------------------------------------------------------


COLLECTIVES: dict[str, Callable[[TorchDistributed, Tensor], Handle]] = {
    "all_reduce": lambda backend, flat: backend.all_reduce(flat, "test"),
    "reduce": lambda backend, flat: backend.reduce(flat, 0, (0, 1), "test"),
    "broadcast": lambda backend, flat: backend.broadcast(flat, 1, (0, 1), "test"),
    "reduce_scatter": lambda backend, flat: backend.reduce_scatter(flat, [2, 2], "test"),
    "all_gather_shares": lambda backend, flat: backend.all_gather_shares(flat, [2, 2], "test"),
    "all_to_all": lambda backend, flat: backend.all_to_all(flat, [2, 2], [2, 2], "test")[1],
}


def start_before_the_other(rank: int, ranks: int) -> list[str]:
    """Rank 1 enters each collective once rank 0 has said that it started it."""
    backend, said = TorchDistributed(), torch.zeros(1)
    begun = []
    for name, start in COLLECTIVES.items():
        if rank == 1:
            dist.recv(said, 0)
        handle = start(backend, torch.ones(4))
        if rank == 0:
            dist.send(said, 1)
        handle.wait()
        begun.append(name)
    return begun


def test_a_collective_that_is_started_waits_for_no_rank() -> None:
    for begun in run_ranks(start_before_the_other, 2, timeout=40):
        assert begun == list(COLLECTIVES)


class Branches(nn.Module):
    """Layers side by side; a rank calls them in an order of its own, and so do its hooks."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 3 + i, dtype=torch.float64) for i in range(4))
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        order = sorted(range(4), key=lambda i: (i * (2 * self.turn + 1) + self.turn) % 4)
        return sum((self.branches[i](x).square().sum(1) for i in order), torch.zeros(len(x)))


def train_branches(rank: int, ranks: int, strategy: str, turn: int) -> tuple[Any, ...]:
    model = Branches(turn)
    calls: list[int] = []
    for index, layer in enumerate(model.branches):
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
    backend = Recording(TorchDistributed())
    every = {"statistics_every": 1, "solve_every": 2}
    own = Preconditioner(
        model, strategy=EVERY[strategy], kl_clip=None, **grouped({"backend": backend, **every})
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model.zero_grad()
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        model(x).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        own.step()
    own.close()
    return calls[:4], backend.events, [p.grad for p in model.parameters()]


def train_branches_both_ways(rank: int, ranks: int, names: list[str]) -> list[Any]:
    import soframe.strategies.buckets

    soframe.strategies.buckets.BUCKET_BYTES = BUCKET
    return [[train_branches(rank, ranks, name, turn) for turn in (rank, 0)] for name in names]


@pytest.mark.slow
def test_ranks_whose_hooks_come_in_other_orders_enter_the_same_collectives() -> None:
    names = ["comm", "spread", "sharded", "apart, deferred"]
    results = run_ranks(train_branches_both_ways, 3, names)
    assert len({tuple(own[0][0][0]) for own in results}) == 3  # they do
    for index, name in enumerate(names):
        assert_same_traces([own[index][0][1] for own in results])
        for own in results:
            (_, events, gradients), (_, expected_events, expected) = own[index]
            assert events == expected_events, name
            for one, other in zip(gradients, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


# -- whatever a solver does ----------------------------------------------------------------------


@dataclass(frozen=True)
class Fails(Inverse):
    """Cannot solve factors of one size, once it has solved some."""

    size: int = 0
    good: int = 0
    error: type[Exception] = torch.linalg.LinAlgError
    times: ClassVar[list[int]] = []

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.shape[-1] == self.size:
            self.times.append(len(self.times))
            if len(self.times) > self.good:
                raise self.error("not this one")
        return super().solve(matrix, damping)


def solve_badly(rank: int, ranks: int, case: Case, overlap: bool) -> tuple[Any, ...]:
    Fails.times.clear()
    backend = TorchDistributed(overlap=overlap) if ranks > 1 else None
    run = Run(case, rank, ranks, backend, mean_over() if ranks > 1 else None).train(range(3))
    own = run.preconditioner
    solved = {block.name: sorted(block.second_order) for block in own.blocks}
    return run.weights(), own.counters, solved


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["comm-opt", pytest.param("sharded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.covering(together=2)
def test_a_solve_that_fails_midway_is_agreed_on_afterwards(
    good: int, strategy: str, overlap: bool
) -> None:
    """The block keeps what it had, or is left alone if it never had anything: as on one process."""
    case = Case({"strategy": strategy, "solver": Fails(size=17, good=good), "solve_every": 1})
    results = run_ranks(solve_badly, 2, case, overlap)
    alone, _, expected = solve_badly(0, 1, case, overlap)
    assert expected["hidden"] == (["A", "G"] if good else [])
    for weights, counters, solved in results:
        assert torch.equal(weights, results[0][0])
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-10)
        assert counters["failed_solves"] == 3 - good
        assert all(set(data) <= set(expected[name]) for name, data in solved.items())
    for name, data in expected.items():
        assert {factor for _, _, solved in results for factor in solved[name]} == set(data)


def raise_and_save(rank: int, ranks: int, case: Case, overlap: bool) -> str:
    run = Run(case, rank, ranks, TorchDistributed(overlap=overlap), mean_over())
    try:
        run.step(0)
    except Exception as error:
        if rank == 0:
            time.sleep(0.3)  # the others look meanwhile whether it has given up
        run.preconditioner.state_dict()
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_solver_that_raises_ends_every_rank_which_may_save_together(overlap: bool) -> None:
    solver = Fails(size=17, error=KeyError)
    case = Case({"strategy": "mem-opt", "solver": solver})
    errors = sorted(run_ranks(raise_and_save, 3, case, overlap, timeout=30))
    assert errors[0] == "KeyError: 'not this one'"
    for error in errors[1:]:
        assert error.startswith("RuntimeError: the solver raised for hidden.A, hidden.G on another")
