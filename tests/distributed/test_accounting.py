"""Traffic and memory are what the placement says, computed by hand from the layers' shapes."""

from __future__ import annotations

from typing import Any

import pytest

from soframe import Placement
from soframe.strategies import BlockPlacement, HybridOpt, Strategy
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, backward, mean_over, train_rank

pytestmark = pytest.mark.distributed

STEPS = 4  # statistics at steps 0 and 2, solves at steps 0 and 3
# Blocks that are used -> groups, out, in with the bias's column.
SHAPES = {"conv": (1, 4, 9), "grouped": (2, 2, 8), "hidden": (1, 5, 17), "head": (1, 3, 6)}
NAMES = ["conv", "grouped", "unused", "hidden", "head"]
DOUBLE, FLOAT = 8, 4


class Apart(Strategy):
    """The owners are no gradient workers."""

    def place(self, work, ranks):
        blocks = tuple(BlockPlacement(b.name, (0, 0), (1,), (1,) * ranks) for b in work)
        return Placement("apart", ranks, tuple(work), blocks)


STRATEGIES: dict[str, Any] = {
    "comm": "comm-opt",
    "mem": "mem-opt",
    "hybrid": "hybrid-opt",
    "spread": HybridOpt(colocate=False),
    "apart": Apart(),
}


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def second_order(solver: str, groups: int, n: int) -> int:
    """Elements held of one factor."""
    return groups * (n * n + n if solver == "eigen" else n * n)


def travelling(solver: str, groups: int, n: int) -> int:
    return groups * (n * n + n if solver == "eigen" else triangle(n))


def expected_traffic(placement: Placement, solver: str, rank: int) -> dict[str, dict[str, int]]:
    ranks = placement.world_size
    share: dict[tuple[int, tuple[int, ...]], int] = {}
    exchange: dict[tuple[int, tuple[int, ...]], int] = {}
    for block in placement.blocks:
        if block.block not in SHAPES:
            continue
        groups, out, into = SHAPES[block.block]
        workers = set(block.gradient_workers)
        for owner, size in zip(block.owners, (into, out), strict=True):
            route = (owner, tuple(sorted(workers | {owner})))
            share[route] = share.get(route, 0) + travelling(solver, groups, size)
        for worker in workers:
            rows = tuple(r for r in range(ranks) if block.sources[r] == worker or r == worker)
            exchange[worker, rows] = exchange.get((worker, rows), 0) + groups * out * into

    def mine(routes: dict[tuple[int, tuple[int, ...]], int]) -> list[int]:
        return [n for (_, group), n in routes.items() if rank in group and len(group) > 1]

    factors = sum(g * (triangle(out) + triangle(into)) for g, out, into in SHAPES.values())
    # Each step: seven flags, and one for each gradient, of four layers with a bias and one without;
    # with statistics two weights per block, and what was reached: two numbers per block and two of
    # all; each solve an outcome per factor.
    flags = DOUBLE * (STEPS * (7 + 9) + 2 * (2 + (2 + 2) * len(NAMES)))
    outcomes = FLOAT * 2 * 2 * len(SHAPES)
    phases = {
        "start": {"bytes": 64, "calls": 1},
        "agree": {"bytes": flags + outcomes, "calls": STEPS + 2},
        "reduce": {"bytes": 2 * DOUBLE * factors, "calls": 2},
        "share": {"bytes": 2 * DOUBLE * sum(mine(share)), "calls": 2 * len(mine(share))},
        "exchange": {
            "bytes": STEPS * DOUBLE * sum(mine(exchange)),
            "calls": STEPS * len(mine(exchange)),
        },
    }
    phases = {name: count for name, count in phases.items() if count["calls"]}
    total = {key: sum(c[key] for c in phases.values()) for key in ("bytes", "calls")}
    return {**phases, "total": total}


def expected_memory(placement: Placement, solver: str, rank: int) -> dict[str, int]:
    factors = held = 0
    for block in placement.blocks:
        if block.block not in SHAPES:
            continue
        groups, out, into = SHAPES[block.block]
        stored = triangle if block.packed else (lambda n: n * n)
        factors += groups * (stored(out) + stored(into))
        if rank in block.gradient_workers:
            held += second_order(solver, groups, out) + second_order(solver, groups, into)
    usage = {"factors": DOUBLE * factors, "accumulators": 0}
    usage |= {"second_order": DOUBLE * held, "statistics": 0}
    return {**usage, "total": sum(usage.values())}


def account(rank: int, ranks: int, cases: list[Case]) -> list[tuple[Placement, Any, Any]]:
    results = []
    for case in cases:
        preconditioner = train_rank(rank, ranks, case).preconditioner
        results.append(
            (preconditioner.placement, preconditioner.traffic(), preconditioner.memory_usage())
        )
    return results


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_traffic_and_memory_are_the_placements(ranks):
    cases = {
        (name, solver): Case(
            {"strategy": strategy, "solver": solver, "statistics_every": 2, "solve_every": 3},
            steps=STEPS,
        )
        for name, strategy in STRATEGIES.items()
        for solver in ("eigen", "inverse")
    }
    results = run_ranks(account, ranks, list(cases.values()))
    for rank, own in enumerate(results):
        for (name, solver), (placement, traffic, memory) in zip(cases, own, strict=True):
            where = (name, solver, rank)
            assert traffic == expected_traffic(placement, solver, rank), where
            assert memory == expected_memory(placement, solver, rank), where


def test_one_process_sends_nothing():
    run = train_rank(0, 1, Case({"solver": "inverse"}))
    assert run.preconditioner.traffic() == {"total": {"bytes": 0, "calls": 0}}
    placement = run.preconditioner.placement
    assert run.preconditioner.memory_usage() == expected_memory(placement, "inverse", 0)


def test_the_statistics_of_a_window_under_way_are_counted():
    run = Run(Case())
    backward(run.model, run.case, 0)
    sizes = [g * (out * out + into * into) for g, out, into in SHAPES.values()]
    assert run.preconditioner.memory_usage()["statistics"] == DOUBLE * sum(sizes)


def in_flight(rank: int, ranks: int) -> list[dict[str, int]]:
    case = Case({"statistics_every": 1, "solve_every": 4})
    run = Run(case, rank, ranks, average=mean_over())
    run.step(0)  # solves, and waits
    first = run.preconditioner.memory_usage()
    run.step(1)
    return [first, run.preconditioner.memory_usage(), run.preconditioner.memory_usage()]


def test_triangles_in_flight_are_counted():
    """Of all factors, since statistics of the last step travel until their next use."""
    triangles = DOUBLE * sum(
        groups * (out * (out + 1) + into * (into + 1)) // 2 for groups, out, into in SHAPES.values()
    )
    for first, flying, after in run_ranks(in_flight, 2):
        assert "in_flight" not in first
        assert flying["in_flight"] == triangles
        assert flying["total"] == first["total"] + triangles
        assert after == first, "the call has waited for them"
