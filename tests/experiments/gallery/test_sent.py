"""What the gallery's methods send and hold: kinds of factors and parcels, as they are planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from experiments.gallery.dion import Dion
from experiments.gallery.ikfac import IKFAC, Roots
from experiments.gallery.mkor import MKOR
from soframe.comm import Recording
from soframe.layers import BlockShape
from soframe.methods import Direction, Eva, Given, Method
from soframe.settings import grouped
from soframe.specs import FactorKind, FactorSpec
from soframe.strategies import Strategy
from soframe.testing import check_method, compare
from soframe.testing.methods import ALL_CONTRIBUTE
from tests import kit
from tests.curvature import closing, half_square
from tests.distributed.harness import run_ranks
from tests.distributed.test_plans import EVERY, GENERAL, planned
from tests.experiments.gallery.runs import empty, with_gaps, with_parts
from tests.layers.test_experts import Kernel, Routed, batch

EVERY_OTHER = (2, 4)
RANKS = 3


def on_paper(method: Method, strategy: str, rank: int) -> soframe.Preconditioner:
    """Six steps of a rank whose collectives are recorded: layers of 4 x 4 and 4 x 6 matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 4, bias=False))
    statistics, solves = EVERY_OTHER
    options = {
        "method": method,
        "strategy": EVERY[strategy],
        "backend": Recording(rank=rank, world_size=RANKS),
        "kl_clip": None,
    }
    if method.captures:
        options |= {"statistics_every": statistics, "solve_every": solves}
    preconditioner = soframe.Preconditioner(model, **grouped(options))
    x = torch.ones(2, 6)
    kit.train(model, lambda net, _: net(x).square().mean(), range(6), preconditioner)
    preconditioner.close()
    return preconditioner


@pytest.mark.parametrize("strategy", GENERAL)
@pytest.mark.parametrize(
    "method", [IKFAC(size=2), MKOR(), Dion(rank_fraction=0.25)], ids=["ikfac", "mkor", "dion"]
)
def test_bytes_are_the_planned_ones(method: Method, strategy: str) -> None:
    for rank in range(RANKS):
        preconditioner = on_paper(method, strategy, rank)
        placement = preconditioner.placement
        names = [work.name for work in placement.work]
        assert preconditioner.traffic() == planned(placement, rank, 6, EVERY_OTHER, names)
        assert preconditioner.memory_usage() == placement.memory(rank)


def test_statistics_travel_as_their_kind_shapes_them() -> None:
    """By hand: numbers of 4 bytes, in three of six steps."""
    blocks = on_paper(IKFAC(size=2), "comm", 0)  # of sides 6 and 4, and 4 and 4
    assert blocks.traffic()["reduce"]["bytes"] == 3 * 4 * 4 * (3 + 2 + 2 + 2)
    assert blocks.memory_usage()["factors"] == 4 * 4 * (3 + 2 + 2 + 2)
    vectors = on_paper(MKOR(), "comm", 0)
    assert vectors.traffic()["reduce"]["bytes"] == 3 * 4 * (6 + 4 + 4 + 4)
    assert vectors.memory_usage()["factors"] == 4 * (36 + 16 + 16 + 16)


def test_a_kind_s_settings_are_part_of_the_placement() -> None:
    shorter = on_paper(IKFAC(size=1), "comm", 0).placement
    assert shorter.digest != on_paper(IKFAC(size=2), "comm", 0).placement.digest
    assert FactorSpec("K", "right", 2, 9, kind=Roots(6, 0.1)).shape == (2, 3, 3, 3)


@pytest.mark.slow
def test_averages_need_not_see_every_step() -> None:
    check_method(MKOR(), ranks=(), statistics_every=2)
    check_method(IKFAC(size=2), ranks=(), statistics_every=2)


@dataclass(frozen=True)
class Number(FactorKind):
    """The number of averages, from zero."""

    def shape(self, factor: FactorSpec) -> tuple[int, ...]:
        return (factor.groups, factor.size)

    def average(self, running: Tensor, statistics: Tensor, rate: Tensor) -> Tensor:
        return running + 1


@dataclass(frozen=True)
class Numbered(Eva):
    damped = False

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return tuple(replace(factor, kind=Number()) for factor in super().factors(shape))

    def direct(self, step: Given) -> Direction:
        return Direction(step.incoming.clone())


def test_an_expert_without_rows_keeps_its_average() -> None:
    model = Routed()
    options: dict[str, Any] = {"statistics_every": 1, "layers": {"experts": Kernel}}
    with closing(soframe.Preconditioner(model, Numbered(), **options)) as preconditioner:
        for routes in ([0, 1, 2, 0, 1], [0, 1, 1, 0, 0]):
            inputs, targets = batch(routes)
            model.zero_grad()
            half_square(model(inputs), targets).backward()
            preconditioner.step()
        (block,) = preconditioner.curvature.blocks
        assert block.running["g"].mean(1).tolist() == [2, 2, 1]


def test_low_rank_updates_travel_as_their_factors() -> None:
    """By hand: numbers of 4 bytes, of a 4 x 6 matrix of rank one, in six steps."""
    whole = on_paper(Dion(), "mem", 0)
    assert whole.traffic()["exchange"]["bytes"] == 6 * 4 * (4 * 6)
    factors = on_paper(Dion(rank_fraction=0.25), "mem", 0)
    assert factors.traffic()["exchange"]["bytes"] == 6 * 4 * (4 + 6)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["mem-opt", "hybrid-opt"])
def test_blocks_without_a_gradient_keep_their_weights(strategy: str) -> None:
    expected = with_gaps(0, 1, "comm-opt")
    for weights in run_ranks(with_gaps, 3, strategy):
        for weight, of_one_process in zip(weights, expected, strict=True):
            compare(weight, of_one_process, strategy, rtol=1e-12)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        ((2, 4), ("mem-opt", "hybrid-opt")),
        pytest.param((2, 3, 4), ALL_CONTRIBUTE, marks=pytest.mark.thorough),
    ],
)
def test_low_rank_updates_on_ranks_are_one_process(
    ranks: tuple[int, ...], strategies: Sequence[Strategy | str]
) -> None:
    """Saved on four and resumed on two, and in `make test-all` under every strategy."""
    check_method(Dion(rank_fraction=0.25), ranks=ranks, strategies=strategies, launch=run_ranks)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(2, "mem-opt"), (2, "comm-opt"), pytest.param(4, "hybrid-opt", marks=pytest.mark.thorough)],
)
def test_ranks_cut_their_parts_out_of_parcels(ranks: int, strategy: str) -> None:
    """Of matrices that fully_shard has cut, where a parcel has fewer numbers than a part."""
    expected, _, _ = with_parts(0, 1, strategy, sharded=False)
    for rank, (weights, traffic, placement) in enumerate(run_ranks(with_parts, ranks, strategy)):
        for weight, of_one_process in zip(weights, expected, strict=True):
            compare(weight, of_one_process, strategy, rtol=1e-10)
        names = [work.name for work in placement.work]
        assert traffic == planned(placement, rank, 3, (1, 1), names)
        sent = {work.name: bool(work.parcel) for work in placement.work}
        assert sent == {f"{i}.weight": i < 3 for i in range(4)}
        if strategy == "mem-opt":
            # By hand: parcels of 12 + 16 numbers, and one or two of the head's three rows of 12.
            numbers = [3 * (12 + 16) + 12, 3 * (12 + 16) + 2 * 12]
            assert traffic["exchange"]["bytes"] in [3 * 8 * number for number in numbers]


@pytest.mark.distributed
def test_a_missing_parcel_is_an_error_on_all_ranks() -> None:
    for message in run_ranks(empty, 2):
        assert "direct() must return Direction(parcel={'left': ...})" in message
