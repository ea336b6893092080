"""Measured profiles: their curves, the sides that were asked for, and agreement over ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from soframe.comm import SingleProcess, TorchDistributed
from soframe.comm.recording import Recording
from soframe.kernels import devices
from soframe.planning import measure as measuring
from soframe.planning.hardware import Collective, Curve, Hardware, Link
from soframe.planning.measure import COLLECTIVES, Series, measure, seconds
from tests.distributed.harness import run_ranks
from tests.planning.kit import little_traffic

FACTORISATIONS = ("cholesky", "inverse", "triangular", "qr", "eigh")


@pytest.fixture(autouse=True)
def _little_traffic() -> Iterator[None]:
    with little_traffic():
        yield


@cache
def measured() -> Hardware:
    return measure("cpu", sides=(8, 48, 160), dtypes=("float64", "bfloat16"), budget=0.1)


@pytest.mark.slow
def test_every_operator_has_a_curve_of_positive_seconds() -> None:
    assert measured().operators.keys() == {
        *("product:float32", "product:float64", "product:bfloat16"),  # others fall back on float32
        *("convolution:float64", "convolution:bfloat16"),
        *(f"{one}:{dtype}" for one in FACTORISATIONS for dtype in ("float32", "float64")),
    }
    for curve in measured().operators.values():
        sizes, seconds = zip(*curve.points, strict=True)
        assert len(sizes) >= 2
        assert all(a < b for a, b in itertools.pairwise(sizes))
        assert all(0 < second < 60 for second in seconds)
    assert 0 < measured().launch < 1
    assert measured().bandwidth > 1e6
    assert (measured().collectives, measured().node, measured().across) == ((), None, None)
    assert measured().memory is None


def test_large_matrices_take_longer() -> None:
    """Sizes far enough apart that other work on the machine does not matter."""
    cholesky = measure("cpu", sides=(8, 256), budget=0.0).operators["cholesky:float32"]
    assert cholesky(256) > cholesky(8)


def test_factorisations_are_measured_at_the_sides_of_a_model() -> None:
    for operator in FACTORISATIONS:
        sides = [side for side, _ in measured().operators[f"{operator}:float64"].points]
        assert sides in ([8, 160], [8, 48, 160])


@pytest.mark.parametrize(
    ("sides", "found"),
    [
        ([64, 8, 64], [8, 64]),
        ([500], [32, 128, 500]),
        # A small and a middle one first, by which the budget foresees others.
        ([576, 256], [32, 256, 128, 576]),
        (range(10, 1001, 10), [10, 230, 120, 340, 450, 560, 670, 780, 890, 1000]),
    ],
)
def test_many_sides_are_thinned_out(sides: list[int], found: list[int]) -> None:
    assert measuring._some(sides) == found


def test_a_budget_ends_a_curve() -> None:
    """Without a budget every curve has the two points that a power law needs."""
    spent = measure("cpu", sides=(8, 16, 24, 4096), budget=0.0)
    assert all(len(curve.points) == 2 for curve in spent.operators.values())
    assert spent.operators["cholesky:float32"].points[-1][0] == 24


def test_points_are_sorted_in_whatever_order_they_are_measured() -> None:
    backend, device = SingleProcess(), torch.device("cpu")
    (series,) = measuring.products(device, ("float32",), (32, 8, 16))[:1]
    (found,) = measuring.seconds([series], backend, device, 1.0).values()
    assert list(found) == [8, 16, 32]


class Sums(TorchDispatchMode):
    """Counts sums, which displace what caches hold."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.sum.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("key", ["product:float32", "launch"])
def test_operands_come_from_memory_and_seconds_are_the_processors(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=time.perf_counter, thread_time=itertools.count().__next__)
    monkeypatch.setattr(measuring, "time", clock)
    calls: list[int] = []
    series = Series(key, [4], lambda size: lambda: calls.append(size), 1.0)
    with Sums() as sums:
        found = seconds([series], SingleProcess(), torch.device("cpu"), 0.1)
    cold = key != "launch"
    assert found == {series: {4: 1.0}}
    assert sums.count == (len(calls) if cold else 0)


def test_the_budget_is_of_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that other processes share: each look at the clock costs half of the budget."""
    wall = itertools.count()
    clock = SimpleNamespace(
        perf_counter=lambda: float(next(wall)), thread_time=itertools.count().__next__
    )
    monkeypatch.setattr(measuring, "time", clock)
    calls: list[int] = []
    series = Series("product:float32", [4, 8, 16], lambda size: lambda: calls.append(size), 1.0)
    found = seconds([series], SingleProcess(), torch.device("cpu"), 2.0)
    # Two probes and a sample of the sizes that every curve has, and nothing else.
    assert calls == [4, 4, 4, 8, 8, 8]
    assert found == {series: {4: 1.0, 8: 1.0}}


@pytest.mark.parametrize(
    ("costs", "budget", "sizes"),
    [
        # By the power 2 of sizes of 1 and 2, a size of 8 takes 3 * 64 s of 150 s, or of 230 s.
        ({1: 1, 2: 4, 8: 64}, 240.0, [1, 2]),
        ({2: 1, 4: 4, 16: 64}, 360.0, [2, 4, 16]),
        # A size below one that was measured takes no longer: 3 * 4 s of 32 s.
        ({2: 1, 16: 4, 12: 4}, 60.0, [2, 12, 16]),
    ],
)
def test_a_size_is_left_out_if_its_power_foresees_too_many_seconds(
    costs: dict[int, int], budget: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0])
    monkeypatch.setattr(measuring, "time", clock)

    def call(size: int) -> None:
        now[0] += costs[size]

    series = Series("launch", list(costs), lambda size: lambda: call(size), 2.0)
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    found = seconds([series], SingleProcess(), torch.device("cpu"), budget)
    assert found == {series: {size: costs[size] for size in sizes}}


@pytest.mark.parametrize(("budget", "passes"), [(0.0, 3), (1.0, 5)])
def test_python_takes_few_samples_without_a_budget_and_no_more_than_many(
    budget: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: next(looks))
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "MOST", 5)
    measuring._hooks("LinearHelper", torch.device("cpu"), budget)
    # A pass without hooks looks at the clock twice, a step three times.
    assert next(looks) == (2 + 3) * passes


def test_links_are_those_of_broadcasts() -> None:
    series = {
        Series(name, [4, 8], lambda size: lambda: None, 1.0, groups=[(0, 1)]): {4: s, 8: 2 * s}
        for name, s in (("reduce", 2.0), ("broadcast", 4.0), ("all_reduce", 8.0))
    }
    limits = measuring._limits(torch.device("cpu"))
    times = {limit: {limit.sizes[0]: 1.0} for limit in limits}
    host = measuring._Host({"LinearHelper": 0.0, "Conv2dHelper": 0.0}, 0.0)
    made = measuring._profile(torch.device("cpu"), SingleProcess(), {**times, **series}, host)
    assert made.within == Link(latency=4.0, bandwidth=8 / 8.0)


def test_python_is_timed_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes a tick with hooks and without, and the rest of the step another."""
    clock = SimpleNamespace(perf_counter=time.perf_counter, thread_time=itertools.count().__next__)
    monkeypatch.setattr(measuring, "time", clock)
    host = measuring._python(torch.device("cpu"), 0.0)
    assert host.calls == {"LinearHelper": 0.0, "Conv2dHelper": 0.0}
    assert host.block == 1 / 8


def test_random_numbers_stay_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    measure("cpu", sides=(8,), budget=0.0)
    assert torch.equal(torch.rand(4), expected)


def test_a_measured_profile_survives_its_file(tmp_path: Path) -> None:
    measured().save(tmp_path / "here.json")
    assert Hardware.load(tmp_path / "here.json") == measured()


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="'meta' is not measured"):
        measure("meta")
    with pytest.raises(ValueError, match="'int8' is not a floating dtype"):
        measure("cpu", dtypes=("int8",))
    with pytest.raises(ValueError, match="sides must be positive"):
        measure("cpu", sides=(8, 0))
    with pytest.raises(ValueError, match="simulated ranks"):
        measure("cpu", backend=Recording(world_size=4))


def on_a_rank(rank: int, ranks: int, fused: bool) -> Hardware:
    with little_traffic() as patch:
        if rank > 0:  # a slow rank, which would stop earlier by itself
            slow = {n: lambda n=n: 10 * getattr(time, n)() for n in ("perf_counter", "thread_time")}
            clock = SimpleNamespace(**slow)
            patch.setattr(measuring, "time", clock)
        patch.setattr(devices, "fast_bfloat16", lambda: rank == 0)
        return measure("cpu", backend=TorchDistributed(fused=fused), sides=(8, 16), budget=0.1)


@pytest.mark.distributed
def test_two_ranks_have_one_profile() -> None:
    one, other = run_ranks(on_a_rank, 2, False)
    assert one == other
    assert "product:bfloat16" in one.operators
    assert [(one.operation, one.ranks) for one in one.collectives] == [(x, 2) for x in COLLECTIVES]
    for collective in one.collectives:
        assert len(collective.seconds.points) >= 2
        assert all(0 < second < 60 for _, second in collective.seconds.points)
        assert one.collective(collective.operation, 4096, (0, 1)) > 0
    assert one.node is None
    assert one.across is None
    assert one.within.latency > 0
    assert one.within.bandwidth > 0
    assert "ranks: 2" in one.source


@pytest.mark.distributed
@pytest.mark.slow
def test_of_five_ranks_pairs_are_measured_at_the_same_time() -> None:
    found = run_ranks(on_a_rank, 5, True)
    assert all(one == found[0] for one in found)
    pairs = [one.operation for one in found[0].collectives if one.ranks == 2]
    assert pairs == ["broadcast", "reduce"]


def in_a_subgroup(rank: int, ranks: int) -> Hardware | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    with little_traffic():
        return measure("cpu", backend=TorchDistributed(group), sides=(8, 16), budget=0.0)


@pytest.mark.distributed
def test_a_group_of_ranks_is_measured_by_itself() -> None:
    outside, one, other = run_ranks(in_a_subgroup, 3)
    assert outside is None
    assert one == other
    assert {collective.ranks for collective in one.collectives} == {2}


def test_a_gpu_has_batches_and_rates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Series of a GPU allocate nothing until they run, so a processor can name them."""
    device = torch.device("cuda", 0)
    about = SimpleNamespace(total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    series = [
        *measuring._limits(device),
        *measuring.products(device, ("float32",), half=True),
        *measuring.factorisations(device, ("float32",), (16, 2048, 8192)),
    ]
    found = {one: {size: 1.0 * one.batch * size for size in one.sizes} for one in series}
    host = measuring._Host({"LinearHelper": 3e-4, "Conv2dHelper": 2e-4}, 1.0)
    made = measuring._profile(device, SingleProcess(), found, host)
    assert {"product:float32", "product:tf32", "product:bfloat16"} <= made.operators.keys()
    assert made.batched.keys() == {f"{one}:float32" for one in FACTORISATIONS}
    assert made.factorisation("eigh", 16, 8, "float32") == pytest.approx(128)
    assert made.operators["eigh:float32"](2048) == pytest.approx(2048)
    # 64 matrices of 2,048 would take a gigabyte; all of 8,192 more.
    sides = [(one.batch, list(one.sizes)) for one in series if one.key.startswith("qr")]
    assert sides == [(1, [16, 2048, 8192]), (8, [16, 2048]), (64, [16])]
    assert (made.device, made.memory) == ("cuda", 7)
    assert (made.hooks, made.host) == (pytest.approx(1e-4), 0.0)
    assert made.calls == host.calls


@pytest.mark.parametrize(
    ("hosts", "node"),
    [("aaaa", None), ("aabb", 2), ("abab", 1), ("aaabbbbb", 1), ("aaaabbbbbbbb", 4)],
)
def test_a_node_is_the_ranks_of_one_host(hosts: str, node: int | None) -> None:
    assert measuring._node(hosts) == node


def test_a_link_gives_the_broadcasts_that_it_was_made_of() -> None:
    link = Link(1e-4, 1e9)
    made = Hardware("x", "cpu", "", 0, 1, {"product:float32": Curve()}, within=link)
    sizes = (4.0, 1e12)
    curve = Curve(tuple((size, made.collective("broadcast", size, range(8))) for size in sizes))
    (found,) = measuring._links([Collective("broadcast", 8, curve)])
    assert math.isclose(found.latency, link.latency, rel_tol=1e-3)
    assert math.isclose(found.bandwidth, link.bandwidth, rel_tol=1e-3)


def test_a_profile_knows_the_flops_of_what_it_times() -> None:
    for series in measuring.products(torch.device("cpu"), ["float32"], [4, 8]):
        operator = series.key.partition(":")[0]
        for size in series.sizes[:2]:
            call = series.make(size)
            with FlopCounterMode(display=False) as counted:
                call()
            assert counted.get_total_flops() == measuring.FLOPS[operator](size), series.key
