"""Measures a `Hardware` profile of this machine, or of the ranks of a process group, in seconds.

Every curve is measured at ascending sizes until its share of the budget is spent; `Hardware`
extrapolates beyond. Rounds visit all points in turn, so that a burst of other work on the machine
hits one sample of each rather than all samples of one.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soframe.comm.agreement import gather_texts
from soframe.comm.base import Backend, Handle, SingleProcess
from soframe.kernels import devices
from soframe.kernels.factorisations import cholesky, eigh, half_inverse, orthonormal
from soframe.kernels.precision import Precision, within
from soframe.planning.hardware import Collective, Curve, Hardware, Link
from soframe.preconditioner import Preconditioner
from soframe.settings import Distribution

SIDES = (16, 32, 64, 128, 256, 512, 1024, 2048)
OF_PRODUCTS = (64, 512, 16, 32, 128, 256, 1024)
OF_GPU = (4096, 64, 512, 1024, 256, 2048, 128)  # small ones do not show its rates
MIDDLE = 300  # a side whose factorisations take about ten milliseconds at most
CHANNELS = (16, 64, 256)
BYTES = tuple(4**power * 1024 for power in (1, 5, 7, 3, 6, 4, 2))  # 4 KiB to 16 MiB
BATCHES = (1, 8, 64)  # on a GPU
CACHES = 2**25  # bytes that displace what a processor's caches hold
LARGE = {"cpu": 2**27, "cuda": 2**28}  # bytes, more than caches hold
ROUNDS = 3
MOST = 30  # samples of a point in a round
LEAST = 3  # samples of the host's work in Python
TICK = 1e-4  # seconds of a sample at least, if 20 calls take as long
PHASE = "measure"
FLOPS: dict[str, Callable[[int], float]] = {  # of a side, and of channels
    "product": lambda side: 2.0 * side**3,
    "convolution": lambda channels: 2.0 * 8 * 14**2 * 3**2 * channels**2,
}
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather_shares",
    "all_to_all",
)

Call = Callable[[], object]
Group = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Series:
    """The measurements of one curve."""

    key: str  # "<operator>:<dtype>", or the collective
    sizes: Sequence[int]  # sides, channels or bytes, in the order in which the budget is spent
    make: Callable[[int], Call]  # allocates the operands of a size, and returns the call to measure
    power: float  # the power of the size by which seconds are expected to grow
    batch: int = 1  # the matrices of a call
    precision: Precision = "full"  # of float32 products on NVIDIA's GPUs
    groups: Sequence[Group] = ()  # of a collective: the groups that run it at the same time

    def cold(self, device: torch.device) -> bool:
        """Return whether caches are displaced before a sample: for operators on a CPU."""
        return device.type == "cpu" and ":" in self.key


def measure(
    device: torch.device | str,
    *,
    backend: Backend | None = None,
    sides: Sequence[int] = SIDES,
    dtypes: Sequence[str] = ("float32",),
    budget: float = 10.0,
) -> Hardware:
    """Measure the operators of a device, and the collectives of a group of ranks.

    All ranks compute at the same time, since ranks of one machine share its cores and memory. An
    operator's seconds are the median over samples and ranks, on a CPU of the processor's time with
    operands from memory, as in a step; a collective's are the median of its slowest rank. Random
    numbers of torch stay as they were. The bytes of the collectives are counted under the phase
    ``"measure"`` of the backend.

    Args:
        device: A processor, or a GPU of this process.
        backend: The ranks; every one must call this, with equal arguments but for `device`. None
            for this process alone.
        sides: The factor sides of a model, at ten of which at most, the smallest and the largest
            included, factorisations are measured as far as the budget allows. By default powers of
            two from 16 to 2,048.
        dtypes: Names such as ``"float32"``. Factorisations of smaller ones are in float32, whose
            products are measured in any case.
        budget: Seconds of the wall clock of rank 0 for all measurements, about; a curve has two
            points at least, and each point one sample.

    Returns:
        The profile, the same on every rank.

    Raises:
        ValueError: If the device is of another type, a dtype is not a floating one of torch, a side
            is not positive, or the ranks of the backend are simulated.
    """
    device = torch.device(device)
    if backend is None:
        backend = SingleProcess()
    if problem := _problem(device, backend, sides, dtypes):
        raise ValueError(problem)
    cuda = device.type == "cuda"
    with (
        torch.cuda.device(device) if cuda else nullcontext(),
        torch.random.fork_rng([torch.cuda.current_device()] if cuda else []),
        torch.no_grad(),
    ):
        torch.manual_seed(0)
        (half,) = _of_rank_zero(backend, [float(cuda or devices.fast_bfloat16())])
        series = _limits(device) + collectives(backend, device, BYTES)
        series += products(device, dtypes, half=half > 0)
        series += factorisations(device, dtypes, _sides_to_measure(sides))
        samples = seconds(series, backend, device, (1 - PYTHON) * budget)
        return _profile(device, backend, samples, _python(device, PYTHON * budget))


def _problem(
    device: torch.device, backend: Backend, sides: Sequence[int], dtypes: Sequence[str]
) -> str | None:
    """Return why these cannot be measured, or None."""
    if device.type not in LARGE:
        return f"a device of type {device.type!r} is not measured: choose cpu or cuda"
    if backend.on_paper:
        return "simulated ranks have no collectives to measure: pass backend=None"
    for name in dtypes:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return f"{name!r} is not a floating dtype of torch"
    if min(sides) <= 0:
        return "sides must be positive"
    return None


def _sides_to_measure(sides: Sequence[int]) -> list[int]:
    """Return ten sides at most, behind two from which the budget foresees the rest."""
    sides = sorted(set(sides))
    last = len(sides) - 1
    if last >= 10:
        sides = [sides[round(last * step / 9)] for step in range(10)]
    for side in (128, 32):
        if side < sides[0]:
            sides.insert(0, side)
    # The second is large enough to show how seconds grow beyond overheads.
    middle = max((side for side in sides[1:] if side <= MIDDLE), default=sides[0])
    return list(dict.fromkeys([sides[0], middle, *sides]))


def _limits(device: torch.device) -> list[Series]:
    """Return the time of a tiny operator, and of one that streams memory."""

    def make(size: int) -> Call:
        tensor = torch.ones(size // 4, device=device)
        return lambda: tensor.add_(1)

    return [Series("launch", [4], make, 1.0), Series("bandwidth", [LARGE[device.type]], make, 1.0)]


def products(
    device: torch.device,
    dtypes: Sequence[str],
    sides: Sequence[int] | None = None,
    *,
    half: bool = False,
) -> list[Series]:
    """Return products of square matrices by side, ``half`` for bfloat16, too; and convolutions."""
    if sides is None:
        sides = OF_GPU if device.type == "cuda" else OF_PRODUCTS

    def product(dtype: torch.dtype, side: int) -> Call:
        first, second = torch.randn(2, side, side, device=device).to(dtype)
        return lambda: torch.mm(first, second)

    def convolution(dtype: torch.dtype, channels: int) -> Call:
        inputs = torch.randn(8, channels, 14, 14, device=device).to(dtype)
        weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
        return lambda: torch.nn.functional.conv2d(inputs, weight, padding=1)

    series: list[Series] = []
    names = ["float32", *dtypes]
    if half:
        names.append("bfloat16")
    for name in dict.fromkeys(names):
        make = partial(product, getattr(torch, name))
        series.append(Series(f"product:{name}", sides, make, 2.5))
    for name in dict.fromkeys(dtypes):
        make = partial(convolution, getattr(torch, name))
        series.append(Series(f"convolution:{name}", CHANNELS, make, 2.0))
    if device.type == "cuda":
        make = partial(product, torch.float32)
        series.append(Series("product:tf32", sides, make, 2.5, precision="fast"))
    return series


def factorisations(
    device: torch.device, dtypes: Sequence[str], sides: Sequence[int]
) -> list[Series]:
    """Return factorisations by side, the fast ones first, which leave their time to the others."""
    factorise: dict[str, Callable[[Tensor], Call]] = {
        "cholesky": lambda matrix: lambda: cholesky(matrix),
        "inverse": _inverse,
        "triangular": _triangular,
        "qr": lambda matrix: lambda: orthonormal(matrix),
        "eigh": lambda matrix: lambda: eigh(matrix),
    }

    def make(operator: str, dtype: torch.dtype, batch: int, side: int) -> Call:
        # A damped average of few rows, as factors are: the time of eigh depends on the spectrum.
        rows = torch.randn(batch, math.ceil(side / 4), side, dtype=dtype, device=device)
        matrix = rows.mT @ rows / side
        matrix.diagonal(dim1=-2, dim2=-1).add_(0.1)
        return factorise[operator](matrix)

    series = []
    batches = BATCHES if device.type == "cuda" else (1,)
    # Half precision is factorised in float32.
    names = dict.fromkeys("float64" if name == "float64" else "float32" for name in dtypes)
    for operator, name, batch in itertools.product(factorise, names, batches):
        # The smallest side in any case, and others up to a quarter of a gigabyte.
        fit = [sides[0]]
        fit += [side for side in sides[1:] if batch * side**2 <= 2**26]
        call = partial(make, operator, getattr(torch, name), batch)
        series.append(Series(f"{operator}:{name}", fit, call, 2.5, batch))
    return series


def _inverse(matrix: Tensor) -> Call:
    if devices.fast_double(matrix.device):
        matrix = matrix.double()
    lower = torch.linalg.cholesky(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return lambda: half_inverse(lower, eye)


def _triangular(matrix: Tensor) -> Call:
    upper = torch.linalg.cholesky(matrix).mT
    return lambda: torch.linalg.solve_triangular(upper, matrix, upper=True, left=False)


def collectives(backend: Backend, device: torch.device, sizes: Sequence[int]) -> list[Series]:
    """Return the collectives of all ranks by bytes, and from four ranks on also of pairs."""
    ranks = backend.world_size
    if ranks == 1:
        return []
    everyone: Group = tuple(range(ranks))
    pairs: list[Group] = [(first, first + 1) for first in range(0, ranks - 1, 2)]
    make = partial(_collective, backend, backend.wire_device(device))
    shapes: list[tuple[str, Sequence[Group]]] = [(name, [everyone]) for name in COLLECTIVES]
    if ranks >= 4:
        backend.prepare(pairs)
        shapes.append(("broadcast", pairs))
        if type(backend)._reduce is not Backend._reduce:  # which is for all ranks alone
            shapes.append(("reduce", pairs))
    series: list[Series] = []
    for operation, groups in shapes:
        call = partial(make, operation, groups)
        series.append(Series(operation, sizes, call, 1.0, groups=groups))
    return series


def _collective(
    backend: Backend, wire: torch.device, operation: str, groups: Sequence[Group], size: int
) -> Call:
    """Return a collective of some bytes, in all groups at the same time."""
    ranks, rank = backend.world_size, backend.rank
    group = next((group for group in groups if rank in group), ())
    if not group:  # the last of an odd number of ranks
        return lambda: None
    share = math.ceil(size / 4 / ranks)
    flat = torch.zeros(share * ranks, device=wire)
    shares = list(itertools.repeat(share, ranks))
    sends = list(itertools.repeat(len(flat) // (ranks - 1), ranks))
    sends[rank] = 0
    roots = itertools.cycle(group)  # roots take turns
    calls: dict[str, Callable[[], Handle]] = {
        "all_reduce": lambda: backend.all_reduce(flat, PHASE),
        "reduce": lambda: backend.reduce(flat, next(roots), group, PHASE),
        "broadcast": lambda: backend.broadcast(flat, next(roots), group, PHASE),
        "reduce_scatter": lambda: backend.reduce_scatter(flat, shares, PHASE),
        "all_gather_shares": lambda: backend.all_gather_shares(flat, shares, PHASE),
        "all_to_all": lambda: backend.all_to_all(flat[: sum(sends)], sends, sends, PHASE)[1],
    }
    return lambda: calls[operation]().wait()


@dataclass
class _Point:
    """One size of a series, with the samples of this rank in seconds."""

    series: Series
    size: int
    repeats: int  # calls of a sample
    samples: int  # of a round
    fixed: float  # seconds for the operands of all rounds, and for the first calls
    sampling: float  # seconds for a sample
    seconds: list[float] = field(default_factory=list)

    def cost(self, samples: int) -> float:
        """Return the seconds that all rounds take, of so many samples each."""
        return self.fixed + ROUNDS * samples * self.sampling


def seconds(
    series: Sequence[Series], backend: Backend, device: torch.device, budget: float
) -> dict[Series, dict[int, float]]:
    """Return the seconds by size of each series, the same on every rank.

    From its third size on, a series skips those that would probably exceed its share of the
    remaining budget.
    """
    # All ranks decide by the clock of rank 0, so that they enter the same collectives.
    end = time.perf_counter() + budget
    sampler = _Sampler(backend, device)
    points: list[_Point] = []
    for index, curve in enumerate(series):
        begun, spent = sampler.begin(curve, budget / (len(series) - index))
        points += begun
        budget -= spent
    for point in itertools.chain.from_iterable(itertools.repeat(points, ROUNDS)):
        if _of_rank_zero(backend, [end - time.perf_counter()])[0] < 0:
            break
        call = point.series.make(point.size)
        _meet(backend, device)
        with within(point.series.precision):
            for _ in range(point.samples):
                point.seconds.append(sampler.sample(point.series, call, point.repeats))
    return _over_ranks(points, backend)


class _Sampler:
    """Takes samples on a device, together with the other ranks."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._other = torch.ones(CACHES // 4 if device.type == "cpu" else 0, device="cpu")

    def begin(self, series: Series, share: float) -> tuple[list[_Point], float]:
        """Take the first samples of a series; return its points, and the seconds that all take."""
        spent = 0.0
        points: list[_Point] = []
        for size in series.sizes:
            bounds: list[float] = []  # the seconds of this size at least, from those of others
            for point in points:
                bounds.append(point.cost(1) * max(1.0, size / point.size) ** series.power)
            if len(points) >= 2 and min(bounds) > share - spent:
                continue
            begun = self._begin_point(series, size, share)
            points.append(begun)
            spent += begun.cost(begun.samples)
        return points, spent

    def _begin_point(self, series: Series, size: int, share: float) -> _Point:
        """Take the first sample of a size."""
        start = time.perf_counter()
        call = series.make(size)
        making = time.perf_counter() - start
        with within(series.precision):
            self.sample(series, call, 1)
            start = time.perf_counter()
            calling = self.sample(series, call, 1)
        _meet(self._backend, self._device)
        meeting = time.perf_counter() - start - calling
        making, calling, meeting = _of_rank_zero(self._backend, [making, calling, meeting])
        repeats = 1
        if not (series.groups or series.cold(self._device)):
            repeats = min(20, max(1, int(TICK / calling)))
        sampling = meeting + repeats * calling
        samples = int(share / 2 / len(series.sizes) / ROUNDS / sampling)
        fixed = (1 + ROUNDS) * making + 2 * (meeting + calling)
        point = _Point(series, size, repeats, min(MOST, max(1, samples)), fixed, sampling)
        with within(series.precision):
            point.seconds.append(self.sample(series, call, repeats))
        return point

    def sample(self, series: Series, call: Call, repeats: int) -> float:
        """Return the seconds of a call, as the mean of some."""
        if series.groups:
            _meet(self._backend, self._device)
        if self._device.type == "cuda":
            return self._sample_gpu(call, repeats)
        if series.cold(self._device):
            self._other.sum()
        # The turns of other ranks on a shared processor are left to `Hardware.slots`.
        clock = time.perf_counter if series.groups else time.thread_time
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    def _sample_gpu(self, call: Call, repeats: int) -> float:
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3 / repeats


def _meet(backend: Backend, device: torch.device) -> None:
    backend.all_reduce(torch.zeros(1, device=backend.wire_device(device)), PHASE).wait()


def _of_rank_zero(backend: Backend, numbers: Sequence[float]) -> list[float]:
    vector = _on_wire(backend, numbers)
    backend.broadcast(vector, 0, tuple(range(backend.world_size)), PHASE).wait()
    values: list[float] = vector.tolist()
    return values


def _on_wire(backend: Backend, numbers: Sequence[float]) -> Tensor:
    vector = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return vector.to(backend.wire_device(vector.device))


def _over_ranks(points: Sequence[_Point], backend: Backend) -> dict[Series, dict[int, float]]:
    """Return the median of each point over samples and ranks, for collectives of the slowest."""
    samples = list(itertools.chain.from_iterable(point.seconds for point in points))
    gathered = backend.all_gather(_on_wire(backend, samples), PHASE)
    seconds = torch.stack(gathered).cpu()  # [ranks, samples]
    medians: dict[Series, dict[int, float]] = {}
    parts = seconds.split([len(point.seconds) for point in points], dim=1)
    for point, part in sorted(zip(points, parts, strict=True), key=lambda pair: pair[0].size):
        if groups := point.series.groups:
            slowest = [part[list(group)].amax(0) for group in groups]
            part = torch.stack(slowest).mean(0)  # noqa: PLW2901
        medians.setdefault(point.series, {})[point.size] = part.quantile(0.5).item()
    return medians


def _profile(
    device: torch.device, backend: Backend, samples: dict[Series, dict[int, float]], python: _Host
) -> Hardware:
    by_key = {series.key: times for series, times in samples.items()}
    (launch,) = by_key["launch"].values()
    ((size, second),) = by_key["bandwidth"].items()
    measured: list[Collective] = []
    for series, times in samples.items():
        if series.groups:
            measured.append(Collective(series.key, len(series.groups[0]), _curve(times, float)))
    texts = gather_texts(backend, json.dumps(_description(device)), PHASE)
    descriptions = list(map(json.loads, texts))
    node = _node([description["host"] for description in descriptions])
    operators, batched = _curves(samples)
    links = _links(measured)
    host, *calls = _of_rank_zero(backend, [python.block, *python.calls.values()])
    by_helper = dict(zip(python.calls, calls, strict=True))
    memory = slots = across = None
    if node is not None:
        across = links[0]
    if device.type == "cuda":
        memory = min(rank["memory"] for rank in descriptions)
        host = 0.0  # a GPU is behind the host in a step that reads nothing
    else:
        slots = len(os.sched_getaffinity(0)) / torch.get_num_threads()
        batched = {}
    return Hardware(
        name="this machine",
        device=device.type,
        source=(
            f"soframe.planning.measure on {descriptions[0]['device']}, torch {torch.__version__}, "
            f"threads: {descriptions[0]['threads']}, ranks: {backend.world_size}"
        ),
        launch=launch,
        bandwidth=2 * size / second,  # read and written
        operators=operators,
        batched=batched,
        collectives=tuple(measured),
        node=node,
        within=links[-1],
        across=across,
        memory=memory,
        slots=slots,
        hooks=by_helper["LinearHelper"] / OF_LINEAR,
        calls=by_helper,
        host=host,
    )


def _curves(
    samples: dict[Series, dict[int, float]],
) -> tuple[dict[str, Curve], dict[str, tuple[tuple[int, int, float], ...]]]:
    """Return the curves of single operators; and side, batch and seconds of factorisations."""
    operators: dict[str, Curve] = {}
    batched: dict[str, tuple[tuple[int, int, float], ...]] = {}
    for series, times in samples.items():
        operator, colon, _ = series.key.partition(":")
        if not colon:
            continue
        if series.batch == 1:
            operators[series.key] = _curve(times, FLOPS.get(operator, float))
        if operator not in FLOPS:
            rows = [(side, series.batch, second) for side, second in times.items()]
            batched[series.key] = batched.get(series.key, ()) + tuple(rows)
    return operators, batched


def _description(device: torch.device) -> dict[str, Any]:
    """Return the host, the device and its memory, and the threads of this rank."""
    name, memory = _processor(), None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    threads = torch.get_num_threads()
    return {"host": platform.node(), "device": name, "threads": threads, "memory": memory}


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LinearHelper": (lambda: nn.Linear(5, 5), (8, 5)),
    "Conv2dHelper": (lambda: nn.Conv2d(5, 5, 3, padding=1), (8, 5, 4, 4)),
}
"""Tiny layers, and the shapes of their inputs, by the helper whose Python is timed with them."""

OF_LINEAR = 3  # operators of the statistics of an nn.Linear
BLOCKS = 8  # of the tiny models
PYTHON = 0.2  # the part of the budget that goes to the host's work in Python


@dataclass(frozen=True)
class _Host:
    """Seconds of the host's work in Python."""

    calls: Mapping[str, float]  # of the statistics of a call, by helper
    block: float  # of a block in the rest of the step


def _python(device: torch.device, budget: float) -> _Host:
    """Time the host's work in Python."""
    calls, blocks = dict[str, float](), list[float]()
    for name in LAYERS:
        calls[name], block = _hooks(name, device, budget / len(LAYERS))
        blocks.append(block)
    return _Host(calls, blocks[0])


def _hooks(name: str, device: torch.device, budget: float) -> tuple[float, float]:
    """Return the seconds of a call's statistics, and of a block in the rest of the step."""
    # A processor that other processes share makes the wall clock longer than the work. On a GPU
    # another thread runs the backward pass.
    clock = time.process_time if device.type == "cuda" else time.thread_time
    make, shape = LAYERS[name]
    with torch.enable_grad():
        model = nn.Sequential(*(make() for _ in range(BLOCKS))).to(device)
        inputs = torch.rand(shape, device=device)
        passes, with_hooks, rest = list[float](), list[float](), list[float]()

        def run(preconditioner: Preconditioner | None, spent: list[float]) -> None:
            end = time.perf_counter() + budget / 2
            for number in range(MOST):
                if number >= LEAST and time.perf_counter() >= end:
                    break
                model.zero_grad()
                start = clock()
                model(inputs).square().mean().backward()
                spent.append(clock() - start)
                if preconditioner is not None:
                    preconditioner.step()
                    rest.append(clock() - start - spent[-1])

        run(None, passes)
        preconditioner = Preconditioner(
            model,
            distribution=Distribution(backend=SingleProcess()),
            kl_clip=None,
            statistics_every=1,
            solve_every=10 * MOST,
        )
        run(preconditioner, with_hooks)
        preconditioner.close()
    hooks = statistics.median(with_hooks) - statistics.median(passes)
    return max(0.0, hooks) / BLOCKS, statistics.median(rest) / BLOCKS


def _curve(times: dict[int, float], unit: Callable[[int], float]) -> Curve:
    return Curve(tuple((unit(size), second) for size, second in times.items()))


def _node(hosts: Sequence[str]) -> int | None:
    """Return the ranks of a node, from each rank's host; None if all ranks share one."""
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    # Of uneven nodes the greatest number that divides all, so that no node crosses hosts.
    return None if len(runs) == 1 else math.gcd(*runs)


def _links(measured: Sequence[Collective]) -> list[Link]:
    """Return the links that broadcasts over all ranks and over pairs need, or a usual one."""
    links = []
    for collective in measured:
        if collective.operation == "broadcast":
            # Of its smallest and largest size, as `Hardware` prices them.
            (_, first), *_, (size, last) = collective.seconds.points
            rounds = math.ceil(math.log2(collective.ranks))
            links.append(Link(first / rounds, size / last))
    return links or [Hardware.within]


def _processor() -> str:
    """Return the name of the processor; only Linux has it in a file."""
    info = Path("/proc/cpuinfo")
    if info.exists() and (name := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M)):
        return name[1]
    return platform.machine()
