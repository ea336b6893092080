"""The report of a step: each field has the reductions that it names."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from soframe.comm import TorchDistributed
from soframe.comm.report import OVER_RANKS, OVER_STAGES, Report
from tests.distributed.harness import run_ranks

SUMMED = ("failed", "bad_gradient", "large", "bad_statistics", "changed")
LISTS = ("common", "weights", "present", "changed_anywhere", "waits", "reached")
OF_STAGES = ("changed_stages", "due", "curved", "passes", "samples", "fewest")


def report_of(rank: int) -> Report:
    numbers = {name: float(10 * i + rank) for i, name in enumerate((*SUMMED, *OF_STAGES))}
    lists = {name: [float(i), 100.0 + rank] for i, name in enumerate(LISTS)}
    return Report(**numbers, **lists)  # type: ignore[arg-type]


def on_ranks(rank: int, ranks: int) -> Report:
    return report_of(rank).over_ranks(TorchDistributed())


@pytest.mark.distributed
def test_ranks_add_flags_and_lists_and_leave_the_numbers_of_stages() -> None:
    for rank, found in enumerate(run_ranks(on_ranks, 3)):
        for i, name in enumerate(SUMMED):
            assert getattr(found, name) == 3 * 10 * i + (0 + 1 + 2), name
        for i, name in enumerate(LISTS):
            assert getattr(found, name) == [3.0 * i, 303.0], name
        for name in OF_STAGES:
            assert getattr(found, name) == getattr(report_of(rank), name), name


def test_stages_take_flags_and_their_own_numbers_but_not_what_changed_here() -> None:
    """Which copies of one stage alone compare."""
    assert {*OVER_STAGES} == {*SUMMED, *OF_STAGES} - {"changed"}
    assert {*OVER_RANKS} == {*SUMMED, *LISTS}
    assert {*OVER_STAGES, *OVER_RANKS} == {field.name for field in fields(Report)}
    report = report_of(0)
    # Copies of a stage compare what has changed on any.
    anywhere = replace(report, changed_anywhere=[report.changed_stages])
    assert report.with_numbers(report.numbers()) == anywhere
    doubled = report.with_numbers([2 * number for number in report.numbers()])
    assert (doubled.large, doubled.changed) == (2 * report.large, report.changed)
