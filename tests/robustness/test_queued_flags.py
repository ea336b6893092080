"""On a GPU the flags of a plain step's gradients are read later: as if the host read them at first.

Either at the next step, and the device selects what is stored, or behind the work of this step.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import soframe
from soframe.comm import SingleProcess
from soframe.step import engine, verdict
from tests import kit
from tests.curvature import randn
from tests.distributed.harness import run_ranks

# What appears in a gradient, by step: 3 takes statistics and solves, the others are plain; the
# squares of 1e100 are in range.
BAD = {1: math.nan, 3: math.inf, 4: 1e100, 5: -math.inf}
METHODS = ("adamw", "muon", "soap-muon", "shampoo", "kfac", "ekfac", "diagonal")


@dataclass
class Reads:
    """How many steps have read their flags behind their work, and how many at the next step."""

    behind: int = 0
    all: int = 0

    @property
    def next(self) -> int:
        return self.all - self.behind


@contextmanager
def as_on_a_gpu(queued: bool = True) -> Iterator[Reads]:
    """Let steps read their flags as on a GPU, or, unless `queued`, as on a CPU."""
    reads = Reads()

    class Counted(verdict.Magnitude):
        def __init__(self, *own: Any) -> None:
            super().__init__(*own)
            self.queues = queued

        def read_queued(self) -> tuple[float, bool]:
            reads.behind += 1
            return super().read_queued()

    class Flags(verdict.Flags):
        def read(self) -> tuple[float, float]:
            reads.all += 1
            return super().read()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Magnitude", Counted)
        patch.setattr(verdict, "Flags", Flags)
        yield reads


@dataclass
class Spoil:
    """Writes a number into a gradient at some steps."""

    parameter: nn.Parameter
    bad: Mapping[int, float]
    now: int = 0

    def step(self) -> None:
        if self.now in self.bad:
            gradient = self.parameter.grad
            assert gradient is not None
            part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            part.view(-1)[0] = self.bad[self.now]
        self.now += 1


@dataclass
class Outcome:
    """What a run has left."""

    weights: list[Tensor]
    states: dict[str, Any]
    counters: dict[str, int]
    metrics: dict[str, Any] = field(default_factory=dict)
    reads: Reads = field(default_factory=Reads)
    agreements: int = 0  # collectives


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 4)
    ).to(dtype)


def outcome(
    rank: int,
    ranks: int,
    queued: bool,
    method: str,
    settings: dict[str, Any],
    bad: Mapping[int, float] = BAD,
    dtype: torch.dtype = torch.float64,
    steps: int = 8,
    sharded: bool = False,
    device: str | torch.device = "cpu",
) -> Outcome:
    """Train with bad gradients; on several ranks the last one alone has them."""
    model = network(dtype).to(device)
    if sharded:
        fully_shard(model)
    every = {"statistics_every": 3, "solve_every": 3, "auxiliary_lr": 0.01, **settings}
    with as_on_a_gpu(queued) as reads:
        own = soframe.Optimizer(model, method, lr=0.01, **every)

        def loss(model: nn.Module, step: int) -> Tensor:
            return model(randn(12, 4, seed=step).to(device, dtype)[rank::ranks]).square().mean()

        averages = not sharded and "distribution" not in settings
        averaging = (kit.Averaging(model),) if averages else ()
        spoil = Spoil(model[0].weight, bad if rank == ranks - 1 else {})
        kit.train(model, loss, range(steps), spoil, *averaging, own)
        # Before anything else asks the host.
        metrics, states = own.metrics(), own.preconditioner.state_dict()
        counters = dict(own.preconditioner.counters)
        agreements = own.preconditioner.traffic().get("agree", {"calls": 0})["calls"]
        own.close()
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    weights = [p.detach() for p in wholes]
    return Outcome(weights, states, counters, metrics, reads, agreements)


def same(one: Outcome, plain: Outcome, skipped: int | None = None) -> None:
    for p, q in zip(one.weights, plain.weights, strict=True):
        assert torch.equal(p, q)
        assert bool(p.isfinite().all())
    assert one.counters == plain.counters
    if skipped is not None:
        assert plain.counters["skipped_updates"] == skipped
    saved = [io.BytesIO(), io.BytesIO()]
    for run, file in zip((one, plain), saved, strict=True):
        torch.save(run.states, file)
    # Every tensor, count and checksum.
    kept, other = (torch.load(io.BytesIO(file.getvalue())) for file in saved)
    assert str(kept) == str(other)


@pytest.mark.parametrize("method", METHODS)
def test_a_late_flag_skips_what_an_early_one_does(method: str) -> None:
    late, plain = (outcome(0, 1, queued, method, {}) for queued in (True, False))
    same(late, plain, skipped=3)
    for name in ("updated", "kl_clip_factor", "clip_factor", "counters"):
        assert late.metrics[name] == plain.metrics[name]
    assert plain.reads.all == 0
    # EKFAC takes statistics until it has those that need a solve.
    assert late.reads.all >= (1 if method == "ekfac" else 5), "plain steps read it late"
    # SOAP and Shampoo have statistics of gradients in every step.
    assert (late.reads.next > 0) is (method in ("adamw", "muon", "kfac", "diagonal"))


CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "decay": ("muon", {"weight_decay": 0.1, "auxiliary_weight_decay": 0.3}, torch.float32),
    "cautious": ("adamw", {"weight_decay": 0.1, "weight_decay_kind": "cautious"}, torch.float32),
    "hyperball": ("muon", {"constraint": "hyperball"}, torch.float32),
    "half": ("adamw", {"weight_decay": 0.1}, torch.bfloat16),
    "state": (
        "adamw",
        {"statistics": soframe.Statistics(state_dtype=torch.bfloat16)},
        torch.float32,
    ),
    "norm clip": ("kfac", {"clips": soframe.Clips(norm_clip=0.1)}, torch.float64),
    "graft": ("graft", {}, torch.float64),
}


@pytest.mark.parametrize("name", CASES)
def test_settings(name: str) -> None:
    method, settings, dtype = CASES[name]
    bad = {2: math.nan, 5: math.inf, 7: -math.inf}
    late, plain = (outcome(0, 1, queued, method, settings, bad, dtype) for queued in (True, False))
    same(late, plain, skipped=3)
    host = name in ("cautious", "hyperball", "half")
    assert (late.reads.next > 0) is not host, "selected on the device"


@pytest.mark.slow
@given(
    bad=st.dictionaries(
        st.integers(0, 9), st.sampled_from([math.nan, math.inf, -math.inf]), max_size=6
    ),
    method=st.sampled_from(["adamw", "muon", "normuon", "sgd", "kfac", "foof", "eva"]),
    decay=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=15)
def test_any_steps_are_bad(bad: dict[int, float], method: str, decay: float) -> None:
    late, plain = (
        outcome(0, 1, queued, method, {"weight_decay": decay}, bad, steps=10)
        for queued in (True, False)
    )
    same(late, plain, skipped=len(bad))


@pytest.mark.parametrize("method", ["shampoo", "kl-shampoo", "soap"])
def test_first_statistics_are_of_a_good_gradient(method: str) -> None:
    """They are taken in any step, also in one between those of the interval."""
    bad = dict.fromkeys((0, 1), math.nan)
    late, plain = (outcome(0, 1, queued, method, {}, bad) for queued in (True, False))
    same(late, plain, skipped=2)
    assert late.counters["failed_solves"] == 0


def test_gradients_without_a_block_are_zeroed_too() -> None:
    """The optimizer behind a preconditioner finds zeros, as it does if the host has read."""

    def run(queued: bool) -> tuple[list[Tensor], dict[str, int], Reads]:
        model = network()
        model[4].bias.requires_grad_(False).grad = torch.full((4,), math.nan, dtype=torch.float64)
        with as_on_a_gpu(queued) as reads:
            base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
            own = soframe.Preconditioner(model, optimizer=base, skip=("3",), statistics_every=3)
            spoil = Spoil(model[3].weight, {4: math.nan})

            def loss(model: nn.Module, step: int) -> Tensor:
                return model(randn(12, 4, seed=step)).square().mean()

            kit.train(model, loss, range(6), spoil, own, base)
            assert own.counters["skipped_updates"] == 1
        return [p.detach() for p in model.parameters()], own.counters, reads

    late, plain = run(True), run(False)
    assert late[2].next > 0
    assert late[1] == plain[1]
    for p, q in zip(late[0], plain[0], strict=True):
        assert torch.equal(p, q)


def test_sparse_gradients_are_zeroed_too() -> None:
    def run(queued: bool) -> tuple[list[Tensor], int, Reads]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
        with as_on_a_gpu(queued) as reads:
            base = torch.optim.SGD(model.parameters(), lr=0.05)
            own = soframe.Preconditioner(model, optimizer=base, statistics_every=5)
            for step in range(6):
                model.zero_grad()
                model(torch.arange(10).view(5, 2) * (step + 2) % 7).square().mean().backward()
                if step in (2, 5):
                    gradient = model[0].weight.grad
                    assert gradient is not None
                    gradient._values()[1, 2] = math.nan
                own.step()
                base.step()
            skipped = own.counters["skipped_updates"]
        return [p.detach() for p in model.parameters()], skipped, reads

    late, plain = run(True), run(False)
    assert late[2].next > 0
    assert late[1] == plain[1] == 2
    for p, q in zip(late[0], plain[0], strict=True):
        assert torch.equal(p, q)


def test_norms_of_a_skipped_step_are_not_measured() -> None:
    """Ranks may choose to measure: this does not decide when flags are read."""

    def run(queued: bool) -> tuple[list[dict[str, Any]], Reads]:
        model = network()
        with as_on_a_gpu(queued) as reads:
            own = soframe.Optimizer(model, "muon", lr=0.01)
            own.preconditioner.measure(norms=True)
            spoil = Spoil(model[0].weight, {3: math.nan})
            found = []
            for _ in range(6):
                kit.train(model, lambda m, _: m(randn(12, 4)).square().mean(), [0], spoil, own)
                found.append(own.metrics())
        return found, reads

    (late, reads), (plain, _) = run(True), run(False)
    assert reads.next > 0
    for one, other in zip(late, plain, strict=True):
        assert {**one, "phases": None} == {**other, "phases": None}
    assert [one["updated"] for one in late] == [True, True, True, False, True, True]


def test_who_asks_after_a_bad_step_gets_the_answer() -> None:
    model = network()
    with as_on_a_gpu() as reads:
        own = soframe.Optimizer(model, "adamw", lr=0.01)
        spoil = Spoil(model[0].weight, {2: math.nan})

        def train(steps: int) -> None:
            kit.train(model, lambda m, _: m(randn(12, 4)).square().mean(), range(steps), spoil, own)

        train(3)
        assert reads.next == 1, "the step before the bad one"
        assert own.preconditioner.blocks[0].record.updates == 2
        assert reads.next == 2
        assert not own.preconditioner.updated
        assert own.metrics()["updated"] is False
        train(1)  # reads at once, behind a bad step
        assert own.preconditioner.updated
        state = own.preconditioner.state_dict()
        assert {block["updates"] for block in state["blocks"].values()} == {3}
        spoil.bad = {6: math.nan}
        train(3)  # the last one is bad, and read by state_dict()
        before = reads.next
        state = own.preconditioner.state_dict()
        assert reads.next == before + 1
        assert {block["updates"] for block in state["blocks"].values()} == {5}
        assert state["counters"]["skipped_updates"] == 2


def test_large_gradients_cost_one_update() -> None:
    """Behind moderate ones they are skipped; then the host reads again and takes them."""
    late, plain = (
        outcome(0, 1, queued, "adamw", {}, dict.fromkeys((3, 4, 5), 1e100))
        for queued in (True, False)
    )
    assert plain.counters["skipped_updates"] == 0
    assert late.counters["skipped_updates"] == 1
    states = late.states["blocks"].values()
    assert {block["updates"] for block in states} == {7}


class ByTheGPU(SingleProcess):
    """Numbers of the host travel by the GPU once it runs, as with NCCL."""

    runs = False

    def wire_device(self, device: torch.device) -> torch.device:
        return torch.device("cuda") if self.runs else device


@pytest.mark.parametrize("by_the_gpu", [False, True])
def test_flags_are_read_at_once_where_the_agreement_waits_for_the_gpu(by_the_gpu: bool) -> None:
    model, backend = network(), ByTheGPU()
    with as_on_a_gpu() as reads:
        distribution = soframe.Distribution(backend=backend)
        own = soframe.Optimizer(model, "muon", lr=0.01, distribution=distribution)
        backend.runs = by_the_gpu
        kit.train(model, lambda model, step: model(randn(3, 4, seed=step)).sum(), range(3), own)
    assert (reads.all == 0) is by_the_gpu


def test_ten_in_a_row_are_told() -> None:
    with pytest.warns(UserWarning, match="10 steps in a row"):
        late = outcome(0, 1, True, "adamw", {}, dict.fromkeys(range(2, 12), math.nan), steps=12)
    assert late.counters["skipped_updates"] == 10


def test_a_load_forgets_the_step() -> None:
    """The counts of a loaded state are not corrected by flags of the step before."""
    model = network()
    with as_on_a_gpu():
        own = soframe.Optimizer(model, "adamw", lr=0.01)
        spoil = Spoil(model[0].weight, {4: math.nan})

        def train(steps: int) -> None:
            kit.train(model, lambda m, _: m(randn(12, 4)).square().mean(), range(steps), spoil, own)

        train(3)
        state = own.state_dict()
        train(2)
        own.load_state_dict(state)
        assert own.preconditioner.blocks[0].record.updates == 3
        assert own.preconditioner.counters["skipped_updates"] == 0


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("method", ["muon", "kfac"])
def test_sharded_gradients(method: str) -> None:
    late, plain = (
        run_ranks(outcome, 2, queued, method, {}, BAD, torch.float64, 8, True)
        for queued in (True, False)
    )
    for one, other in zip(late, plain, strict=True):
        assert one.reads.next > 0
        same(one, other, skipped=3)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["averaged", "local"])
@pytest.mark.parametrize("method", ["muon", "kfac"])
@pytest.mark.covering(together=1)
def test_one_rank_has_the_bad_gradient(method: str, gradients: str) -> None:
    settings: dict[str, Any] = {"strategy": "mem-opt"}
    if gradients == "local":
        settings["distribution"] = soframe.Distribution(gradients="local")
    late = run_ranks(outcome, 3, True, method, settings)
    plain = run_ranks(outcome, 3, False, method, settings)
    for one, other in zip(late, plain, strict=True):
        assert one.reads.next > 0
        same(one, other, skipped=3)
        for p, q in zip(late[0].weights, one.weights, strict=True):
            assert torch.equal(p, q)


@pytest.mark.distributed
def test_late_flags_cost_one_collective_a_step() -> None:
    late, plain = (run_ranks(outcome, 2, queued, "muon", {}, {}) for queued in (True, False))
    for one, other in zip(late, plain, strict=True):
        assert one.agreements - other.agreements == one.reads.all
        assert one.reads.behind > 0
