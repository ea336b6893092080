"""A placement is data: pure, checked, hashed and printed."""

import ast
import importlib
import inspect
import random
import re
import subprocess
import sys
from dataclasses import replace
from textwrap import dedent

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soframe import available
from soframe import strategies as package
from soframe.specs import FactorSpec
from soframe.strategies import (
    BlockPlacement,
    CommOpt,
    HybridOpt,
    MemOpt,
    OwnerLocal,
    Placement,
    Sharded,
)
from soframe.strategies.balance import compute_cost, memory_cost
from tests.examples import examples
from tests.strategies.test_balance import work_of

SHAPES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 500), st.integers(1, 500)), max_size=12
)
CHOICES = st.one_of(
    st.builds(CommOpt, colocate=st.booleans()),
    st.builds(MemOpt, cost=st.just(memory_cost)),
    st.builds(
        HybridOpt, colocate=st.booleans(), gradient_workers=st.floats(0, 1, exclude_min=True)
    ),
    st.builds(HybridOpt, gradient_workers=st.just(1)),
    st.builds(
        Sharded,
        colocate=st.booleans(),
        group=st.one_of(st.none(), st.integers(1, 70)),
        deferred=st.booleans(),
        wire=st.sampled_from([None, "bfloat16"]),
    ),
    st.builds(OwnerLocal, cost=st.sampled_from([compute_cost, memory_cost])),
)


@settings(max_examples=examples(40))
@given(shapes=SHAPES, ranks=st.integers(1, 64), strategy=CHOICES)
def test_every_placement_can_be_executed(shapes, ranks, strategy):
    work = work_of(*shapes)
    placement = strategy.place(work, ranks)
    placement.validate()
    assert placement.world_size == ranks
    assert placement.work == tuple(work)
    for block in placement.blocks:
        assert all(source in block.gradient_workers for source in block.sources)
        if isinstance(strategy, CommOpt | MemOpt | HybridOpt):
            assert set(block.owners) <= set(block.gradient_workers)
            assert not (block.contributors)
            assert not (block.holders)
            assert not (block.deferred)
            assert block.packed == (ranks > 1)
        assert list(block.gradient_workers) == sorted(block.gradient_workers)


@settings(max_examples=examples(20))
@given(shapes=SHAPES, ranks=st.integers(1, 64), strategy=CHOICES)
def test_a_placement_depends_on_nothing_else(shapes, ranks, strategy):
    first = strategy.place(work_of(*shapes), ranks)
    torch.manual_seed(random.randrange(100))
    random.random()
    assert strategy.place(tuple(work_of(*shapes)), ranks) == first


@pytest.mark.slow
def test_a_placement_is_the_same_in_another_process():
    placement = HybridOpt(colocate=False).place(work_of((1, 9, 5), (2, 4, 7), (1, 3, 3)), 6)
    code = """
        from soframe.strategies import HybridOpt
        from tests.strategies.test_balance import work_of
        placement = HybridOpt(colocate=False).place(work_of((1, 9, 5), (2, 4, 7), (1, 3, 3)), 6)
        print(placement.digest.hex())
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == placement.digest.hex()


def test_no_strategy_knows_of_processes():
    for name in ("kaisa", "sharded", "balance", "base", "placement", "plan"):
        module = importlib.import_module(f"{package.__name__}.{name}")
        names = {
            alias.name
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in [*node.names, ast.alias(getattr(node, "module", None) or "")]
        }
        assert not {name for name in names if name.split(".")[0] in ("torch", "os", "random")}


# -- digest ----------------------------------------------------------------------------------

BASE = HybridOpt().place(work_of((1, 3, 4), (2, 5, 2)), 4)
CHANGES = {
    "strategy": replace(BASE, strategy="other"),
    "ranks": replace(BASE, world_size=5),
    "notes": replace(BASE, notes=("a note",)),
    "order": replace(BASE, work=BASE.work[::-1], blocks=BASE.blocks[::-1]),
    "name": replace(BASE, work=(replace(BASE.work[0], name="x"), BASE.work[1])),
    "factor": replace(
        BASE,
        work=(
            replace(BASE.work[0], factors=(FactorSpec("A", "left", 1, 4), BASE.work[0].factors[1])),
            BASE.work[1],
        ),
    ),
    "owners": replace(BASE, blocks=(replace(BASE.blocks[0], owners=(0, 2)), BASE.blocks[1])),
    "workers": replace(
        BASE, blocks=(replace(BASE.blocks[0], gradient_workers=(0,)), BASE.blocks[1])
    ),
    "sources": replace(BASE, blocks=(replace(BASE.blocks[0], sources=(0,) * 4), BASE.blocks[1])),
    **{
        name: replace(BASE, blocks=(replace(BASE.blocks[0], **{name: value}), BASE.blocks[1]))
        for name, value in {
            "contributors": ((0,), (0, 1)),
            "holders": ((0,), (0,)),
            "deferred": True,
            "packed": not BASE.blocks[0].packed,
            "wire": "bfloat16",
        }.items()
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_tells_any_change(change):
    assert CHANGES[change].digest != BASE.digest


@settings(max_examples=examples(30))
@given(st.tuples(SHAPES, st.integers(1, 5), CHOICES), st.tuples(SHAPES, st.integers(1, 5), CHOICES))
def test_digests_are_equal_if_and_only_if_the_data_are(one, other):
    first = one[2].place(work_of(*one[0]), one[1])
    second = other[2].place(work_of(*other[0]), other[1])
    again = one[2].place(work_of(*one[0]), one[1])
    assert (first.digest == second.digest) == (first == second)
    assert again.digest == first.digest
    assert len(first.digest) == 32


# -- validate --------------------------------------------------------------------------------

GOOD = BlockPlacement("b0", owners=(0, 1), gradient_workers=(0, 1), sources=(0, 1, 0))
BROKEN = {
    "one owner per factor": replace(GOOD, owners=(0,)),
    "an owner is not a rank": replace(GOOD, owners=(0, 3)),
    "an owner is not a rank ": replace(GOOD, owners=(-1, 0)),
    "no gradient worker": replace(GOOD, gradient_workers=()),
    "a worker is not a rank": replace(GOOD, gradient_workers=(0, 3)),
    "a worker is named twice": replace(GOOD, gradient_workers=(0, 1, 1)),
    "one source per rank": replace(GOOD, sources=(0, 1)),
    "one source per rank ": replace(GOOD, sources=(0, 1, 0, 1)),
    "source of rank 2 is not a gradient worker": replace(GOOD, sources=(0, 1, 2)),
    "gradient worker 1 must be its own source, not 0": replace(GOOD, sources=(0, 0, 0)),
    "contributors of every factor or of none": replace(GOOD, contributors=((0,),)),
    "a factor without contributors": replace(GOOD, contributors=((0,), ())),
    "contributors: not all are ranks": replace(GOOD, contributors=((0,), (3,))),
    "contributors must be sorted, each named once": replace(GOOD, contributors=((1, 0), (0,))),
    "holders of every factor or of none": replace(GOOD, holders=((0,), (1,), (2,))),
    "a factor without holders": replace(GOOD, holders=((), (1,))),
    "holders: not all are ranks": replace(GOOD, holders=((0, -1), (1,))),
    "holders must be sorted, each named once": replace(GOOD, holders=((0, 0), (1,))),
    "owner 1 does not hold what it solves": replace(GOOD, holders=((0,), (0, 2))),
    "wire must be one of float64, float32, bfloat16, float16, not int8": replace(GOOD, wire="int8"),
}


def place(*blocks: BlockPlacement) -> Placement:
    return Placement("mine", 3, tuple(work_of((1, 2, 2))), blocks)


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_placement_is_refused_by_name(problem):
    place(GOOD).validate()
    message = re.escape(f"strategy 'mine', block 'b0': {problem.strip()}")
    with pytest.raises(ValueError, match=message):
        place(BROKEN[problem]).validate()


@pytest.mark.parametrize(
    "blocks",
    [(), (replace(GOOD, block="b1"),), (GOOD, GOOD), (GOOD, replace(GOOD, block="b1"))],
    ids=["none", "another", "twice", "one too many"],
)
def test_blocks_that_are_not_the_works_are_refused(blocks):
    with pytest.raises(ValueError, match=r"strategy 'mine': the placement's blocks are"):
        place(*blocks).validate()


def test_an_owner_need_not_be_a_gradient_worker():
    placement = place(replace(GOOD, owners=(2, 2)))
    placement.validate()
    assert placement.groups() == [(0, 1, 2), (0, 2)]


# -- groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "ranks", "groups"),
    [
        (CommOpt(), 1, []),
        (CommOpt(), 4, [(0, 1, 2, 3)]),
        (MemOpt(), 4, [(0, 1, 2, 3)]),
        (HybridOpt(), 2, [(0, 1)]),
        # Sharing goes along the columns, exchange along the rows.
        (HybridOpt(), 4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        (HybridOpt(), 3, [(0, 1), (0, 1, 2), (0, 2)]),
        (HybridOpt(), 6, [(0, 1), (0, 2, 4), (1, 3, 5), (2, 3), (4, 5)]),
        (HybridOpt(gradient_workers=2), 6, [(0, 1, 2), (0, 3), (1, 4), (2, 5), (3, 4, 5)]),
    ],
)
def test_groups_are_those_that_are_needed(strategy, ranks, groups):
    assert strategy.place(work_of(*[(1, 2, 2)] * 12), ranks).groups() == groups


def test_blocks_of_one_shape_share_a_stack() -> None:
    work = work_of((1, 3, 4), (1, 2, 2), (1, 3, 4))
    assert CommOpt().place(work, 1).stacks == [[0, 2], [1]]
    # Where each entry is updated by itself, shapes are all one.
    elementwise = [replace(block, elementwise=True) for block in work]
    assert CommOpt().place(elementwise, 1).stacks == [[0, 1, 2]]


@pytest.mark.parametrize(("size", "calls"), [(2047, 1), (2048, 2)])
def test_a_buffer_is_closed_at_32_mebibytes(size: int, calls: int) -> None:
    """Four triangles of 2048 x 2048 numbers in float32 take a little more, those of 2047 less."""
    placement = CommOpt().place(work_of((1, size, size), (1, size, size)), 2)
    assert placement.traffic(0, statistics=True)["reduce"]["calls"] == calls


# -- print -----------------------------------------------------------------------------------


def test_the_printed_table():
    placement = HybridOpt(gradient_workers=2).place(work_of((1, 3, 4), (2, 5, 2), (1, 1, 1)), 5)
    assert str(placement) == dedent(
        f"""\
        placement 'hybrid-opt' on 5 rank(s), {placement.digest.hex()[:12]}
        block  groups x out x in  owners   gradient workers  exchange
        -----  -----------------  -------  ----------------  -----------
        b0     1x3x4              A:1 G:1  1,3               1->0,4 3->2
        b1     2x5x2              A:0 G:0  0,2,4             0->1 2->3
        b2     1x1x1              A:3 G:3  1,3               1->0,4 3->2
        note: 2 gradient workers do not divide 5 ranks: 2 column(s) of 2 or 3 ranks instead"""
    )


def test_the_printed_table_says_where_statistics_go():
    placement = Sharded(group=2, deferred=True, wire="bfloat16").place(work_of((1, 3, 4)), 4)
    header, _, row = str(placement).splitlines()[1:]
    assert header.endswith("exchange  statistics")
    assert row.endswith("0->1-3    0-1=>1 deferred packed bfloat16")
    apart = replace(GOOD, contributors=((0, 1), (2,)), holders=((0, 1, 2), (1,)))
    row = str(place(apart)).splitlines()[-1]
    assert row.endswith("A:0-1=>0-2 G:2=>1")


@pytest.mark.parametrize(("blocks", "held"), [(2, "1,3"), (4, "0-3")])
def test_a_line_of_several_blocks_has_the_ranks_of_all(blocks: int, held: str) -> None:
    """A group of ranks contributes to each block, and both groups to some block."""
    placement = Sharded(group=2).place(work_of(*[(1, 3, 4)] * blocks), 4)
    row = str(placement).splitlines()[-1]
    assert row.startswith(f"b* ({blocks})  1x3x4              A:{held} G:{held}  1 of ")
    assert row.endswith(f"each to 3  0-3=>{held}")


def test_the_printed_table_where_nothing_is_exchanged():
    placement = CommOpt().place(work_of((1, 3, 4)), 5)
    assert str(placement).splitlines()[-1].split() == ["b0", "1x3x4", "A:0", "G:0", "0-4", "-"]


@pytest.mark.parametrize(
    "module",
    ["step.engine", "estimate.statistics", "estimate.solves", "estimate.gradients"],
)
def test_the_step_knows_no_strategy_by_name(module):
    """Names stand in docstrings and as the default of an argument; classes are not imported."""
    tree = ast.parse(inspect.getsource(importlib.import_module(f"soframe.{module}")))
    names = set(available("strategy"))
    allowed = {id(d) for n in ast.walk(tree) if isinstance(n, ast.arguments) for d in n.defaults}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            assert id(node) in allowed, node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("soframe.strateg"):
            assert node.module.rpartition(".")[2] in ("base", "placement", "work", "buckets")
        assert not isinstance(node, ast.Attribute) or node.attr != "strategy", node.lineno
