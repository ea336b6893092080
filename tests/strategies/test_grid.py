"""The KAISA grid against tables written by hand."""

import pytest

from soframe.strategies import CommOpt, HybridOpt, MemOpt
from soframe.strategies.base import Strategy
from tests.strategies.test_balance import work_of

# (strategy, ranks) -> the columns that a grid of so many ranks has.
EVERY = {
    "comm": {w: [tuple(range(w))] for w in (1, 2, 3, 4, 6, 8, 16)},
    "mem": {w: [(r,) for r in range(w)] for w in (1, 2, 3, 4, 6, 8, 16)},
    "half": {
        1: [(0,)],
        2: [(0,), (1,)],
        3: [(0, 2), (1,)],
        4: [(0, 2), (1, 3)],
        6: [(0, 2, 4), (1, 3, 5)],
        8: [(0, 2, 4, 6), (1, 3, 5, 7)],
        16: [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))],
    },
    "quarter": {
        1: [(0,)],
        2: [(0,), (1,)],
        3: [(0,), (1,), (2,)],
        4: [(0,), (1,), (2,), (3,)],
        6: [(0, 4), (1, 5), (2,), (3,)],
        8: [(0, 4), (1, 5), (2, 6), (3, 7)],
        16: [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)],
    },
    "two": {
        2: [(0, 1)],
        3: [(0, 2), (1,)],
        4: [(0, 2), (1, 3)],
        6: [(0, 3), (1, 4), (2, 5)],
        8: [(0, 4), (1, 5), (2, 6), (3, 7)],
        16: [(c, c + 8) for c in range(8)],
    },
    "three": {
        3: [(0, 1, 2)],
        4: [(0, 1, 2, 3)],
        6: [(0, 2, 4), (1, 3, 5)],
        8: [(0, 3, 6), (1, 4, 7), (2, 5)],
        16: [(0, 5, 10, 15), (1, 6, 11), (2, 7, 12), (3, 8, 13), (4, 9, 14)],
    },
}
STRATEGIES: dict[str, Strategy] = {
    "comm": CommOpt(),
    "mem": MemOpt(),
    "half": HybridOpt(),
    "quarter": HybridOpt(gradient_workers=0.25),
    "two": HybridOpt(gradient_workers=2),
    "three": HybridOpt(gradient_workers=3),
}


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name, table in EVERY.items() for ranks in table]
)
def test_columns(name, ranks):
    placement = STRATEGIES[name].place(work_of(*[(1, 2, 2)] * 50), ranks)
    placement.validate()
    assert sorted({b.gradient_workers for b in placement.blocks}) == EVERY[name][ranks]


# strategy, ranks -> the sources of the blocks whose gradient workers are those.
@pytest.mark.parametrize(
    ("strategy", "ranks", "workers", "sources"),
    [
        (HybridOpt(), 4, (0, 2), (0, 0, 2, 2)),
        (HybridOpt(), 4, (1, 3), (1, 1, 3, 3)),
        (HybridOpt(gradient_workers=2), 6, (1, 4), (1, 1, 1, 4, 4, 4)),
        (HybridOpt(), 3, (0, 2), (0, 0, 2)),
        (HybridOpt(), 3, (1,), (1, 1, 1)),
        # Rank 6 is alone in the third row: the row has no rank of column 2, so another's sends.
        (HybridOpt(gradient_workers=3), 8, (2, 5), (2, 2, 2, 5, 5, 5, 2, 2)),
        (MemOpt(), 3, (1,), (1, 1, 1)),
        (CommOpt(), 3, (0, 1, 2), (0, 1, 2)),
    ],
)
def test_the_column_sends_along_the_rows(strategy, ranks, workers, sources):
    placement = strategy.place(work_of(*[(1, 2, 2)] * 20), ranks)
    found = {b.sources for b in placement.blocks if b.gradient_workers == workers}
    assert found == {sources}


@pytest.mark.parametrize(
    ("wanted", "ranks", "note"),
    [
        (2, 3, "2 gradient workers do not divide 3 ranks: 2 column(s) of 1 or 2 ranks instead"),
        (3, 4, "3 gradient workers do not divide 4 ranks: 1 column(s) of 4 ranks instead"),
        (4, 6, "4 gradient workers do not divide 6 ranks: 2 column(s) of 3 ranks instead"),
        (3, 8, "3 gradient workers do not divide 8 ranks: 3 column(s) of 2 or 3 ranks instead"),
        (5, 16, "5 gradient workers do not divide 16 ranks: 3 column(s) of 5 or 6 ranks instead"),
        (0.5, 3, "1.5 gradient workers do not divide 3 ranks: 2 column(s) of 1 or 2 ranks instead"),
        (
            0.25,
            6,
            "1.5 gradient workers do not divide 6 ranks: 4 column(s) of 1 or 2 ranks instead",
        ),
    ],
)
def test_a_note_says_what_was_done_where_it_does_not_divide(wanted, ranks, note):
    placement = HybridOpt(gradient_workers=wanted).place(work_of((1, 2, 2)), ranks)
    assert placement.notes == (note,)
    assert str(placement).endswith(f"\nnote: {note}")


def test_no_note_where_it_divides():
    for ranks in [*range(1, 65), 98, 147, 196]:
        for workers in (w for w in range(1, ranks + 1) if ranks % w == 0):
            for wanted in (workers, workers / ranks):
                placement = HybridOpt(gradient_workers=wanted).place(work_of((1, 2, 2)), ranks)
                assert placement.notes == (), (ranks, wanted)
                assert len(placement.blocks[0].gradient_workers) == workers, (ranks, wanted)


@pytest.mark.parametrize("wanted", [0, -1, 0.0, -0.5, 1.5, True, "0.5", None, float("nan")])
def test_hybrid_refuses_what_is_neither_fraction_nor_number(wanted):
    with pytest.raises(ValueError, match=r"HybridOpt: gradient_workers .* not "):
        HybridOpt(gradient_workers=wanted)


def test_hybrid_refuses_more_workers_than_ranks():
    with pytest.raises(ValueError, match=r"HybridOpt: gradient_workers=5 but there are 4 rank"):
        HybridOpt(gradient_workers=5).place(work_of((1, 2, 2)), 4)
