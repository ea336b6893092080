"""Every registered method, on every number of ranks and under every strategy, is one process."""

from __future__ import annotations

from typing import Any

import pytest

from soframe import available
from soframe.methods.base import Method
from soframe.registry import KINDS
from soframe.testing import check_method
from tests.distributed.harness import run_ranks

METHODS = sorted(available("method"))  # a new registration enters by itself
ON_TWO_RANKS = ("adamw", "eva", "kfac", "muon", "shampoo", "tnt")
"""They differ in what they read of calls and gradients, have solved, and remember; so do "ekfac"
and "soap-muon", on more ranks."""


def of_other_fishers(name: str) -> bool:
    method = KINDS["method"].build(name, Method)
    return method.captures and not method.empirical_only


def each_kind_first(names: list[str], kinds: tuple[str, ...]) -> list[Any]:
    """The methods, of which `make test` runs one of each kind."""
    return [
        pytest.param(name, marks=[] if name in kinds else [pytest.mark.thorough]) for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_one_process(name: str) -> None:
    """In micro-batches, with an instance for each layer, and resumed in the middle."""
    check_method(name, ranks=())


@pytest.mark.distributed
@pytest.mark.parametrize("name", each_kind_first(METHODS, ON_TWO_RANKS))
def test_two_ranks_are_one_process(name: str) -> None:
    """Where one rank makes the directions of a block, and where all do."""
    strategies = ("comm-opt", "mem-opt")
    check_method(name, ranks=(2,), strategies=strategies, fishers=("empirical",), launch=run_ranks)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("ekfac", (3, 4)),
        ("soap-muon", (4,)),
        *(
            pytest.param(name, (3, 4), marks=pytest.mark.thorough)
            for name in METHODS
            if name != "ekfac"
        ),
    ],
)
def test_ranks_are_one_process(name: str, ranks: tuple[int, ...]) -> None:
    """Under every strategy; on two numbers of ranks, saved on four and resumed on two."""
    check_method(name, ranks=ranks, fishers=("empirical",), launch=run_ranks)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", each_kind_first([name for name in METHODS if of_other_fishers(name)], ("ekfac",))
)
def test_another_fisher_on_ranks_is_one_process(name: str) -> None:
    """Where statistics come from is the same under all strategies: two tell."""
    strategies = ("mem-opt", "hybrid-opt")
    check_method(name, ranks=(4,), strategies=strategies, fishers=("type-2",), launch=run_ranks)
