"""Under a tensor-parallel plan ranks train as one process does with whole layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import soframe
from soframe.settings import grouped
from soframe.strategies import Sharded
from tests.compatibility.kit import require_refused, result_of
from tests.compatibility.tensor_parallel import (
    Case,
    Run,
    alone,
    check,
    save_all,
    train,
    train_all,
)
from tests.distributed.harness import run_ranks
from tests.distributed.test_plans import planned
from tests.planning.kit import little_traffic

pytestmark = pytest.mark.distributed

MEM = {"strategy": "mem-opt"}
KL = {**MEM, "kl_clip": 1e-4}
ALL = {**MEM, "layers": "all"}

CASES: dict[str, Case] = {
    # Strategies and clips.
    "comm": Case(),
    "mem": Case(options=MEM),
    "comm kl": Case(options={"kl_clip": 1e-4}),
    "mem kl": Case(options=KL),
    "mem norm": Case(options={**MEM, "norm_clip": 0.003}),
    "sharded": Case(options={"strategy": Sharded(group=None, deferred=True)}),
    # Plans.
    "sequence": Case(kind="sequence", options={"kl_clip": 1e-4, "layers": "all"}),
    "embedding": Case(kind="embedding", options=ALL),
    "distributed": Case(kind="distributed", options=MEM),
    "after": Case(when="after", options=MEM),
    # How steps are made.
    "passes": Case(passes=2, options=MEM),
    "global": Case(passes=2, options={**MEM, "loss_average": "global"}),
    "stagger": Case(options={**MEM, "stagger": True, "statistics_every": 2}),
    "observed": Case(observed=True, options=MEM),
    "checkpoints": Case(checkpoints=True, options=MEM),
    "spoilt": Case(spoilt=2, options=MEM),
    "spoilt part": Case(spoilt=2, place="part", options=MEM),
    "ekfac": Case(method="ekfac", options=MEM),
    # soframe owns the step.
    "own kfac": Case(owner="own", options=MEM),
    "own muon": Case(owner="own", method="muon", options=MEM),
    "own shampoo": Case(owner="own", method="shampoo", options=MEM),
    "own after": Case(owner="own", method="muon", when="after", options=MEM),
    "own sequence": Case(owner="own", method="muon", kind="sequence", options=MEM),
    "own embedding": Case(owner="own", method="adamw", kind="embedding"),
}
OFTEN = ("comm kl", "mem norm", "sharded", "sequence", "distributed", "after", "global", "observed")
"""Cases that `make test` runs, besides those that go on below; `make test-all` runs the others."""
REST = tuple(name for name in CASES if name not in OFTEN)
FEW = ("mem kl", "sequence", "own sequence")
"""Cases that run on four ranks, too."""


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, OFTEN),
        pytest.param(2, REST, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param(4, FEW, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_ranks_are_one_process(ranks: int, names: tuple[str, ...]) -> None:
    # An observed Fisher has a pass for each output of each position: one step of it.
    cases = [replace(CASES[name], end=1 if CASES[name].observed else 3) for name in names]
    results = run_ranks(train_all, ranks, cases, timeout=120)
    for index, (name, case) in enumerate(zip(names, cases, strict=True)):
        check([own[index] for own in results], case, name)


def test_the_cases_are_not_all_one() -> None:
    """The reference tells clips, passes and bad batches apart, so equality means something."""
    pairs = [
        ("mem", "mem kl"),
        ("mem", "mem norm"),
        ("mem", "passes"),
        ("passes", "global"),
        ("mem", "stagger"),
        ("mem", "observed"),
        ("mem", "spoilt"),
        ("mem", "ekfac"),
        ("comm kl", "sequence"),
        ("own muon", "own shampoo"),
    ]
    found = {name: alone(CASES[name]) for name in {name for pair in pairs for name in pair}}
    for one, other in pairs:
        first, second = found[one], found[other]
        assert max(float((first[n] - second[n]).abs().max()) for n in first) > 1e-4, (one, other)


# -- states ----------------------------------------------------------------------------------------


def test_a_run_goes_on() -> None:
    """In the middle of an interval: on the same mesh, from whole layers and with whole layers."""
    cases = [CASES["mem kl"], CASES["own sequence"]]
    early, names = [replace(case, end=3) for case in cases], ("mem kl", "own sequence")
    saved, *_ = run_ranks(save_all, 2, early)
    plain = [train(case).state() for case in early]
    rest = [
        replace(case, begin=3, state=state)
        for states in (saved, plain)
        for case, state in zip(cases, states, strict=True)
    ]
    results = run_ranks(train_all, 2, rest)
    for index, (case, name) in enumerate([*zip(cases, names, strict=True)] * 2):
        check([own[index] for own in results], case, name)
    for case, state, name in zip(cases, saved, names, strict=True):
        options = {k: v for k, v in case.options.items() if k != "strategy"}
        run = train(replace(case, begin=3, state=state, options=options))
        check([result_of(run)], case, name)


# -- what travels ----------------------------------------------------------------------------------


def collectives(rank: int, ranks: int) -> list[list[int]]:
    """How many collectives each backward pass starts: plain, and at some steps of soframe's."""
    found: list[list[int]] = []
    every_other = {"statistics_every": 2, "skip": [r"\.[qk]$"]}
    for options in (None, every_other):
        if options is None:
            run = Run(Case(), ranks)
            run.preconditioner.close()
        else:
            run = Run(Case(options=options), ranks)
        counts = []
        for step in range(4):
            run.optimizer.zero_grad()
            with CommDebugMode() as seen:
                run.backward(step)
            counts.append(seen.get_total_counts())
            if options is not None:
                run.preconditioner.step()
        found.append(counts)
    return found


def test_rows_travel_where_they_are_needed(observed: list[Observed]) -> None:
    """One gather for each call of a cut layer, at statistics steps alone."""
    for (plain, some), _, _ in observed:
        none = plain[0]
        assert plain == [none] * 4
        assert some == [none + 4, none, none + 4, none]  # v, o, up, down


def recorded(rank: int, ranks: int) -> tuple[Any, ...]:
    own = train(CASES["mem kl"], ranks).preconditioner
    return own.placement, own.traffic(), own.memory_usage()


def test_plans_are_what_is_sent_and_held(observed: list[Observed]) -> None:
    """Of what soframe sends itself; the rows of calls travel by the plan's own collectives."""
    for rank, (_, (placement, traffic, memory), _) in enumerate(observed):
        used = [work.name for work in placement.work]
        assert traffic == planned(placement, rank, 4, (1, 2), used, clips=["kl"])
        settled = dict(memory)
        settled["total"] -= settled.pop("in_flight", 0)  # sums that the next step waits for
        assert settled == placement.memory(rank, used=used)
        assert traffic["gradients"]["bytes"] > 0


def seen_by_layers(rank: int, ranks: int) -> list[tuple[type, ...]]:
    """Which tensors statistics are made of, one of which a collective still writes when called."""
    run = Run(Case(kind="sequence", options=ALL), ranks)
    found: list[tuple[type, ...]] = []
    for block in run.preconditioner.blocks:
        for helper in block.helpers:
            before = helper.input_rows

            def noted(*inputs: Tensor, before: Any = before) -> Tensor:
                found.append(tuple(map(type, inputs)))
                rows: Tensor = before(*inputs)
                return rows

            helper.input_rows = noted  # type: ignore[method-assign]
    run.backward(0)
    return found


Observed = tuple[list[list[int]], tuple[Any, ...], list[tuple[type, ...]]]


def all_of_these(rank: int, ranks: int) -> Observed:
    return collectives(rank, ranks), recorded(rank, ranks), seen_by_layers(rank, ranks)


@pytest.fixture(scope="module")
def observed() -> list[Observed]:
    """What two ranks send, hold and hand to layers, by rank."""
    return run_ranks(all_of_these, 2)


def test_statistics_are_made_of_plain_tensors(observed: list[Observed]) -> None:
    for _, _, found in observed:
        assert found
        assert set(found) == {(Tensor,)}


# -- what is refused -------------------------------------------------------------------------------


def net(ranks: int, kind: str = "pairs") -> nn.Module:
    return Run(Case(kind=kind), ranks).model


def beside_fully_shard(rank: int, ranks: int) -> None:
    """The same ranks would have the same data for some layers, and their own for others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (ranks,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model[2], mesh=mesh)
    soframe.Preconditioner(model, kl_clip=None)


def two_dimensions(rank: int, ranks: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1, ranks))
    model[0].weight = nn.Parameter(
        distribute_tensor(model[0].weight.detach(), mesh, [Replicate(), Shard(0)])
    )
    soframe.Preconditioner(model, kl_clip=None)


def uneven(rank: int, ranks: int) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    soframe.Preconditioner(model, kl_clip=None)


def drawn(rank: int, ranks: int) -> None:
    settings = {"fisher": "monte-carlo", "loss": "squared-error"}
    soframe.Preconditioner(net(ranks), kl_clip=None, **grouped(settings))  # type: ignore[arg-type]


def owners_alone(rank: int, ranks: int) -> None:
    soframe.Preconditioner(net(ranks), kl_clip=None, strategy="owner-local")


def groups_of_ranks(rank: int, ranks: int) -> None:
    soframe.Preconditioner(net(ranks), kl_clip=None, strategy=Sharded(group=2))


def owners_alone_later(rank: int, ranks: int) -> None:
    """The first window is captured of layers that are cut up since; nobody waits in it."""
    Run(Case(when="after", options={"strategy": "owner-local"}), ranks).step(0)


def uneven_later(rank: int, ranks: int) -> None:
    model = nn.Sequential(nn.Linear(4, 5))
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    model(torch.ones(3, 4)).square().mean().backward()
    own.step()


def local_gradients(rank: int, ranks: int) -> None:
    soframe.Preconditioner(
        net(ranks), kl_clip=None, distribution=soframe.Distribution(gradients="local")
    )


def alone_among_many(rank: int, ranks: int) -> None:
    soframe.Preconditioner(
        net(ranks), kl_clip=None, distribution=soframe.Distribution(backend="single")
    )


def hyperball(rank: int, ranks: int) -> None:
    soframe.Optimizer(net(ranks), "muon", lr=0.1, constraint="hyperball")


def trust_region(rank: int, ranks: int) -> None:
    soframe.TrustRegion(net(ranks), "mse")


def cut_outputs(rank: int, ranks: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (ranks,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
    own = soframe.Preconditioner(
        model, kl_clip=None, statistics=soframe.Statistics(fisher="type-2", loss="squared-error")
    )
    own.observe(model(torch.ones(3, 4)))


def summed_on_one_rank(rank: int, ranks: int) -> None:
    """A gradient that is to be added up over ranks on one of them only: nobody waits."""
    run = Run(Case(owner="own", method="adamw", kind="sequence"), ranks)
    run.backward(0)
    gain = run.model.norm.weight
    if rank == 0:
        gain.grad = distribute_tensor(torch.ones(8).double(), gain.device_mesh, [Replicate()])
    else:
        distribute_tensor(torch.ones(8).double(), gain.device_mesh, [Replicate()])
    run.optimizer.step()


def automatic_within_little(rank: int, ranks: int) -> None:
    """The least that is named is of a strategy that serves the plan."""
    with little_traffic():
        Run(Case(options={"strategy": soframe.Auto(1, budget=0.0)}), ranks)


# The layer that is named is of the plan.
NO_STATISTICS = (
    r"(attention\.\w|up|down) belongs to a tensor-parallel plan.* some ranks take no statistics of "
    r"it: pass strategy='comm-opt'"
)
REFUSED: list[tuple[Callable[[int, int], Any], int, str]] = [
    (beside_fully_shard, 2, "tensor-parallel plan, whose ranks have the same data"),
    (two_dimensions, 2, "plan that has a mesh of 2 dimensions"),
    (uneven, 2, "cuts 5 features into 2 parts that are not equal"),
    (drawn, 2, "monte-carlo.* pass .*fisher='type-2'"),
    (owners_alone, 2, NO_STATISTICS),
    (automatic_within_little, 2, r"rank\(s\): strategy=(?!'owner-local').* holds least"),
    (owners_alone_later, 2, NO_STATISTICS),
    (uneven_later, 2, "cuts 5 features into 2 parts that are not equal"),
    (groups_of_ranks, 4, NO_STATISTICS),
    (local_gradients, 2, "pass .*gradients='averaged'"),
    (alone_among_many, 2, "is sharded over the ranks"),
    (hyperball, 2, "of which each rank has a part"),
    (trust_region, 2, "TrustRegion needs whole parameters"),
    (cut_outputs, 2, r"pass output\.full_tensor\(\)"),
    (summed_on_one_rank, 2, "blocks with gradients"),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_refused(ranks: int) -> None:
    require_refused([(function, words) for function, on, words in REFUSED if on == ranks], ranks)
