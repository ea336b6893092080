"""Experts of which every rank has some: exact where methods read gradients alone, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.settings import grouped
from tests.compatibility.fully_sharded import load, weights
from tests.compatibility.kit import assert_refused, assert_rounded
from tests.distributed.harness import run_ranks
from tests.methods.stages import damping_for

pytestmark = pytest.mark.distributed

SAMPLES, WIDTH, EXPERTS, STEPS = 8, 6, 4, 3


class Kernels(nn.Module):
    """A matrix for each expert, or for each of those that this rank has."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(experts, WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        kernel = self.kernel
        own = kernel.to_local() if isinstance(kernel, DTensor) else kernel
        return rows @ own.mT


class KernelsHelper(soframe.layers.ExpertsHelper):
    """Each expert is a layer."""

    parameter = "kernel"


class Net(nn.Module):
    """Rows go to all experts, weighed by a router; over ranks, to those of every rank."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = Kernels(experts), Kernels(experts)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.group: dist.ProcessGroup | None = None
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        gates = self.router(hidden).softmax(1)
        if self.checkpoints:
            return self.head(checkpoint(self._experts, hidden, gates, use_reentrant=False))
        return self.head(self._experts(hidden, gates))

    def _experts(self, hidden: Tensor, gates: Tensor) -> Tensor:
        if self.group is None:
            return self._mixed(hidden, gates)
        rank, size = dist.get_rank(self.group), len(hidden)
        rows, weighed = self._of_all(hidden), self._of_all(gates)
        own = weighed.chunk(dist.get_world_size(self.group), 1)[rank]
        summed = across.all_reduce(self._mixed(rows, own), group=self.group)
        return summed[rank * size : (rank + 1) * size]

    def _of_all(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks: torch's all-gather has no gradient in a part of them."""
        parts = [torch.zeros_like(own)] * dist.get_world_size(self.group)
        parts[dist.get_rank(self.group)] = own
        return across.all_reduce(torch.cat(parts), group=self.group)

    def _mixed(self, rows: Tensor, gates: Tensor) -> Tensor:
        every = rows.expand(gates.shape[1], *rows.shape)
        return (self.down(self.up(every).tanh()) * gates.T[..., None]).sum(0)


def make_net() -> Net:
    generator = torch.Generator().manual_seed(3)
    model = Net().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        owner: Whether soframe owns the step, rather than SGD.
        options: Settings of soframe.
        sharded: Whether fully_shard cuts up the rest, and the experts over fewer ranks.
        passes: Micro-batches in each step.
        checkpoints: Whether activations of the experts are computed anew in the backward pass.
        bf16: Whether the model is float32 and runs under autocast to bfloat16.
        spoilt: The step at which the loss of one rank is NaN.
        early: Whether soframe is built before experts are spread over ranks, and the rest sharded.
        begin: The first step.
        end: The step after the last.
        saved: The weights and the state to begin from.
    """

    owner: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool = False
    passes: int = 1
    checkpoints: bool = False
    bf16: bool = False
    spoilt: int | None = None
    early: bool = False
    begin: int = 0
    end: int = STEPS
    saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None


EACH = {"layers": {"up|down": KernelsHelper}}
MEM = {"strategy": "mem-opt"}
MIXED = {"method": {"up|down": "muon", "": "kfac"}, **EACH, **MEM}
SHAMPOO = {"method": "shampoo", **EACH}
KL_CLIPPED, NORM_CLIPPED = {**MIXED, "kl_clip": 1e-6}, {**MIXED, "norm_clip": 1e-3}
SMOOTH = {**MIXED, "method": {"up|down": "sgd", "": "kfac"}}
"""What does not enlarge the rounding of a pass, as orthogonalisation does."""
CASES = {
    "muon": Case(options={"method": "muon", **EACH, **MEM}),
    "matrices": Case(options={"method": "muon", **MEM}),
    "shampoo": Case(options=SHAMPOO, passes=2),
    "mixed": Case(options=MIXED),
    "skipped": Case(owner=False, options={"method": "kfac", "skip": ["up|down"], "kl_clip": 1e-3}),
    "checkpoints": Case(options=KL_CLIPPED, checkpoints=True),
    "spoilt": Case(options=MIXED, spoilt=1, passes=2),
    "early": Case(options=MIXED, early=True),
    "bf16": Case(options=SMOOTH, bf16=True),
}
SHARDED = {
    "muon": Case(options={"method": "muon", **EACH, **MEM}, sharded=True, spoilt=1),
    "mixed": Case(
        options={**NORM_CLIPPED, "strategy": "comm-opt"}, sharded=True, passes=2, checkpoints=True
    ),
    "early": Case(options=SHAMPOO, sharded=True, early=True),
    "bf16": Case(options=SMOOTH, sharded=True, bf16=True),
}


def spread(model: Net, ranks: int, case: Case) -> int:
    """Spread the experts over ranks; return how many have other experts."""
    if not case.sharded:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("experts",))
    else:
        names = ("copies", "experts")
        whole = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
        mesh, every = whole["experts"], whole[names]._flatten("data")
    for module in (model.up, model.down):
        kernel = distribute_tensor(module.kernel.detach(), mesh, [Shard(0)])
        module.kernel = nn.Parameter(kernel)
        if case.sharded:
            fully_shard(module, mesh=whole["copies"])
    if case.sharded:
        fully_shard(model, mesh=every)
    model.group = mesh.get_group()
    return mesh.size()


def average(model: Net, case: Case, ranks: int, spread_over: int) -> None:
    """Let gradients be those of the mean over all samples."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if "kernel" in name:  # has those of all rows that come to it
            gradient /= spread_over
        elif not case.sharded:
            dist.all_reduce(gradient)
            gradient /= ranks


Saved = tuple[dict[str, Tensor], dict[str, Any]]
"""Weights, and soframe's state."""


def train(rank: int, ranks: int, case: Case) -> Saved:
    """Train, and return the weights and the state."""
    model = make_net()
    model.checkpoints = case.checkpoints
    if case.saved is not None:
        load(model, case.saved[0])
    if case.bf16:
        model.float()
    over = spread(model, ranks, case) if ranks > 1 and not case.early else 1
    settings = {"statistics_every": 1, "solve_every": 2, **case.options}
    settings |= damping_for(case.options.get("method", "kfac"), case.options.get("auxiliary"))
    if ranks == 1:
        settings.pop("strategy", None)
    optimizer: Any
    if case.owner:
        optimizer = soframe.Optimizer(model, lr=0.05, **grouped(settings))
        own = optimizer.preconditioner
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        own = soframe.Preconditioner(model, optimizer=optimizer, **grouped(settings))
    if ranks > 1 and case.early:
        over = spread(model, ranks, case)
    if case.saved is not None:
        optimizer.load_state_dict(case.saved[1])
    dtype = next(model.parameters()).dtype
    for step in range(case.begin, case.end):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        optimizer.zero_grad()
        for inputs, targets in zip(
            x[mine].chunk(case.passes), y[mine].chunk(case.passes), strict=True
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                outputs = model(inputs)
            loss = (outputs.to(dtype) - targets).square().sum(1).mean() / case.passes
            (loss * math.nan if step == case.spoilt and rank == 0 else loss).backward()
        if ranks > 1:
            average(model, case, ranks, over)
        if not case.owner:
            own.step()
        optimizer.step()
    assert own.counters["skipped_updates"] == (case.spoilt is not None)
    saved = weights(model), optimizer.state_dict()
    own.close()
    return saved


def train_all(rank: int, ranks: int, cases: list[Case]) -> list[Saved]:
    return [train(rank, ranks, case) for case in cases]


OFTEN = ("shampoo", "skipped", "checkpoints", "spoilt", "early", "bf16")
OFTEN_SHARDED = ("mixed", "early")


def split(cases: dict[str, Case], often: tuple[str, ...]) -> list[dict[str, Case]]:
    """The cases that `make test` runs, and the others."""
    return [{k: c for k, c in cases.items() if (k in often) == which} for which in (True, False)]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(ranks, some, id=f"{name} {which}", marks=marks)
        for name, ranks, cases, often in (
            ("plain", 2, CASES, OFTEN),
            ("sharded", 4, SHARDED, OFTEN_SHARDED),
        )
        for some, which, marks in zip(
            split(cases, often), ("often", "rest"), ((), pytest.mark.thorough), strict=True
        )
    ],
)
def test_experts_are_those_of_one_process(ranks: int, cases: dict[str, Case]) -> None:
    results = run_ranks(train_all, ranks, list(cases.values()), timeout=200)
    start = weights(make_net())
    for index, (name, case) in enumerate(cases.items()):
        plain = replace(case, bf16=False, checkpoints=False, passes=1)
        expected = train(0, 1, plain)[0]
        for found, _ in (own[index] for own in results):
            if case.bf16:
                assert_rounded(found, expected, start, name)
                continue
            for which, weight in found.items():
                where = f"{name}, {which}"
                torch.testing.assert_close(weight, expected[which], rtol=1e-9, atol=1e-9, msg=where)
                assert not torch.equal(weight, start[which]), where


def test_clips_bind() -> None:
    """So equality means something."""
    free = train(0, 1, Case(options=MIXED))[0]
    for options in (KL_CLIPPED, NORM_CLIPPED):
        clipped = train(0, 1, Case(options=options))[0]
        assert float((clipped["head.weight"] - free["head.weight"]).abs().max()) > 1e-4


def test_a_run_goes_on() -> None:
    """From a rank's experts to those of more ranks, in shards, and of one process; and back."""
    begun, rest = Case(options=MIXED, end=1), Case(options=MIXED, begin=1)
    expected = train(0, 1, Case(options=MIXED))[0]
    back = replace(rest, saved=train(0, 1, begun))
    ((saved, *found), *_) = run_ranks(train_all, 2, [begun, back])
    found.append(train(0, 1, replace(rest, saved=saved)))
    found += run_ranks(train, 4, replace(rest, sharded=True, saved=saved))[:1]
    for resumed, _ in found:
        for which, weight in resumed.items():
            torch.testing.assert_close(weight, expected[which], rtol=1e-9, atol=1e-9, msg=which)


# -- what is refused -------------------------------------------------------------------------------


def local_net(rank: int, ranks: int) -> Net:
    """With experts of its own on every rank, under names that all of them use."""
    whole, model = make_net(), Net(EXPERTS // ranks).double()
    held = {n: p.chunk(ranks)[rank] if "kernel" in n else p for n, p in whole.state_dict().items()}
    model.load_state_dict(held)
    model.group = dist.group.WORLD
    return model


def one_pass(model: Net) -> None:
    model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean().backward()


def their_own_in_shards(rank: int, ranks: int) -> None:
    """Of two halves of the ranks each has experts of its own, and shards them."""
    model = local_net(rank % 2, 2)
    names = ("data", "experts")
    whole = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
    every = whole[names]._flatten("all")
    for module in (model.up, model.down):
        fully_shard(module, mesh=whole["data"])
    fully_shard(model, mesh=every)
    soframe.Optimizer(model, "muon", lr=0.1)


def other_names(rank: int, ranks: int) -> None:
    model = nn.ModuleDict({f"expert{rank}": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    soframe.Preconditioner(model, kl_clip=None)


def calls_of_parts(rank: int, ranks: int) -> None:
    model = make_net()
    spread(model, ranks, Case())
    own = soframe.Preconditioner(
        model, kl_clip=None, statistics=soframe.Statistics(samples=lambda: SAMPLES), **EACH
    )
    one_pass(model)
    own.step()


@pytest.mark.parametrize(
    ("function", "ranks", "words"),
    [
        (their_own_in_shards, 4, "is averaged over the ranks .* Experts that ranks have"),
        (other_names, 2, "differs from rank 0's"),
        (calls_of_parts, 2, "computes with this rank's part .* Choose a method that reads"),
    ],
)
def test_what_is_refused(function: Any, ranks: int, words: str) -> None:
    assert_refused(function, ranks, words)
