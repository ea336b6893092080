"""Load balancing: Graham's bound against brute force, costs, and what colocation means."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from soframe.layers import BlockShape
from soframe.methods import KFAC
from soframe.specs import FactorSpec
from soframe.strategies import BlockWork, CommOpt, HybridOpt, MemOpt, Placement
from soframe.strategies.balance import assign, compute_cost, memory_cost
from tests.examples import examples


def work_of(*shapes: tuple[int, int, int]) -> list[BlockWork]:
    """One block per (groups, out, in)."""
    return [
        BlockWork(f"b{i}", BlockShape(*s), KFAC().factors(BlockShape(*s)))
        for i, s in enumerate(shapes)
    ]


def loads_of(placement: Placement, cost=compute_cost) -> list[float]:
    loads = [0.0] * placement.world_size
    for work, block in zip(placement.work, placement.blocks, strict=True):
        for factor, owner in zip(work.factors, block.owners, strict=True):
            loads[owner] += cost(factor)
    return loads


def best_makespan(costs: Sequence[float], bins: int) -> float:
    """The optimum, by trying everything."""
    best = float("inf")
    for choice in product(range(bins), repeat=len(costs)):
        loads = [0.0] * bins
        for job, bin_ in enumerate(choice):
            loads[bin_] += costs[job]
        best = min(best, max(loads))
    return best


def graham(bins: int) -> float:
    return 4 / 3 - 1 / (3 * bins)


COSTS = st.lists(st.integers(0, 30).map(float), min_size=1, max_size=6)


@settings(max_examples=examples(30))
@given(costs=COSTS, bins=st.integers(1, 3))
@example(costs=[3.0, 3.0, 2.0, 2.0, 2.0], bins=2)  # where the bound is attained
def test_assignment_keeps_grahams_bound(costs, bins):
    loads = [0.0] * bins
    chosen = assign(costs, loads)
    expected = [0.0] * bins
    for job, bin_ in enumerate(chosen):
        expected[bin_] += costs[job]
    assert loads == expected
    assert max(loads) <= graham(bins) * best_makespan(costs, bins) + 1e-9


def test_assignment_starts_from_the_loads_it_is_given():
    loads = [10.0, 0.0, 4.0]
    assert assign([3.0, 2.0, 5.0], loads) == [2, 1, 1]
    assert loads == [10.0, 7.0, 7.0]


def test_ties_go_to_the_earlier_job_and_the_lower_bin():
    assert assign([1.0, 1.0, 1.0], [0.0, 0.0]) == [0, 1, 0]


def test_ties_of_bins_of_several_ranks_go_to_the_one_with_less_so_far():
    """A job of 4 ends at 4 on both: on two ranks that had 2, and on one that had nothing."""
    assert assign([4.0], [2.0, 0.0], sizes=[2, 1]) == [1]
    assert assign([4.0], [0.0, 2.0], sizes=[1, 2]) == [0]


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3),
    ranks=st.integers(1, 3),
    colocate=st.booleans(),
)
@example(sizes=[(6, 5), (5, 5), (6, 1)], ranks=2, colocate=False)
def test_comm_opt_keeps_grahams_bound_over_what_it_may_split(sizes, ranks, colocate):
    work = work_of(*[(1, out, into) for out, into in sizes])
    costs = [[compute_cost(factor) for factor in block.factors] for block in work]
    jobs = [sum(c) for c in costs] if colocate else [c for pair in costs for c in pair]
    placement = CommOpt(colocate=colocate).place(work, ranks)
    assert max(loads_of(placement)) <= graham(ranks) * best_makespan(jobs, ranks) + 1e-9


def test_factors_of_all_blocks_are_balanced_together():
    # 27 and 27 (block a) against 40 and 1 (b): block by block, a would fill both ranks first.
    def cost(factor: FactorSpec) -> float:
        return {3: 27.0, 4: 40.0, 1: 1.0}[factor.size]

    work = work_of((1, 3, 3), (1, 4, 1))
    placement = CommOpt(colocate=False, cost=cost).place(work, 2)
    assert sorted(loads_of(placement, cost)) == [41.0, 54.0]


@pytest.mark.parametrize("strategy", [CommOpt, HybridOpt, MemOpt])
def test_colocated_factors_have_one_owner(strategy):
    placement = strategy().place(work_of(*[(1, 4, 5)] * 5), 4)
    assert all(len(set(block.owners)) == 1 for block in placement.blocks)
    assert all(block.owners[0] in block.gradient_workers for block in placement.blocks)


@pytest.mark.parametrize(
    ("strategy", "ranks", "owners"),
    [(CommOpt, 4, 2), (CommOpt, 2, 2), (HybridOpt, 4, 2), (HybridOpt, 3, 2)],
)
def test_without_colocation_a_blocks_factors_are_spread_over_its_workers(strategy, ranks, owners):
    block = strategy(colocate=False).place(work_of((1, 4, 4)), ranks).blocks[0]
    assert len(set(block.owners)) == owners
    assert set(block.owners) <= set(block.gradient_workers)


# Two blocks: one factor of size 8; two groups of 6. Compute: 512 + 1 > 2 * 216 + 2; memory: 65 <
# 2 * 36 + 2; so which block comes first, on rank 0, tells which cost is in force.
@pytest.mark.parametrize(
    ("cost", "first"),
    [(compute_cost, 0), (memory_cost, 1), (lambda factor: float(factor.size == 6), 1)],
    ids=["compute", "memory", "user"],
)
@pytest.mark.parametrize("strategy", [CommOpt, HybridOpt, MemOpt])
def test_the_cost_is_the_one_that_was_given(strategy, cost, first):
    work = work_of((1, 8, 1), (2, 6, 1))
    placement = strategy(cost=cost).place(work, 2)
    assert placement.blocks[first].owners[0] == 0
    assert placement.blocks[1 - first].owners[0] == 1


@pytest.mark.parametrize(
    ("factor", "compute", "memory"),
    [
        (FactorSpec("A", "right", 1, 7), 343.0, 49.0),
        (FactorSpec("A", "right", 3, 2), 24.0, 12.0),
    ],
)
def test_costs(factor, compute, memory):
    assert compute_cost(factor) == compute
    assert memory_cost(factor) == memory


def test_a_shorter_column_is_given_less():
    # Columns {0, 2} and {1}: with equal loads per rank the first is given twice as many blocks.
    placement = HybridOpt().place(work_of(*[(1, 4, 4)] * 9), 3)
    workers = [block.gradient_workers for block in placement.blocks]
    assert workers.count((0, 2)) == 6
    assert workers.count((1,)) == 3
    assert loads_of(placement) == [384.0, 384.0, 384.0]


def test_a_diagonal_costs_its_elements() -> None:
    """Else the table of a language model would take all owners to itself."""
    diagonal = FactorSpec("A", "right", 1, 50_000, kind="diagonal")
    assert compute_cost(diagonal) == memory_cost(diagonal) == 50_000
    matrix = FactorSpec("G", "left", 2, 10)
    assert (compute_cost(matrix), memory_cost(matrix)) == (2000, 200)
