"""Who holds what where curvature is sharded, against tables written by hand."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from soframe.strategies import OwnerLocal, Sharded
from soframe.strategies.balance import assign, compute_cost
from soframe.strategies.placement import complete
from tests.strategies.test_balance import work_of


@pytest.mark.parametrize(
    ("size", "ranks", "groups"),
    [
        (4, 1, [()]),
        (4, 4, [()]),
        (None, 9, [()]),
        (4, 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, 5, [(0,), (1, 2), (3, 4)]),
        (4, 6, [(0, 1, 2), (3, 4, 5)]),
        (1, 3, [(0,), (1,), (2,)]),
    ],
)
def test_groups_are_neighbours(size, ranks, groups):
    placement = Sharded(group=size).place(work_of(*[(1, 3, 4)] * 30), ranks)
    placement.validate()
    found = {members for block in placement.blocks for members in block.contributors or [()]}
    assert sorted(found) == groups
    even = len({len(members) for members in groups}) == 1 and len(groups[0]) in (0, size)
    assert bool(placement.notes) != even
    for block in placement.blocks:
        members = block.contributors[0] if block.contributors else range(ranks)
        assert block.owners[0] in members
        assert block.gradient_workers[0] in members
        assert block.holders == ((block.owners[0],),) * 2


def test_a_note_says_how_groups_were_cut():
    assert Sharded(group=2).place(work_of((1, 3, 4)), 5).notes == (
        "groups of 2 do not divide 5 ranks: 3 group(s) of 1 or 2 ranks instead",
    )


def test_the_largest_factors_are_solved_apart_from_where_they_precondition():
    # 2 ranks: second-order data of 128 and 32 go to ranks 0 and 1, running factors of 64 and 16 to
    # the rank with less: 64 to rank 1 (96), 16 stays with its worker, which has 112 then.
    work = work_of((1, 8, 8), (1, 4, 4))
    big, small = Sharded().place(work, 2).blocks
    assert (big.gradient_workers, big.owners) == ((0,), (1, 1))
    assert (small.gradient_workers, small.owners) == ((1,), (1, 1))
    big, small = Sharded(colocate=True).place(work, 2).blocks
    assert (big.gradient_workers, big.owners) == ((0,), (0, 0))
    assert (small.gradient_workers, small.owners) == ((1,), (1, 1))


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        ({}, True),
        ({"decay": 0.5}, False),  # an accumulator has the decay of the preconditioner
        ({"kind": "vector"}, False),
        ({"kind": "diagonal"}, False),
        ({"needs": ("A",)}, False),
        ({"reads": "gradient"}, False),
    ],
    ids=str,
)
def test_sums_over_calls_alone_wait(change, waits):
    (work,) = work_of((1, 8, 8))
    changed = tuple(replace(factor, **change) for factor in work.factors)
    for factors in (changed, (changed[0], work.factors[1]), (work.factors[0], changed[1])):
        # A factor that no solver takes needs other places than those of the strategy.
        own = replace(work, factors=factors, unsolved=("A",))
        first, second = complete(Sharded(deferred=True).place([work, own], 2)).blocks
        assert first.deferred
        assert second.deferred == waits
        assert not complete(Sharded().place([own], 2)).blocks[0].deferred


def test_one_rank_does_everything_where_statistics_are_the_owners():
    for block in OwnerLocal(cost=compute_cost).place(work_of((1, 8, 3), (2, 4, 4)), 3).blocks:
        (worker,) = block.gradient_workers
        assert block.owners == (worker, worker)
        assert block.contributors == block.holders == ((worker,), (worker,))
        assert block.packed
        assert not block.deferred


def test_a_group_with_fewer_ranks_is_given_less():
    # Per rank: 1.5 in the second, 2 in the first, 2.5 and 2, 2.5 and 3 (a tie, to who has less).
    assert assign([3.0, 2.0, 2.0, 1.0], [0.0, 0.0], sizes=[1, 2]) == [1, 0, 1, 0]


@pytest.mark.parametrize("group", [0, -1, True])
def test_a_group_has_ranks(group):
    with pytest.raises(ValueError, match="Sharded: group must be a number of ranks or None"):
        Sharded(group=group)


@pytest.mark.parametrize("wire", ["int8", "torch.bfloat16", ""])
def test_the_wire_is_a_dtype(wire):
    with pytest.raises(ValueError, match="Sharded: wire must be one of float64, float32, bfloat16"):
        Sharded(wire=wire)


BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "distribution.py"


@pytest.mark.parametrize(
    ("model", "blocks", "held"),
    [pytest.param("BERT-Large", 144, 40, marks=pytest.mark.slow), ("ResNet-50", 54, 8)],
)
@pytest.mark.slow
def test_the_default_sends_and_holds_less_by_an_order_than_mem_opt(model, blocks, held):
    spec = importlib.util.spec_from_file_location("distribution", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["distribution"] = benchmark  # where dataclasses look up annotations
    spec.loader.exec_module(benchmark)
    work = benchmark.MODELS[model]
    assert len(work) == blocks
    # D and W of the literature: elements of all factors, elements of all gradients.
    square = sum(f.groups * f.size**2 for block in work for f in block.factors)
    gradient = sum(block.shape[1] * block.shape[2] for block in work)
    expected = {"BERT-Large": (1057.4e6, 302.2e6), "ResNet-50": (153.85e6, 25.5e6)}[model]
    assert (square, gradient) == pytest.approx(expected, rel=1e-3)
    costs = benchmark.compare(work, 64, 10, 100, ["mem-opt", "sharded"])
    assert costs["sharded"]["less_sent"] >= 40
    assert costs["sharded"]["less_held"] >= held
