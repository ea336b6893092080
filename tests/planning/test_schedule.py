"""Schedules against timelines that were computed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from soframe.planning.costs import Arithmetic
from soframe.planning.hardware import Hardware, Link
from soframe.planning.schedule import STEP_KINDS, PricedPart, Schedule, Timing
from soframe.strategies.plan import Message, Route
from tests.planning.kit import CPU

PASSES, OPTIMIZER = 0.9, 0.02  # 0.3 s forward, 0.6 s backward
USUAL = Arithmetic(statistics=0.1, reduce=0.03, observe=0.05, solve=0.0, direct=0.2, write=0.04)
PLAIN = PASSES + 0.04 + 0.05 + 0.2 + OPTIMIZER
STATISTICS = PLAIN + 0.1 + 0.03
RARELY = 10**9

# A broadcast between two ranks of a link without latency takes its bytes over the rate.
LINK: Hardware = replace(CPU, within=Link(0.0, 1.0))
PAIR = (0, 1)


def messages(**seconds: Any) -> dict[str, Any]:
    """Return messages of so many seconds each, by phase; the same in each kind of step."""
    each = [(phase, [message(s) for s in times]) for phase, times in seconds.items()]
    return {
        "plain": [(phase, some) for phase, some in each if phase not in ("reduce", "share")],
        "statistics": [(phase, some) for phase, some in each if phase != "share"],
        "solve": each,
    }


def message(seconds: float) -> Message:
    one = LINK.collective("broadcast", 1e6, PAIR) / 1e6
    return Message(Route("broadcast", PAIR), seconds / one)  # type: ignore[arg-type]


def timing(
    *parts: PricedPart,
    statistics_every: int = 1,
    solve_every: int = RARELY,
    turns: tuple[int, ...] = (),
    hardware: Hardware = LINK,
    gradients: int = 0,
    background: int = 0,
    added: Mapping[str, float] | None = None,
) -> Timing:
    schedule = Schedule(
        hardware,
        parts,
        ranks=2,
        passes=PASSES,
        gradients=gradients,
        optimizer=OPTIMIZER,
        background=background,
        added=added or {},
    )
    return schedule.timing(statistics_every, solve_every, *turns)


def rank(count: int = 2, sent: dict[str, Any] | None = None, **seconds: float) -> PricedPart:
    return PricedPart(count, replace(USUAL, **seconds), sent or dict.fromkeys(STEP_KINDS, ()))


def test_without_messages_a_step_is_the_sum_of_its_phases() -> None:
    assert timing(rank()).mean == pytest.approx(STATISTICS)
    assert timing(rank(), statistics_every=10).mean == pytest.approx(PLAIN + 0.13 / 10)
    solving = timing(rank(solve=0.7), statistics_every=5, solve_every=10)
    assert solving.mean == pytest.approx(PLAIN + 0.13 / 5 + 0.07)
    assert solving.longest == pytest.approx(STATISTICS + 0.7)
    assert solving.phases["solve"] == pytest.approx(0.07)
    assert solving.phases["statistics"] == pytest.approx(0.02)
    assert solving.exposed == pytest.approx(dict.fromkeys(solving.exposed, 0.0))


def test_turns_spread_the_solve() -> None:
    spread = timing(rank(solve=0.8), solve_every=8, turns=(4,))
    assert spread.mean == pytest.approx(STATISTICS + 0.1)
    assert spread.longest == pytest.approx(STATISTICS + 0.2)


@pytest.mark.parametrize("reduce", [0.5, 1.2, 3.0])
def test_sums_travel_behind_the_next_passes(reduce: float) -> None:
    found = timing(rank(sent=messages(reduce=[reduce])))
    # From the end of the averages to the next step's use: all but the averages.
    hidden = STATISTICS - 0.03
    exposed = max(0.0, reduce - hidden)
    assert found.exposed["reduce"] == pytest.approx(exposed, abs=1e-6)
    assert found.mean == pytest.approx(STATISTICS + exposed)


def test_rare_sums_that_travel_longer_than_a_step_are_exposed_in_the_next_one() -> None:
    found = timing(rank(sent=messages(reduce=[3.0])), statistics_every=10)
    # From the end of the averages to the passes of the next step, which has none.
    exposed = 3.0 - PLAIN
    assert found.exposed["reduce"] == pytest.approx(exposed / 10, abs=1e-6)
    assert found.mean == pytest.approx(PLAIN + (0.13 + exposed) / 10)
    # A solve, however rare, waits for its own sums.
    assert found.longest == pytest.approx(STATISTICS + 3.0 - 0.04 - 0.05)


@pytest.mark.parametrize("slots", [None, 1])
def test_phases_with_a_price_of_their_own_are_added(slots: int | None) -> None:
    """Where two ranks compute on one processor, twice."""
    added = {"clip": 0.5, "move": 0.25, "none": 7.0}
    hardware = replace(LINK, slots=slots)
    without = timing(rank(), hardware=hardware)
    found = timing(rank(), hardware=hardware, added=added)
    turns = 1 if slots is None else 2
    assert (found.phases["clip"], found.phases["move"]) == (0.5 * turns, 0.25 * turns)
    assert found.mean == pytest.approx(without.mean + 0.75 * turns)


def test_a_solve_waits_for_its_sums() -> None:
    found = timing(rank(sent=messages(reduce=[0.5]), solve=0.7), solve_every=1)
    assert found.exposed["reduce"] == pytest.approx(0.5 - 0.04 - 0.05)
    assert found.mean == pytest.approx(STATISTICS + 0.7 + 0.41)


@pytest.mark.parametrize("share", [[0.3, 0.3], [0.2, 0.8], [1.5, 0.5]])
def test_results_travel_while_further_ones_are_computed(share: list[float]) -> None:
    found = timing(rank(sent=messages(share=share), solve=0.7), solve_every=1)
    exposed = max(sum(share) - 0.7, *share)
    assert found.exposed["share"] == pytest.approx(exposed)
    assert found.mean == pytest.approx(STATISTICS + 0.7 + exposed)


def test_updates_travel_while_further_ones_are_computed() -> None:
    found = timing(rank(sent=messages(exchange=[0.1, 0.1, 0.1])))
    assert found.exposed["exchange"] == pytest.approx(0.1)
    alone = timing(rank(sent=messages(gradients=[0.1, 0.1], agree=[0.01])))
    assert alone.mean == pytest.approx(STATISTICS + 0.21)


@pytest.mark.parametrize("solve", [1.0, 4.0, 6.0])
def test_solves_in_the_background_land_three_steps_later(solve: float) -> None:
    every = 10
    sent = messages(share=[0.2, 0.2])
    found = timing(rank(sent=sent, solve=solve), solve_every=every, background=3)
    # The solve begins and lands at the same point of a step, three steps apart.
    late = max(0.0, solve - 3 * STATISTICS)
    assert found.exposed["solve"] == pytest.approx(late / every)
    assert found.exposed["share"] == pytest.approx(0.4 / every)
    assert found.mean == pytest.approx(STATISTICS + (late + 0.4) / every)
    assert found.longest == pytest.approx(STATISTICS + late + 0.4)


def test_collectives_that_take_the_processor_hide_nothing() -> None:
    shared = replace(LINK, slots=2)
    sent = messages(reduce=[0.5], exchange=[0.1, 0.1])
    found = timing(rank(sent=sent), hardware=shared)
    assert found.mean == pytest.approx(STATISTICS + 0.7)
    behind = timing(rank(solve=0.6), hardware=shared, solve_every=10, background=3)
    assert behind.mean == pytest.approx(STATISTICS + 0.06)


def test_more_ranks_than_processors_take_turns() -> None:
    """Two ranks on one processor: the work of both, but no more of one that works alone."""
    shared = replace(LINK, slots=1)
    parts = (rank(1, solve=0.9), rank(1, solve=0.1))
    found = timing(*parts, hardware=shared, solve_every=1)
    assert found.mean == pytest.approx(2 * STATISTICS + 1.0)
    assert found.phases["solve"] == pytest.approx(1.0)
    alone = timing(rank(1, solve=0.9), rank(1, solve=0.1), hardware=replace(LINK, slots=2))
    assert alone.mean == timing(*parts).mean
    # Of four ranks on two nodes each node has its own processor.
    assert replace(shared, node=1).crowd(4) == 1.0


def test_gradients_are_averaged_in_buckets_behind_the_backward_pass() -> None:
    slow = replace(LINK, within=Link(0.0, 25e6))
    bucket = slow.collective("all_reduce", 25e6, range(2))
    assert bucket > 0.6  # longer than the pass
    found = timing(rank(), hardware=slow, gradients=50_000_000)
    # The first bucket starts with the backward pass, whose statistics come last.
    exposed = max(2 * bucket - 0.6 - 0.1, bucket)
    assert found.exposed["average"] == pytest.approx(exposed)
    # Sixty million bytes are three of twenty; ten are a single one.
    for size, number in ((60_000_000, 3), (10_000_000, 1)):
        part = slow.collective("all_reduce", size / number, range(2))
        uneven = timing(rank(), hardware=slow, gradients=size)
        exposed = max(number * part - 0.6 - 0.1, part)
        assert uneven.exposed["average"] == pytest.approx(exposed)
    assert "average" not in timing(rank(), hardware=slow).exposed
    quick = replace(LINK, within=Link(0.0, 25e7))
    hidden = timing(rank(), hardware=quick, gradients=50_000_000)
    assert hidden.exposed["average"] == pytest.approx(bucket / 10)


def test_the_slowest_rank_of_each_phase_counts() -> None:
    parts = (rank(1, solve=0.9), rank(3, solve=0.1, direct=0.5, sent=messages(gradients=[0.2])))
    found = timing(*parts, solve_every=1)
    assert found.mean == pytest.approx(STATISTICS + 0.9 + 0.3 + 0.2)
    assert found.imbalance == pytest.approx(0.9 / ((0.9 + 3 * 0.1) / 4))
    assert timing(rank()).imbalance == 1.0


def test_the_longest_messages_are_of_one_rank_each() -> None:
    parts = (
        rank(1, sent=messages(gradients=[0.1, 0.1], exchange=[0.1, 0.1])),
        rank(1, sent=messages(gradients=[0.15], exchange=[0.15])),
    )
    found = timing(*parts)
    assert found.exposed["gradients"] == pytest.approx(0.2)
    # Behind the 0.2 s in which updates are computed, all but the last message.
    assert found.exposed["exchange"] == pytest.approx(0.15)


def test_a_solve_in_the_background_begins_with_its_sums() -> None:
    sent = messages(reduce=[0.5])
    found = timing(rank(sent=sent, solve=3 * STATISTICS + 0.3), solve_every=10, background=3)
    # They are exposed at the step of the solve, which then lands 0.3 s late.
    assert found.exposed["reduce"] == pytest.approx((0.5 - 0.04 - 0.05) / 10, abs=1e-6)
    assert found.exposed["solve"] == pytest.approx(0.03)
    assert found.mean == pytest.approx(STATISTICS + 0.041 + 0.03)
