"""What a placement plans, from shapes alone, is what a run then sends and holds, to the byte."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe import Placement, Preconditioner, available
from soframe.comm import Recording, TorchDistributed
from soframe.settings import grouped
from soframe.solvers import Eigen, Inverse
from soframe.strategies import (
    CommOpt,
    HybridOpt,
    LocalPlan,
    MemOpt,
    OwnerLocal,
    Sharded,
    Strategy,
)
from soframe.strategies.plan import Step
from tests import kit
from tests.distributed.harness import run_ranks
from tests.distributed.test_accounting import SHAPES
from tests.distributed.test_accounting import Apart as KaisaApart
from tests.distributed.test_places import Apart, Deferring
from tests.distributed.training import Case, Run, mean_over
from tests.examples import examples

Traffic = dict[str, dict[str, int]]

EVERY: dict[str, Strategy] = {
    "comm": CommOpt(),
    "mem": MemOpt(),
    "hybrid": HybridOpt(),
    "spread": HybridOpt(colocate=False, gradient_workers=0.67),
    "kaisa apart": KaisaApart(),
    "sharded": Sharded(),
    "pairs": Sharded(group=2),
    "half on the wire": Sharded(group=3, wire="bfloat16", colocate=True),
    "deferred": Sharded(group=None, deferred=True),
    "pairs, deferred": Sharded(group=2, deferred=True, wire="bfloat16"),
    "owner-local": OwnerLocal(),
    "deferred everywhere": Deferring(),
    "apart": Apart(),
    "apart, deferred": Apart(deferred=True),
    "auto": soframe.Auto(hardware="h100-ib"),
}


def add(one: Traffic, other: Traffic) -> Traffic:
    zero = {"bytes": 0, "calls": 0}
    return {
        phase: {k: one.get(phase, zero)[k] + other.get(phase, zero)[k] for k in zero}
        for phase in {*one, *other}
    }


def planned(
    placement: Placement,
    rank: int,
    steps: int,
    every: tuple[int, int],
    used: Iterable[str],
    local: LocalPlan | None = None,
    fused: bool = False,
    clips: Iterable[str] = (),
) -> Traffic:
    """All of a run; before the first step the ranks compare two digests, a choice once more."""
    calls = 1 + any("chosen" in note for note in placement.notes)
    calls *= placement.world_size > 1
    one = {"bytes": 64 * calls, "calls": calls}
    start = {"start": one, "total": one} if calls else {"total": one}
    names = list(used)
    # Statistics that are made with second-order data are made anew after each solve.
    waiting = [work.name for work in placement.work if any(f.needs for f in work.factors)]
    for step in range(steps):
        statistics: bool | list[str] = step % every[0] == 0
        if step % every[1] == 1 and not statistics:
            statistics = waiting
        one = placement.traffic(
            rank,
            statistics=statistics,
            solve=step % every[1] == 0,
            used=names,
            local=local,
            fused=fused,
            first=step == 0,
            clips=list(clips),
        )
        start = add(start, one)
    return start


# -- on paper ------------------------------------------------------------------------------------


def train_on_paper(
    strategy: Strategy,
    widths: list[int],
    rank: int,
    ranks: int,
    solver: Any,
    *,
    fused: bool = False,
    steps: int = 5,
    **options: Any,
) -> tuple[Preconditioner, nn.Module, Recording]:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=bool(b % 2)) for a, b in zip(widths, widths[1:], strict=False)]  # noqa: RUF007
    model = nn.Sequential(*layers)
    backend = Recording(rank=rank, world_size=ranks, fused=fused)
    options |= {"strategy": strategy, "backend": backend, "solver": solver, "kl_clip": None}
    own = Preconditioner(model, **grouped(options))
    x = torch.ones(2, widths[0])
    kit.train(model, lambda net, _: net(x).square().mean(), range(steps), own)
    own.close()
    return own, model, backend


@given(
    name=st.sampled_from(sorted(EVERY)),
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    ranks=st.integers(1, 64),
    where=st.floats(0, 1, exclude_max=True),
    solver=st.sampled_from([Eigen(), Inverse()]),
    every=st.sampled_from([(1, 1), (1, 2), (2, 4)]),
    fused=st.booleans(),
)
@settings(max_examples=examples(30), deadline=None)
def test_on_paper_the_plan_is_what_is_recorded(name, widths, ranks, where, solver, every, fused):
    assume(name != "kaisa apart" or ranks > 1)
    rank = int(where * ranks)
    intervals = {"statistics_every": every[0], "solve_every": every[1]}
    strategy = EVERY[name]
    own, _, backend = train_on_paper(
        strategy, widths, rank, ranks, solver, fused=fused, **intervals
    )
    used = [work.name for work in own.placement.work]
    assert own.traffic() == planned(own.placement, rank, 5, every, used, fused=fused)
    assert own.memory_usage() == own.placement.memory(rank)
    assert messages(own.placement, rank, every, used, fused=fused) == Counter(
        (event.operation, event.group, event.source, event.numel * event.dtype.itemsize)
        for event in backend.events
        if event.operation != "all_gather"  # of the comparison at the start
    )


def messages(
    placement: Placement, rank: int, every: tuple[int, int], used: list[str], *, fused: bool
) -> Counter[tuple[object, ...]]:
    """The collectives of five steps, as planned: operations, ranks, roots and bytes."""
    found = Counter[tuple[object, ...]]()
    for step in range(5 if placement.world_size > 1 else 0):
        planned_step = Step(
            placement.pairs,
            placement.stacks,
            rank,
            statistics=step % every[0] == 0,
            solve=step % every[1] == 0,
            used=used,
            local=None,
            fused=fused,
            first=step == 0,
            clips=(),
        )
        for _, some in planned_step.phases():
            found.update((*route[:3], size) for route, size in some)
    return found


GENERAL = ["comm", "mem", "hybrid", "spread", "sharded", "pairs", "deferred", "owner-local"]
"""Strategies for blocks with any number of factors."""


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(available("method")))
@given(
    name=st.sampled_from(GENERAL),
    widths=st.lists(st.integers(2, 5), min_size=3, max_size=4),
    ranks=st.integers(1, 8),
    where=st.floats(0, 1, exclude_max=True),
    every=st.sampled_from([(1, 2), (2, 4), (3, 3)]),
)
@settings(max_examples=examples(4), deadline=None)
def test_of_every_method_too(method, name, widths, ranks, where, every):
    rank = int(where * ranks)
    intervals = {"statistics_every": every[0], "solve_every": every[1]}
    own, _, _ = train_on_paper(
        EVERY[name], widths, rank, ranks, None, method=method, steps=6, **intervals
    )
    used = [work.name for work in own.placement.work]
    assert own.traffic() == planned(own.placement, rank, 6, every, used)
    assert own.memory_usage() == own.placement.memory(rank)


@pytest.mark.parametrize(
    ("name", "fused"),
    [("mem", False), ("mem", True), ("apart", False), ("apart, deferred", False)],
)
def test_buffers_are_cut_where_the_plan_cuts_them(name, fused, monkeypatch):
    limit = 184  # no item is larger, all of a phase together are
    monkeypatch.setattr("soframe.strategies.buckets.BUCKET_BYTES", limit)
    own, _, backend = train_on_paper(
        EVERY[name], [3, 5, 2, 4, 4], 1, 3, Eigen(), fused=fused, statistics_every=1, solve_every=2
    )
    used = [work.name for work in own.placement.work]
    calls = planned(own.placement, 1, 5, (1, 2), used, fused=fused)
    assert own.traffic() == calls
    large = [e for e in backend.events if e.numel * e.dtype.itemsize > limit]
    # What ranks say before each step is one call, whatever its size: it is not cut.
    assert len(large) == 5
    assert len({(e.operation, e.numel) for e in large}) == 1


@pytest.mark.parametrize(
    ("name", "solver", "rank"),
    [
        ("pairs, deferred", Eigen(), 1),
        # Each strategy with one solver, on one rank; the others are thorough.
        *(
            pytest.param(
                name,
                *((Eigen(), 0), (Inverse(), 3))[(number + other) % 2],
                marks=[pytest.mark.slow] + [pytest.mark.thorough] * other,
            )
            for number, name in enumerate(EVERY)
            for other in (0, 1)
        ),
    ],
)
def test_nothing_is_held_that_is_not_counted(name, solver, rank):
    """All memory that a run leaves behind, but the model's and its gradients', is counted."""
    gc.collect()
    before = _storages(gc.get_objects())  # held until the end, so that no address is used again
    own, model, _ = train_on_paper(
        EVERY[name], [40, 56, 48, 40], rank, 4, solver, statistics_every=2, solve_every=4
    )
    gc.collect()
    parameters = [t for p in model.parameters() for t in (p.data, p.grad)]
    known = {storage.data_ptr() for storage in [*before, *_storages(parameters)]}
    found = {s.data_ptr(): s.nbytes() for s in _storages(gc.get_objects())}
    held = sum(size for where, size in found.items() if where not in known)
    counted = own.memory_usage()["total"]
    assert counted == own.placement.memory(rank)["total"]
    assert counted <= held <= 1.05 * counted, (held, counted)


def flat_tensors(rank: int, ranks: int) -> list[int]:
    """The vectors that are alive after each step of a rank."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    own = Preconditioner(model, strategy=Sharded(), kl_clip=None, statistics_every=1)
    counts = []
    for step in range(6):
        model.zero_grad()
        model(torch.full((4, 40), 1.0 + step + rank)).square().mean().backward()
        own.step()
        gc.collect()
        counts.append(sum(type(o) is Tensor and o.dim() == 1 for o in gc.get_objects()))
    own.close()
    return counts[2:]


@pytest.mark.distributed
@pytest.mark.slow
def test_no_buffer_of_a_statistics_step_stays():
    for counts in run_ranks(flat_tensors, 2):
        assert max(counts) <= counts[0] + 1, (
            counts
        )  # Gloo may let go of the last one a little later


def _storages(objects: Iterable[object]) -> list[torch.UntypedStorage]:
    kinds = (Tensor, nn.Parameter)
    return [o.untyped_storage() for o in objects if type(o) in kinds]


# -- on ranks ------------------------------------------------------------------------------------


def train_on_ranks(
    rank: int, ranks: int, names: list[str], solver: Any, every: tuple[int, int], steps: int
) -> list[tuple[Placement, Traffic, dict[str, int]]]:
    found = []
    for name in names:
        intervals = {"statistics_every": every[0], "solve_every": every[1]}
        case = Case({"strategy": EVERY[name], "solver": solver, **intervals})
        run = Run(case, rank, ranks, average=mean_over()).train(range(steps))
        own = run.preconditioner
        found.append((own.placement, own.traffic(), own.memory_usage()))
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "ranks", "names"),
    [
        # Each strategy once; on paper each is with either solver.
        (Inverse(), 2, list(EVERY)[::2]),
        (Eigen(), 3, list(EVERY)[1::2]),
        pytest.param(Inverse(), 2, list(EVERY)[1::2], marks=pytest.mark.thorough),
        pytest.param(Eigen(), 3, list(EVERY)[::2], marks=pytest.mark.thorough),
        *(
            pytest.param(solver, ranks, list(EVERY), marks=pytest.mark.thorough)
            for solver, ranks in ((Eigen(), 2), (Inverse(), 3), (Eigen(), 4), (Inverse(), 4))
        ),
    ],
)
def test_on_ranks_the_plan_is_what_is_sent_and_held(solver, ranks, names):
    results = run_ranks(train_on_ranks, ranks, names, solver, (2, 3), 4)
    for rank, own in enumerate(results):
        for name, (placement, traffic, memory) in zip(names, own, strict=True):
            where = (name, rank)
            assert traffic == planned(placement, rank, 4, (2, 3), SHAPES), where
            assert memory == placement.memory(rank, used=SHAPES), where


class Partly(nn.Module):
    """Layers with blocks, others without, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.body = nn.Linear(4, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 3, bias=False, dtype=torch.float64)
        self.never = nn.Bilinear(2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.embedding(x).double())).tanh())


def train_locally(
    rank: int, ranks: int, names: list[str], kl_clip: float | None, fused: bool
) -> list[tuple[Placement, Traffic]]:
    found = []
    for name in names:
        torch.manual_seed(0)
        model = Partly()
        own = Preconditioner(
            model,
            strategy=EVERY[name],
            distribution=soframe.Distribution(
                backend=TorchDistributed(fused=fused), gradients="local"
            ),
            kl_clip=kl_clip,
            lr=0.1,
            statistics_every=1,
            solve_every=2,
        )
        for step in range(4):
            if step == 1:  # at the first one nothing was solved yet
                before = own.traffic()
            model.zero_grad(set_to_none=False)
            model(torch.tensor([rank, 3, 5])).square().mean().backward()
            own.step()
        found.append((own.placement, add(own.traffic(), _negative(before))))
        own.close()
    return found


def _negative(one: Traffic) -> Traffic:
    return {phase: {key: -number for key, number in count.items()} for phase, count in one.items()}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kl_clip", "fused"),
    [(None, False), pytest.param(1e-3, False, marks=pytest.mark.thorough), (1e-3, True)],
)
def test_with_local_gradients_too(kl_clip, fused):
    names = ["comm", "mem", "hybrid", "sharded", "deferred", "apart"]
    local = LocalPlan(rest=((28, "float32"), (4, "float64"), (4, "float64")), idle=2)
    local = dataclasses.replace(local, kl_clip=kl_clip is not None)
    for rank, own in enumerate(run_ranks(train_locally, 3, names, kl_clip, fused)):
        for name, (placement, traffic) in zip(names, own, strict=True):
            steps: Traffic = {}
            for solve in (False, True, False):
                when = {"statistics": True, "solve": solve}
                steps = add(steps, placement.traffic(rank, **when, local=local, fused=fused))
            assert {k: v for k, v in traffic.items() if v["calls"]} == steps, (name, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_clip_of_local_gradients_is_planned_as_it_travels(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2, dtype=dtype)
    backend = Recording(world_size=2)
    every = {"statistics_every": 1, "solve_every": 1}
    own = Preconditioner(
        model,
        distribution=soframe.Distribution(backend=backend, gradients="local"),
        kl_clip=1e-3,
        lr=0.1,
        **every,
    )
    for _ in range(2):
        before = own.traffic()
        model.zero_grad()
        model(torch.ones(4, 3, dtype=dtype)).square().mean().backward()
        own.step()
    planned = own.placement.traffic(0, statistics=True, solve=True, local=LocalPlan())
    assert add(before, planned) == own.traffic()
