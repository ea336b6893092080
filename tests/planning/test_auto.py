"""The strategy "auto": the same choice on every rank, within its limit, by the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import soframe
from soframe.comm import Recording
from soframe.strategies import CommOpt
from soframe.strategies.base import Circumstances
from soframe.text import format_bytes, parse_bytes
from tests.curvature import closing
from tests.distributed.harness import run_ranks
from tests.planning.kit import CPU, GPU, dense, little_traffic

WIDTHS = (60, 50, 40, 10)


def on_paper(strategy: Any, ranks: int = 4, **settings: Any) -> soframe.Preconditioner:
    backend = Recording(world_size=ranks)
    distribution = soframe.Distribution(backend=backend)
    return soframe.Preconditioner(
        dense(*WIDTHS), strategy=strategy, distribution=distribution, kl_clip=None, **settings
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    CPU.save(tmp_path / "cpu.json")
    return tmp_path / "cpu.json"


def test_one_process_is_planned_only_within_a_limit(profile: Path) -> None:
    unlimited = soframe.Auto(hardware=profile)
    with closing(soframe.Preconditioner(dense(*WIDTHS), strategy=unlimited)) as own:
        assert not own.placement.notes
    with pytest.raises(ValueError, match="no strategy fits into memory_limit=10 bytes"):
        soframe.Preconditioner(dense(*WIDTHS), strategy=soframe.Auto(10, hardware=profile))


@pytest.mark.slow
def test_the_choice_is_one_of_the_named_strategies_with_a_note(profile: Path) -> None:
    own = on_paper(soframe.Auto(hardware=profile))
    (note,) = own.placement.notes
    assert own.placement.strategy in soframe.available("strategy")
    assert note.startswith("chosen by a plan on cpu, of ")
    assert note in str(own.placement)
    assert on_paper(soframe.Auto(hardware=profile)).placement.digest == own.placement.digest


@pytest.mark.slow
def test_the_note_has_the_choice_and_three_runners_up(
    profile: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="soframe"):
        own = on_paper(soframe.Auto(hardware=profile))
    (note,) = own.placement.notes
    assert f"soframe: {note}" in caplog.messages
    prices, rest = note.partition(": ")[2].split("; "), []
    options = [text.partition(" ms, ")[0].rpartition(" ")[0] for text in prices if " ms, " in text]
    rest = [text for text in prices if " ms, " not in text]
    assert len(options) == len(set(options)) == 4
    assert rest[0].startswith("it is the fastest")
    # Averaged by others, all strategies but the ones of local gradients.
    assert ", of 6: " in note
    assert not any("local gradients" in option for option in options)


@pytest.mark.slow
def test_a_limit_changes_the_choice_and_is_kept(profile: Path) -> None:
    limits = [None, *range(60_000, 400_000, 60_000)]
    chosen = set()
    for limit in limits:
        try:
            own = on_paper(soframe.Auto(limit, hardware=profile))
        except ValueError as error:
            assert f"no strategy fits into memory_limit={limit} bytes" in str(error)  # noqa: PT017
            continue
        chosen.add(own.placement.strategy)
        held = [own.placement.memory(rank)["total"] for rank in range(4)]
        assert limit is None or max(held) <= limit
    assert len(chosen) > 1


def test_the_links_decide(tmp_path: Path) -> None:
    GPU.save(tmp_path / "gpu.json")
    own = on_paper(soframe.Auto(hardware=tmp_path / "gpu.json"), ranks=8)
    assert own.placement.world_size == 8


def test_simulated_ranks_need_a_profile() -> None:
    with pytest.raises(ValueError, match="give it a profile"):
        on_paper("auto")


def test_one_process_needs_neither_profile_nor_measurement() -> None:
    own = soframe.Preconditioner(dense(*WIDTHS), strategy="auto", kl_clip=None)
    assert own.placement.strategy == "comm-opt"


@pytest.mark.parametrize(
    ("text", "number"), [("2GiB", 2**31), ("1.5 kB", 1500), (7, 7), ("3MB", 3 * 10**6), ("5", 5)]
)
def test_limits_have_units(text: Any, number: int) -> None:
    assert parse_bytes(text) == number


def test_sizes_have_three_digits_and_no_exponent() -> None:
    assert [format_bytes(n) for n in (7, 999, 999_400, 999_600)] == [
        "7 B",
        "999 B",
        "999 kB",
        "1 MB",
    ]


@pytest.mark.parametrize("text", ["2 parsecs", "", ".", "-1", 0, "1.2.3GB"])
def test_other_limits_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="not a number of bytes"):
        soframe.Auto(text)


def measured(rank: int, ranks: int, limit: int | None) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = dense(*WIDTHS)
    auto = soframe.Auto(limit, budget=0.0)
    with little_traffic():
        own = soframe.Preconditioner(model, strategy=auto, kl_clip=None, statistics_every=1)
    chosen = own.placement.digest, own.placement.strategy, own.placement.notes
    for step in range(3):
        if step == 2:  # the model changes: the choice stays, and ranks do not measure again
            model[0].weight.requires_grad_(requires_grad=False)
        model.zero_grad()
        model(torch.full((4, WIDTHS[0]), 0.1 + rank)).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
        own.step()
    held = own.memory_usage()["total"]
    again = own.placement.strategy, own.traffic()["measure"]["calls"]
    own.close()
    return (*chosen, held, *again)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "limit"), [pytest.param(2, None, marks=pytest.mark.thorough), (3, 400_000)]
)
def test_ranks_measure_and_agree(ranks: int, limit: int | None) -> None:
    results = run_ranks(measured, ranks, limit)
    digests, strategies, notes, held, after, calls = zip(*results, strict=True)
    assert len({*digests}) == len({*notes}) == len({*calls}) == 1
    assert strategies == after
    assert "chosen by a plan on this machine" in notes[0][-1]
    assert limit is None or max(held) <= limit


def fails(rank: int, ranks: int) -> str:
    del rank, ranks
    auto = soframe.Auto(10, budget=0.0)
    try:
        with little_traffic():
            soframe.Preconditioner(dense(*WIDTHS), strategy=auto, kl_clip=None)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.slow
def test_all_ranks_raise_if_nothing_fits() -> None:
    for said in run_ranks(fails, 2):
        assert "no strategy fits into memory_limit=10 bytes a rank on 2 rank(s)" in said


def test_a_stage_without_blocks_is_placed_without_a_plan() -> None:
    empty = Circumstances(
        blocks=(),
        work=(),
        parameters=(),
        backend=Recording(world_size=2),
        local=False,
        background=0,
        stagger=False,
        statistics_every=10,
        solve_every=100,
        refused=lambda placement: None,
    )
    assert soframe.Auto().settled(empty) == CommOpt()


def test_it_stands_for_comm_opt_until_it_has_chosen() -> None:
    work = soframe.Preconditioner(dense(*WIDTHS), kl_clip=None).placement.work
    assert soframe.Auto().place(work, 4) == CommOpt().place(work, 4)
