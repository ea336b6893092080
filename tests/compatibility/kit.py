"""What tests of all frameworks say of runs on ranks."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compatibility.fully_sharded import weights
from tests.distributed.harness import RankFailure, run_ranks

Result = tuple[dict[str, Tensor], dict[str, int]]
"""The weights that a rank ends with, and what its preconditioner counted."""


def result_of(run: Any) -> Result:
    """Close a run's preconditioner, and return what it came to."""
    run.preconditioner.close()
    return weights(run.model), run.preconditioner.counters


def state_of(run: Any) -> dict[str, Any]:
    """Close a run's preconditioner, and return what the run goes on from."""
    state: dict[str, Any] = run.state()
    run.preconditioner.close()
    return state


def assert_same(
    results: Sequence[Result],
    expected: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    *,
    spoilt: bool,
    what: str,
    unused: str | None = None,
) -> None:
    """Every rank has the weights of one process, and has skipped what was spoilt and nothing else.

    Args:
        results: Of each rank.
        expected: The weights of one process.
        start: The weights at the start, from which all have moved.
        spoilt: Whether a gradient was not finite.
        what: The case, for messages.
        unused: What the names of parameters begin with that do not move; None where all do.
    """
    for found, counters in results:
        for name, weight in found.items():
            where = f"{what}, {name}"
            torch.testing.assert_close(
                weight,
                expected[name],
                rtol=1e-9,
                atol=1e-9,
                msg=lambda text, where=where: f"{where}: {text}",
            )
            stands = unused is not None and name.startswith(unused)
            assert torch.equal(weight, start[name]) == stands, where
        left = dict(counters)
        skipped = left.pop("skipped_updates")
        assert skipped == spoilt, what
        assert left.pop("skipped_statistics") in (0, skipped), what
        assert not any(left.values()), what


def assert_rounded(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    what: str = "",
) -> None:
    """The weights are off by more than float32 rounds, and less than 5 % of the way that they go.

    Args:
        found: The weights of a run in bfloat16.
        expected: Those of a run in float64.
        start: Those at the start.
        what: The case, for messages.
    """
    with torch.no_grad():
        moved = max(float((expected[n].double() - start[n].double()).norm()) for n in found)
        off = max(float((found[n].double() - expected[n].double()).norm()) for n in found)
    assert 1e-4 < off / moved < 0.05, (what, off / moved)


def assert_refused(function: Callable[..., Any], ranks: int, words: str) -> None:
    """Every rank raises, in these words: a pattern, in which a dot may be a new line."""
    for failure in run_ranks(function, ranks, check=False, timeout=60):
        assert isinstance(failure, RankFailure)
        assert failure.exception is not None, failure
        with pytest.raises(type(failure.exception), match=f"(?s){words}"):
            raise failure.exception


def refused(rank: int, ranks: int, functions: list[Callable[[int, int], None]]) -> list[str]:
    """What each raises, one after the other: no rank waits for another, nor has it gone."""
    found = []
    for function in functions:
        try:
            function(rank, ranks)
        except Exception as error:  # which it is, is looked at
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")
        gc.collect()
    return found


def require_refused(table: list[tuple[Callable[[int, int], None], str]], ranks: int) -> None:
    """Every rank raises what the table says of each function, all in one start of the ranks."""
    results = run_ranks(refused, ranks, [function for function, _ in table], timeout=150)
    for index, (function, words) in enumerate(table):
        for texts in results:
            assert re.search(f"(?s){words}", texts[index]), (function.__name__, texts[index])
