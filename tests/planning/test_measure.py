"""Measured profiles: their curves, the sides that were asked for, and agreement over ranks."""

from __future__ import annotations

import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from soframe.comm import SingleProcess, TorchDistributed
from soframe.comm.base import Backend, Handle
from soframe.comm.recording import Recording
from soframe.kernels import devices
from soframe.planning import measure as measuring
from soframe.planning.hardware import Collective, Curve, Hardware, Link
from soframe.planning.measure import COLLECTIVES, Series, measure, seconds
from tests.distributed.harness import run_ranks
from tests.planning.kit import little_traffic

FACTORISATIONS = ("cholesky", "inverse", "triangular", "qr", "eigh")
OF_CACHES, TRAFFIC = measuring.CACHES, dict(measuring.LARGE)  # as they are outside of these tests


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
        ([33], [32, 33]),
        ([129], [32, 129, 128]),
        ([8, 300, 301], [8, 300, 301]),
        # A small and a middle one first, by which the budget foresees others.
        ([576, 256], [32, 256, 128, 576]),
        (range(10, 1001, 10), [10, 230, 120, 340, 450, 560, 670, 780, 890, 1000]),
    ],
)
def test_many_sides_are_thinned_out(sides: list[int], found: list[int]) -> None:
    assert measuring._sides_to_measure(sides) == found


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
    """Collects the bytes of sums, which displace what caches hold."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.default:
            self.sizes.append(args[0].nbytes)
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
    assert sums.sizes == ([measuring.CACHES] * len(calls) if cold else [])


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


def within_a_budget(rank: int, ranks: int, budget: float) -> tuple[float, int]:
    """Return what the clock says after the samples of all collectives, and their number."""
    now = 0.0

    def look() -> float:
        nonlocal now
        seconds = 1.0 if now < budget / 2 else 10.0  # other work begins halfway
        now += seconds if rank == 0 else 0.001
        return now

    backend, device = TorchDistributed(), torch.device("cpu")
    clock = SimpleNamespace(perf_counter=look, thread_time=look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "time", clock)
        series = measuring.collectives(backend, device, measuring.BYTES)
        found = seconds(series, backend, device, budget)
    return now, len(found)


@pytest.mark.distributed
def test_the_budget_is_kept_beside_a_rank_whose_clock_is_slow() -> None:
    """Each look at the clock takes seconds; by its own the other rank has all the time."""
    budget = 400.0
    (spent, series), (slow, _) = run_ranks(within_a_budget, 2, budget, timeout=60)
    assert series == len(COLLECTIVES)
    assert slow < 1 < budget / 2 < spent < 1.25 * budget


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
        *measuring.factorisations(device, ("float32",), (16, 2048, 4096, 8192)),
    ]
    found = {one: {size: 1.0 * one.batch * size for size in one.sizes} for one in series}
    host = measuring._Host({"LinearHelper": 3e-4, "Conv2dHelper": 2e-4}, 1.0)
    made = measuring._profile(device, SingleProcess(), found, host)
    assert {"product:float32", "product:tf32", "product:bfloat16"} <= made.operators.keys()
    assert made.batched.keys() == {f"{one}:float32" for one in FACTORISATIONS}
    assert made.factorisation("eigh", 16, 8, "float32") == pytest.approx(128)
    assert made.operators["eigh:float32"](2048) == pytest.approx(2048)
    # 64 matrices of 2,048 would take a gigabyte, eight of 4,096 the half.
    sides = [(one.batch, list(one.sizes)) for one in series if one.key.startswith("qr")]
    assert sides == [(1, [16, 2048, 4096, 8192]), (8, [16, 2048]), (64, [16])]
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


# -- what is measured, and how often ---------------------------------------------------------------


def test_sizes_are_powers_of_two() -> None:
    def powers(first: int, last: int) -> list[int]:
        return [2**power for power in range(first, last + 1)]

    assert sorted(measuring.SIDES) == powers(4, 11)
    assert sorted(measuring.OF_PRODUCTS) == powers(4, 10)
    assert sorted(measuring.OF_GPU) == powers(6, 12)
    assert sorted(measuring.BYTES) == powers(12, 24)[::2]  # 4 KiB to 16 MiB
    assert measuring.CHANNELS == (2**4, 2**6, 2**8)
    # Of a processor 32 MiB displace what caches hold, and 128 MiB are more than these.
    assert OF_CACHES == 2**25
    assert TRAFFIC == {"cpu": 2**27, "cuda": 2**28}


@pytest.mark.parametrize("half", [False, True])
def test_what_is_measured_by_default(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def series_of(series: Any, backend: Any, device: Any, budget: float) -> dict[Series, Any]:
        found.update(series=series, seconds=budget, seed=torch.initial_seed())
        return {one: dict.fromkeys(one.sizes[:1], 1.0) for one in series}

    def python(device: torch.device, budget: float) -> measuring._Host:
        found["python"] = budget
        return measuring._Host({"LinearHelper": 0.0}, 0.0)

    monkeypatch.setattr(measuring, "seconds", series_of)
    monkeypatch.setattr(measuring, "_python", python)
    monkeypatch.setattr(devices, "fast_bfloat16", lambda: half)
    measure("cpu")
    # Ten seconds, a fifth of them for the host's work; the same random numbers each time.
    assert (found["seconds"], found["python"]) == pytest.approx((8.0, 2.0))
    assert found["seed"] == 0
    powers = {series.key: series.power for series in found["series"]}
    products = ["product:float32"] + ["product:bfloat16"] * half
    assert powers == {
        **dict.fromkeys(("launch", "bandwidth"), 1.0),
        **dict.fromkeys(products, 2.5),
        "convolution:float32": 2.0,
        **{f"{name}:float32": 2.5 for name in FACTORISATIONS},
    }
    sizes = {series.key: sorted(series.sizes) for series in found["series"]}
    assert sizes["launch"] == [4]
    assert sizes["product:float32"] == sorted(measuring.OF_PRODUCTS)
    assert sizes["eigh:float32"] == sorted(measuring.SIDES)
    assert {series.batch for series in found["series"]} == {1}


def test_half_precision_is_measured_if_asked_for() -> None:
    series = measuring.products(torch.device("cpu"), ("float32",))
    assert [one.key for one in series] == ["product:float32", "convolution:float32"]


def test_a_side_of_one_can_be_measured() -> None:
    assert measuring._problem(torch.device("cpu"), SingleProcess(), (1, 8), ("float32",)) is None


def test_limits_stream_the_bytes_of_their_size() -> None:
    for series in measuring._limits(torch.device("cpu")):
        (size,) = series.sizes
        operands = series.make(size)()
        assert isinstance(operands, torch.Tensor)
        assert operands.nbytes == size
        assert (operands == 2).all()  # ones, and one is added


@pytest.mark.parametrize("batch", [1, 3])
def test_factorisations_are_of_damped_averages_of_few_rows(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "cholesky", lambda matrix: matrix)
    series = measuring.factorisations(torch.device("cpu"), ("float64",), (20,))[0]
    make: Any = series.make
    matrix = make.func("cholesky", torch.float64, batch, 20)()
    assert matrix.shape == (batch, 20, 20)
    torch.testing.assert_close(matrix, matrix.mT)
    values = torch.linalg.eigvalsh(matrix)
    # Of five rows fifteen eigenvalues are the damping; the mean of all is about 0.1 + 5 / 20.
    torch.testing.assert_close(values[:, :15], torch.full((batch, 15), 0.1).double())
    assert (values[:, 15:] > 0.11).all()
    assert 0.2 < values.mean() < 0.6


def test_the_calls_of_inverses_and_of_triangular_solves() -> None:
    rows = torch.randn(1, 9, 6, dtype=torch.float64)
    matrix = rows.mT @ rows
    half: Any = measuring._inverse(matrix)()
    torch.testing.assert_close(2 * half, torch.linalg.inv(matrix))
    lower: Any = measuring._triangular(matrix)()  # the matrix times the inverse of L^T
    torch.testing.assert_close(lower, torch.linalg.cholesky(matrix))


class Paper(Recording):
    """Reduces among all ranks alone."""

    _reduce = Backend._reduce


@pytest.mark.parametrize(
    ("kind", "ranks", "of_pairs"),
    [
        (Recording, 2, []),
        (Recording, 3, []),
        (Recording, 4, ["broadcast", "reduce"]),
        (Recording, 5, ["broadcast", "reduce"]),
        (Paper, 5, ["broadcast"]),
    ],
)
def test_pairs_of_ranks_are_measured_from_four_ranks_on(
    kind: type[Recording], ranks: int, of_pairs: list[str]
) -> None:
    backend = kind(world_size=ranks)
    series = measuring.collectives(backend, torch.device("cpu"), (8, 16))
    assert [one.key for one in series] == [*COLLECTIVES, *of_pairs]
    everyone, pairs = tuple(range(ranks)), [(0, 1), (2, 3)]
    assert [one.groups for one in series] == [[everyone]] * 6 + [pairs] * len(of_pairs)
    assert backend.groups == (pairs if of_pairs else [])
    assert {(*one.sizes, one.power) for one in series} == {(8, 16, 1.0)}


def test_collectives_carry_the_bytes_of_their_size() -> None:
    """Of three ranks: 1,200 bytes of float32, or 100 numbers of each."""
    backend = Recording(rank=1, world_size=3)
    for series in measuring.collectives(backend, torch.device("cpu"), (1196,)):
        series.make(1196)()
    entered = [(event.operation, event.numel, event.source) for event in backend.events]
    assert entered == [
        ("all_reduce", 300, None),
        ("reduce", 300, 0),
        ("broadcast", 300, 0),
        ("reduce_scatter", 300, None),
        ("all_gather_shares", 300, None),
        ("all_to_all", 300, None),
    ]
    # To each of the two others the half, and as much from them.
    exchanged = backend.traffic()["measure"]["bytes"] - 5 * 1200
    assert exchanged == 2 * 1200
    call = measuring._collective(backend, torch.device("cpu"), "reduce", [(0, 2)], 8)
    entered_before = len(backend.events)
    assert call() is None  # this rank is in no group
    assert len(backend.events) == entered_before


class Meeting(SingleProcess):
    """A rank whose clock goes on by some ticks where ranks meet."""

    def __init__(self, now: list[float], ticks: float) -> None:
        super().__init__()
        self.now, self.ticks, self.meetings = now, ticks, list[int]()

    def all_reduce(self, tensor: Tensor, phase: str) -> Handle:
        self.now[0] += self.ticks
        self.meetings.append(tensor.numel())
        return super().all_reduce(tensor, phase)


def on_a_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let seconds pass by hand alone."""
    now = [1.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0])
    monkeypatch.setattr(measuring, "time", clock)
    return now


TICK = 2.0**-10


@pytest.mark.parametrize(
    ("key", "cost", "budget", "calls"),
    [
        # Two probes, a sample, and three rounds: half of the budget in calls, 30 a round at most.
        ("launch", TICK, 33 * TICK, 2 + 1 + 3 * 5),
        ("launch", TICK, TICK, 2 + 1),
        ("launch", TICK, 1e3, 2 + 1 + 3 * 30),
        # Short calls are repeated for a tenth of a millisecond, or twenty times.
        ("launch", 2.0**-16, 0.5, 6 * (1 + 3 * 30) + 2),
        ("launch", 2.0**-20, 0.5, 20 * (1 + 3 * 30) + 2),
        # If caches are displaced before each, there is one.
        ("product:float32", 2.0**-20, 0.5, 2 + 1 + 3 * 30),
    ],
)
def test_calls_are_as_many_as_half_of_the_budget_takes(
    key: str, cost: float, budget: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = on_a_clock(monkeypatch), list[int]()

    def call(size: int) -> None:
        now[0] += cost
        seen.append(size)

    series = Series(key, [4], lambda size: lambda: call(size), 1.0)
    found = seconds([series], SingleProcess(), torch.device("cpu"), budget)
    assert found == {series: {4: pytest.approx(cost)}}
    assert len(seen) == calls


@pytest.mark.parametrize("budget", [480, 503])
def test_a_series_leaves_to_the_others_what_it_does_not_spend(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ticks: operands are made in four, a call takes one, and a meeting three."""
    now = on_a_clock(monkeypatch)
    backend = Meeting(now, 3 * TICK)
    calls: list[str] = []

    def make(key: str) -> Callable[[], None]:
        now[0] += 4 * TICK

        def call() -> None:
            now[0] += TICK
            calls.append(key)

        return call

    both = [Series(key, [4], lambda _, key=key: make(key), 1.0) for key in ("launch", "bandwidth")]
    seconds(both, backend, torch.device("cpu"), budget * TICK)
    # A sample takes four with its meeting. Of half of the budget the first has ten in a round
    # (240 / 2 / 3 / 4), and takes 24 + 3 * 40; the other has 14 of what remains (336 / 2 / 3 / 4).
    assert (calls.count("launch"), calls.count("bandwidth")) == (2 + 1 + 3 * 10, 2 + 1 + 3 * 14)
    assert backend.meetings == [1] * (2 + 3 * 2)


@pytest.mark.parametrize(("groups", "meetings"), [((), 2), (((0, 1),), 2 + 4)])
def test_ranks_meet_before_each_sample_of_a_collective(
    groups: Any, meetings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = on_a_clock(monkeypatch)
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(measuring, "MOST", 1)
    monkeypatch.setattr(measuring, "_over_ranks", lambda points, backend: {})
    backend, sizes = Meeting(now, TICK), list[int]()

    def call(size: int) -> None:
        now[0] += 2.0**-20
        sizes.append(size)

    series = Series("reduce", [4], lambda size: lambda: call(size), 1.0, groups=groups)
    seconds([series], backend, torch.device("cpu"), 7 * TICK)
    assert len(backend.meetings) == meetings
    assert len(sizes) == (4 if groups else 2 + 2 * 20)  # a collective is not repeated


class Threefold(SingleProcess):
    """Another rank takes three times as long."""

    def all_gather(self, tensor: Tensor, phase: str) -> list[Tensor]:
        return [tensor, 3 * tensor]


@pytest.mark.parametrize(
    ("groups", "median"),
    [
        ((), 4.5),  # of 1, 2, 3, 6, 6 and 18
        (((0, 1),), 6.0),  # the slower of both
        (((0,), (1,)), 4.0),  # the mean of both
    ],
)
def test_medians_are_over_samples_and_ranks(groups: Any, median: float) -> None:
    series = Series("reduce", [8, 4], lambda size: lambda: None, 1.0, groups=groups)
    points = []
    for size in (8, 4):
        samples = [1.0 * size, 2.0 * size, 6.0 * size]
        points.append(measuring._Point(series, size, 1, 1, 0.0, 0.0, samples))
    found = measuring._over_ranks(points, Threefold())
    assert list(found[series].items()) == [(4, 4 * median), (8, 8 * median)]


def test_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("wait")

        def elapsed_time(self, last: Event) -> float:
            return 8.0 if last is not self else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append(f"{device}"))
    sampler = measuring._Sampler(SingleProcess(), torch.device("cuda", 1))
    series = Series("product:float32", [4], lambda size: lambda: None, 2.5)
    found = sampler.sample(series, lambda: happened.append("call"), 4)
    assert found == 8e-3 / 4
    assert happened == ["cuda:1", "record", *["call"] * 4, "record", "wait"]


# -- the profile -----------------------------------------------------------------------------------


def profile(
    *collectives: Series, device: str = "cpu", others: Sequence[dict[str, Any]] = ()
) -> Hardware:
    """Return a profile of seconds by hand, with the descriptions of other ranks."""
    at = torch.device(device)
    launch, bandwidth = measuring._limits(at)
    samples = {launch: {4: 0.5}, bandwidth: {2**20: 4.0}}
    for series in collectives:
        # Eight bytes take a second of each rank, sixteen take two.
        ranks = len(series.groups[0])
        samples[series] = {8: 1.0 * ranks, 16: 2.0 * ranks}
    with pytest.MonkeyPatch.context() as patch:
        texts = [json.dumps(other) for other in others]
        patch.setattr(measuring, "gather_texts", lambda backend, own, phase: [own, *texts])
        patch.setattr(measuring.platform, "node", lambda: "a")
        patch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
        patch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=7)
        )
        patch.setattr(torch, "get_num_threads", lambda: 4)
        patch.setattr(measuring.os, "sched_getaffinity", lambda pid: {0: range(8)}[pid])
        host = measuring._Host({"LinearHelper": 3e-4}, 2e-4)
        return measuring._profile(at, SingleProcess(), samples, host)


def broadcast(*group: int) -> Series:
    return Series("broadcast", [8, 16], lambda size: lambda: None, 1.0, groups=[group])


def test_a_profile_has_the_slots_and_the_memory_of_a_processor() -> None:
    made = profile()
    assert (made.launch, made.bandwidth) == (0.5, 2 * 2**20 / 4)  # read and written
    assert made.slots == 8 / 4  # processors by threads of a rank
    assert made.host == pytest.approx(2e-4)
    assert (made.node, made.across, made.within) == (None, None, Hardware.within)


def test_ranks_of_two_hosts_have_two_links() -> None:
    others = [{"host": host, "device": "", "threads": 1, "memory": 0} for host in "abb"]
    made = profile(broadcast(0, 1, 2, 3), broadcast(0, 1), others=others)
    # Of four ranks in two rounds, eight bytes in four seconds and sixteen in eight.
    assert made.across == Link(4.0 / 2, 16 / 8.0)
    assert made.within == Link(2.0, 16 / 4.0)
    assert made.node == 2


def test_the_memory_is_that_of_the_smallest_gpu() -> None:
    other = {"host": "a", "device": "GPU", "threads": 1, "memory": 5}
    made = profile(device="cuda", others=[other])
    assert (made.memory, made.slots, made.host) == (5, None, 0.0)


@pytest.mark.parametrize("text", ["model name\t: A processor\nother : x\n", None])
def test_a_processor_has_its_name_from_linux(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(measuring, "Path", lambda path: tmp_path / "cpuinfo")
    assert measuring._processor() == ("A processor" if text else platform.machine())


# -- the host's work in Python ---------------------------------------------------------------------


@pytest.mark.parametrize("name", measuring.LAYERS)
def test_python_is_timed_with_tiny_layers(name: str) -> None:
    make, shape = measuring.LAYERS[name]
    assert math.prod(shape) == {"LinearHelper": 8 * 5, "Conv2dHelper": 8 * 5 * 4 * 4}[name]
    assert make()(torch.rand(shape)).shape == shape


def test_the_time_for_python_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []

    def hooks(name: str, device: torch.device, budget: float) -> tuple[float, float]:
        budgets.append(budget)
        return 10.0 * len(budgets), float(len(budgets))

    monkeypatch.setattr(measuring, "_hooks", hooks)
    host = measuring._python(torch.device("cpu"), 3.0)
    assert budgets == [1.5, 1.5]
    assert host == measuring._Host({"LinearHelper": 10.0, "Conv2dHelper": 20.0}, 1.0)


def test_python_has_half_of_its_time_with_hooks_and_half_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at the wall clock takes a second, after the fewest passes once before each."""
    looks = itertools.count()
    clock = SimpleNamespace(
        perf_counter=itertools.count().__next__, thread_time=lambda: next(looks)
    )
    monkeypatch.setattr(measuring, "time", clock)
    measuring._hooks("LinearHelper", torch.device("cpu"), 8.0)
    passes = 3 + 3  # at one, two and three seconds of four
    assert next(looks) == (2 + 3) * passes


@pytest.mark.parametrize(("slowdown", "hooks"), [(3.0, (3.0 - 1.0) / 8), (0.5, 0.0)])
def test_hooks_take_what_passes_take_longer(
    slowdown: float, hooks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tick, gradients = [0.0], [1.0], list[Tensor]()
    events: list[str] = []

    class Fake:
        """A preconditioner with which every look at the clock takes longer or shorter."""

        def __init__(self, model: nn.Module, **settings: Any) -> None:
            self.weight = next(model.parameters())
            tick[0] = slowdown
            assert settings["statistics_every"] == 1
            assert settings["solve_every"] > measuring.MOST

        def step(self) -> None:
            assert self.weight.grad is not None
            gradients.append(self.weight.grad.clone())

        def close(self) -> None:
            events.append("closed")

    def look() -> float:
        now[0] += tick[0]
        return now[0]

    clock = SimpleNamespace(perf_counter=lambda: 0.0, thread_time=look)
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "Preconditioner", Fake)
    found = measuring._hooks("LinearHelper", torch.device("cpu"), 0.0)
    assert found == (hooks, slowdown / 8)
    # Every pass has gradients of its own.
    assert len(gradients) == 3
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert gradients[0].any()
    assert events == ["closed"]
