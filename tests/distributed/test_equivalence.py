"""W ranks train exactly as one process does on all of the data."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from soframe.comm import Recording, TorchDistributed
from soframe.comm.recording import Event
from soframe.solvers import Inverse
from soframe.strategies import CommOpt, HybridOpt, MemOpt, Sharded
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    SAMPLES,
    Case,
    Run,
    Shards,
    mean_over,
    preconditioner_of,
    train_alone,
)

pytestmark = pytest.mark.distributed

STRATEGIES: dict[str, Any] = {
    "comm": "comm-opt",
    "mem": MemOpt,
    "hybrid": "hybrid-opt",
    "one": HybridOpt(gradient_workers=1),
    "two-thirds": HybridOpt(gradient_workers=0.67),
    "comm-spread": CommOpt(colocate=False),
    "hybrid-spread": HybridOpt(colocate=False),
    "sharded": Sharded(group=None),
    "sharded-together": Sharded(group=None, colocate=True),
    "deferred": Sharded(group=None, deferred=True),
}
SHARDED = (2, 3)
INTERVALS = {"1/1": (1, 1), "1/2": (1, 2), "2/3": (2, 3)}


def options(strategy: str, solver: Any, interval: str) -> dict[str, Any]:
    statistics_every, solve_every = INTERVALS[interval]
    return {
        "strategy": STRATEGIES[strategy],
        "solver": solver,
        "statistics_every": statistics_every,
        "solve_every": solve_every,
    }


# Every strategy with every solver, the intervals in turn; then every interval with one of them.
CASES: dict[str, Case] = {
    f"{strategy} {solver} {interval}": Case(options(strategy, solver, interval))
    for index, strategy in enumerate(STRATEGIES)
    for number, solver in enumerate(("eigen", "inverse"))
    for interval in [list(INTERVALS)[(index + number) % 3]]
} | {f"hybrid {i}": Case(options("hybrid", Inverse("sqrt"), i)) for i in INTERVALS}


def uneven(ranks: int) -> Shards:
    rest = SAMPLES - (ranks - 1)
    return ((rest,), *(((1,),) * (ranks - 1)))


def with_an_empty_one(ranks: int) -> Shards:
    each = SAMPLES // (ranks - 1)
    last = SAMPLES - each * (ranks - 2)
    return ((0,), *(((each,),) * (ranks - 2)), (last,))


def two_micro_batches(ranks: int) -> Shards:
    half = SAMPLES // ranks // 2
    return ((half, half),) * ranks


def odd_micro_batches(ranks: int) -> Shards:
    each = SAMPLES // ranks
    return tuple((1, each - 1) if rank % 2 == 0 else (each,) for rank in range(ranks))


def sharded_cases(ranks: int) -> dict[str, tuple[Case, Case]]:
    """Name -> the case for the ranks, and the case for one process that must come to the same."""
    plain = Case(options("mem", "eigen", "1/2"))
    hybrid = Case(options("hybrid", "inverse", "2/3"))
    deferred = Case(options("deferred", "inverse", "1/2"))
    whole: Shards = ((SAMPLES,),)
    pairs = {}
    for name, case in {"mem": plain, "hybrid": hybrid, "deferred": deferred}.items():
        local, everywhere = case, replace(case, loss_average="global")

        def one(case: Case, shards: Shards) -> Case:
            return replace(case, shards=shards)

        # The mean over all samples: nothing depends on who has which.
        for shards in (uneven(ranks), with_an_empty_one(ranks), odd_micro_batches(ranks)):
            pairs[f"{name} global {shards}"] = (one(everywhere, shards), one(local, whole))
        # Means over shards, averaged: a micro-batch of one process each, loss / W.
        shards = uneven(ranks)
        flat: Shards = (tuple(size for sizes in shards for size in sizes),)
        pairs[f"{name} local {shards}"] = (one(local, shards), one(local, flat))
        # A rank without samples: DDP still divides by W.
        shards = with_an_empty_one(ranks)
        flat = (tuple(size for sizes in shards for size in sizes if size),)
        pairs[f"{name} local {shards}"] = (
            one(local, shards),
            replace(one(local, flat), factor=(ranks - 1) / ranks),
        )
        shards = two_micro_batches(ranks)
        pairs[f"{name} micro-batches"] = (one(local, shards), one(local, whole))
        summed = replace(case, loss_average="sum")
        pairs[f"{name} sum"] = (
            one(summed, uneven(ranks)),
            replace(one(summed, whole), factor=1 / ranks),
        )
    return pairs


def train_all(
    rank: int, ranks: int, cases: list[Case]
) -> list[tuple[Tensor, list[Event], dict[str, Any]]]:
    results = []
    for case in cases:
        recording = Recording(TorchDistributed())
        run = Run(case, rank, ranks, recording, mean_over()).train()
        run.preconditioner.close()
        results.append((run.weights(), recording.events, run.preconditioner.counters))
    return results


@functools.cache
def _run(ranks: int, names: tuple[str, ...]) -> dict[str, list[Any]]:
    every = {name: pair[0] for name, pair in sharded_cases(ranks).items()} if ranks > 1 else {}
    cases = {name: {**CASES, **every}[name] for name in names}
    by_rank = run_ranks(train_all, ranks, list(cases.values()), timeout=120)
    return {name: [results[i] for results in by_rank] for i, name in enumerate(cases)}


def results_of(ranks: int, name: str) -> list[Any]:
    """All cases of a kind and a world size run in one start of its processes."""
    kinds = (cases_of(ranks), other_cases_of(ranks), shards_of(ranks), other_shards_of(ranks))
    return _run(ranks, next(tuple(names) for names in kinds if name in names))[name]


def cases_of(ranks: int) -> list[str]:
    """On 3 ranks every strategy with one solver, since nothing divides; some cases elsewhere."""
    if ranks == 3:
        return [name for i, name in enumerate(CASES) if i % 4 in (0, 3) or i >= 2 * len(STRATEGIES)]
    few = 4 if ranks < 6 else 2
    return [name for i, name in enumerate(CASES) if i % few == ranks % few]


def other_cases_of(ranks: int) -> list[str]:
    """On 3 ranks, every strategy with the other solver."""
    return [name for name in CASES if ranks == 3 and name not in cases_of(ranks)]


def shards_of(ranks: int) -> list[str]:
    """A third of the cases on 2 ranks, and the others on 3."""
    names = sharded_cases(ranks) if ranks in SHARDED else ()
    return [name for i, name in enumerate(names) if (i % 3 == 0) == (ranks == 2)]


def other_shards_of(ranks: int) -> list[str]:
    names = sharded_cases(ranks) if ranks in SHARDED else ()
    return [name for name in names if name not in shards_of(ranks)]


@functools.cache
def alone(name: str) -> Tensor:
    return train_alone(CASES[name])


def slow(ranks: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if ranks > 2 else []


def assert_same(results: list[Any], expected: Tensor) -> None:
    for rank, (weights, _, counters) in enumerate(results):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert torch.equal(weights, results[0][0]), f"rank {rank} has other bits than rank 0"
        assert not any(counters.values())


def assert_same_traces(events: list[list[Event]]) -> None:
    """Per group, every member enters the same collectives in the same order, no one else any."""
    groups = {event.group for trace in events for event in trace}
    for group in groups:
        traces = [[e for e in trace if e.group == group] for trace in events]
        for rank, trace in enumerate(traces):
            assert trace == (traces[group[0]] if rank in group else []), (group, rank)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=slow(ranks) + ([pytest.mark.thorough] if rest else []))
        for ranks in (1, 2, 3, 4, 6)
        for names, rest in ((cases_of(ranks), ranks > 4), (other_cases_of(ranks), True))
        for name in names
    ],
)
def test_ranks_equal_one_process(ranks, name):
    assert_same(results_of(ranks, name), alone(name))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=slow(ranks + 1) + ([pytest.mark.thorough] if rest else []))
        for ranks in SHARDED
        for names, rest in ((shards_of(ranks), False), (other_shards_of(ranks), True))
        for name in names
    ],
)
def test_shards_equal_one_process(ranks, name):
    assert_same(results_of(ranks, name), train_alone(sharded_cases(ranks)[name][1]))


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=slow(4))])
def test_all_members_of_a_group_enter_the_same_collectives(ranks):
    for name in cases_of(ranks):
        events = [result[1] for result in results_of(ranks, name)]
        assert_same_traces(events)
        assert all(events)


def test_the_cases_are_not_all_one():
    """The reference tells solvers and intervals apart, so equality means something."""
    one = alone("comm eigen 1/1")
    for name in ("comm inverse 1/2", "mem eigen 1/2", "hybrid eigen 2/3"):
        assert (alone(name) - one).abs().max() > 1e-4


def under_ddp(rank: int, ranks: int, case: Case) -> tuple[Tensor, list[str]]:
    run = Run(case, rank, ranks)
    run.preconditioner.close()
    wrapped = DistributedDataParallel(run.model, find_unused_parameters=True)
    run.model = wrapped
    run.preconditioner = preconditioner_of(wrapped, run.optimizer, case, None)
    run.train()
    return run.weights(), [block.name for block in run.preconditioner.blocks]


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_under_ddp(strategy):
    case = Case({"strategy": strategy, "solve_every": 2})
    results = run_ranks(under_ddp, 2, case)
    expected = train_alone(case)
    for weights, names in results:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert names == ["conv", "grouped", "unused", "hidden", "head"]


class Lopsided(Inverse):
    """Announces symmetric matrices, whose upper triangle is off by more than rounding."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        inverse = super().solve(matrix, damping)["inverse"]
        return {"inverse": inverse + 1e-3 * torch.ones_like(inverse).triu(1)}


def test_of_a_symmetric_tensor_all_ranks_use_the_triangle_that_travels():
    case = Case({"solver": Lopsided(), "solve_every": 1}, steps=3)
    [(one, *_)], [(other, *_)] = run_ranks(train_all, 2, [case])
    assert torch.equal(one, other)
