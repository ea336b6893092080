"""The benchmark of whole steps: each kind of step does what it is called, and means are means."""

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from benchmarks import scaling, steps
from benchmarks.peers import OPTIMIZERS, missing
from benchmarks.timing import (
    PHASES,
    STEP_KINDS,
    TURNS,
    Contender,
    Network,
    contender,
    figures,
    mean_step,
    phase_table,
    race,
    table,
)
from soframe.strategies import MemOpt
from soframe.testing import compare

TINY = Network(
    "tiny",
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
    lambda: (torch.randn(5, 3, 4, 4), torch.randint(3, (5,))),
    F.cross_entropy,
    images=True,
)


def tiny(name: str, **own: Any) -> Contender:
    torch.manual_seed(0)
    return contender(name, TINY, TINY.model(), torch.device("cpu"), own)


def held(one: Contender) -> tuple[list[Tensor], list[Tensor]]:
    """What statistics and what solves make."""
    blocks = one.preconditioner.blocks
    running = [t.clone() for b in blocks for t in b.running.values()]
    data = [t.clone() for b in blocks for ts in b.second_order.values() for t in ts.values()]
    return running, data


@pytest.mark.parametrize("name", ["soframe, eigen", "soframe, own"])
def test_each_kind_of_step_does_what_it_is_called(name: str) -> None:
    one = tiny(name, solver="inverse", channels_last=True)
    one.warm_up()
    for _ in range(2):
        for kind, count in TURNS:
            for _ in range(count):
                running, data = held(one)
                one.turn(kind, 1)
                after = held(one)
                assert all(map(torch.equal, running, after[0])) == (kind == "precondition")
                assert all(map(torch.equal, data, after[1])) == (kind != "solve")
    assert {kind: len(times) for kind, times in one.times.items()} == {
        kind: 2 * count for kind, count in TURNS
    }


@pytest.mark.parametrize(("every", "solve_every"), [(1, 10), (10, 100), (5, 5), (2, 6)])
def test_the_mean_is_that_of_an_interval(every: int, solve_every: int) -> None:
    times = {"precondition": 1.0, "statistics": 10.0, "solve": 100.0}
    kinds = [
        "solve"
        if step % solve_every == 0
        else "statistics"
        if step % every == 0
        else "precondition"
        for step in range(solve_every)
    ]
    expected = statistics.fmean(times[kind] for kind in kinds)
    assert mean_step(times, every, solve_every) == pytest.approx(expected)


def test_a_race_has_a_row_for_each_and_sgd_is_the_unit() -> None:
    contenders = [tiny("sgd"), tiny("soframe, inverse")]
    rounds = race(contenders, 0.0)
    assert rounds == 3
    sgd, own = figures({one.name: one.times for one in contenders})
    assert sgd["name"] == "sgd"
    assert all(math.isclose(sgd["precondition"], sgd[kind], rel_tol=100) for kind in STEP_KINDS)
    assert sgd["1/10"] == sgd["10/100"] == (1.0, 1.0, 1.0)
    low, middle, high = own["10/100"]
    assert 0 < low <= middle <= high
    text = table("title", [sgd, own])
    assert "soframe, inverse" in text
    assert f"{middle:.2f} ({low:.2f} to {high:.2f})" in text


def test_a_whole_interval_has_one_slow_step() -> None:
    device = torch.device("cpu")
    contenders = [
        contender(name, TINY, TINY.model(), device, {}, (2, 4))
        for name in ("sgd", "soframe, inverse")
    ]
    for one in contenders:
        ticks, taken = [0.0], [0]
        slow = 100.0 if one.preconditioner is not None else 1.0

        def step(ticks: Any = ticks, taken: Any = taken, slow: float = slow) -> None:
            ticks[0] += slow if taken[0] % 4 == 0 else 1.0
            taken[0] += 1

        one.clock, one.step = (lambda ticks=ticks: ticks[0]), step
    sgd, own = steps.whole(contenders, 4)  # a first step, and an interval
    assert sgd["p99 : median"] == sgd["mean : SGD"] == 1.0
    assert own["mean"] == pytest.approx((3 + 100) / 4 * 1e3)
    assert own["mean : SGD"] == pytest.approx((3 + 100) / 4)
    assert own["max : median"] == pytest.approx(100.0)


def test_who_solves_in_the_background_takes_its_steps_by_itself() -> None:
    device, order = torch.device("cpu"), []
    contenders = []
    for name in ("sgd", "soframe, inverse, background", "soframe, inverse"):
        one = contender(name, TINY, TINY.model(), device, {}, (2, 4))

        def step(own: Any = one.step, name: str = name) -> None:
            order.append(name)
            own()

        one.step = step
        contenders.append(one)
    rows = steps.whole(contenders, 4)
    assert [row["name"] for row in rows] == [one.name for one in contenders]
    assert order == ["sgd", "soframe, inverse"] * 5 + ["soframe, inverse, background"] * 5
    settings = [repr(one.preconditioner.curvature.parts.solves) for one in contenders[1:]]
    assert settings == ["background=10", "background=0"]


@pytest.mark.parametrize("name", ["soframe, inverse, channels last", "adam", "sgd,channels_last"])
def test_a_name_that_says_what_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no .*or of sgd, soframe, kfac-pytorch"):
        tiny(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in steps.CONTENDERS if n in OPTIMIZERS and n not in missing(OPTIMIZERS)]
)
@pytest.mark.parametrize("given", [False, True])
def test_an_optimizer_steps_with_and_without_passes(name: str, given: bool) -> None:
    network = Network(
        "rows",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        lambda: (torch.randn(5, 3), torch.randint(2, (5,))),
        None if given else F.cross_entropy,
    )
    (one,) = steps.entered(
        ["soframe, inverse", name] if given else [name],  # statistics need passes
        network,
        lambda name: contender(name, network, network.model(), torch.device("cpu"), {}),
    )
    before = [p.detach().clone() for p in one.model.parameters()]
    one.warm_up()
    assert one.taken == 6
    assert not all(map(torch.equal, before, one.model.parameters()))


def test_who_cannot_train_a_network_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.entered(["torch-muon", "sgd"], TINY, tiny)[0].name == "sgd"
    assert "tiny: torch-muon is left out: Muon only supports 2D" in capsys.readouterr().err


def test_channels_last_changes_the_layout_and_nothing_else() -> None:
    plain, last = tiny("sgd"), tiny("sgd, channels_last")
    for one in (plain, last):
        one.warm_up()
    weights = []
    for one in (plain, last):
        assert one.model[0].weight.is_contiguous(memory_format=torch.channels_last) == (one is last)
        weights.append([p.detach() for p in one.model.parameters()])
    for one, other in zip(*weights, strict=True):
        compare(one, other, "weights", rtol=1e-4)


def test_a_network_without_images_has_no_channels_to_lay_out() -> None:
    rows = Network(
        "rows",
        lambda: nn.Linear(3, 2),
        lambda: (torch.randn(5, 3), torch.randint(2, (5,))),
        F.cross_entropy,
    )
    one = contender("soframe, inverse, channels_last", rows, rows.model(), torch.device("cpu"), {})
    one.warm_up()
    assert one.taken == 1 + sum(count for _, count in TURNS)


def test_what_a_part_adds_is_compared_round_by_round() -> None:
    """Of two rounds the second is twice as slow; soframe adds half of what the peer adds."""

    def times(precondition: float, statistics: float, solve: float) -> dict[str, list[list[float]]]:
        own = {"precondition": precondition, "statistics": statistics, "solve": solve}
        return {kind: [[t, t], [2 * t, 2 * t]] for kind, t in own.items()}

    rows = figures(
        {
            "sgd": times(10, 10, 10),
            "kfac-pytorch, inverse": times(12, 16, 116),
            "soframe, inverse": times(11, 13, 63),
            "soframe, eigen": times(11, 13, 63),
        }
    )
    sgd, peer, own, alone = rows
    assert "phases" not in sgd
    assert peer["phases"] == {"apply": 3000, "factors": 6000, "solve": 150000}  # the median, in ms
    assert own["of peer"] == dict.fromkeys(PHASES, (0.5, 0.5, 0.5))
    assert "of peer" not in peer
    assert "of peer" not in alone
    head, *lines = phase_table("title", rows).strip().splitlines()[1:]
    assert head.split()[:2] == ["apply", "ms"]
    assert [line.split("  ")[0] for line in lines] == [row["name"] for row in rows[1:]]
    assert lines[1].split()[2:5] == ["1500.0", "3000.0", "75000.0"]
    assert lines[1].count("0.50 (0.50 to 0.50)") == 3


def test_operations_are_those_of_the_products() -> None:
    """Two linear layers, one without bias, 10 rows; by hand."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    preconditioner = soframe.Preconditioner(model, kl_clip=None)
    assert scaling.operations(preconditioner.placement, rows=10, attention=7.0) == {
        "plain": 3 * (7 + 10 * (4 * 4 + 4 * 2)),
        "apply": 4 * 4 * (4 + 4) + 4 * 2 * (4 + 2),
        "factors": 10 * (4**2 + 4**2 + 4**2 + 2**2) / 2,
        "solve": (4**3 + 4**3 + 4**3 + 2**3) / 2,
    }


def test_operations_are_those_of_the_busiest_rank() -> None:
    """Two equal layers on one rank, and one that takes a little more than either on the other."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(3, 5))
    work = soframe.Preconditioner(model, kl_clip=None).placement.work
    counts = scaling.operations(MemOpt().place(work, 2), rows=10)
    assert counts["solve"] == 2 * (5**3 + 4**3) / 2  # the small one's inputs are the largest factor
    assert counts["factors"] == 10 * (2 * (4**2 + 5**2) + 6**2 + 1) / 2  # everybody's


@pytest.mark.parametrize("power", [-1.0, 0.0, 2.5])
def test_the_exponent_of_a_power_law(power: float) -> None:
    xs = [1.0, 2.0, 8.0]
    assert scaling.slope(xs, [3 * x**power for x in xs]) == pytest.approx(power, abs=1e-12)
