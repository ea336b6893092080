"""On meshes of several dimensions ranks train as one process does with whole layers and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.blocks import sharding
from soframe.comm import TorchDistributed
from soframe.parallel import dtensors
from soframe.settings import grouped
from soframe.strategies import Sharded
from tests.compatibility import tensor_parallel
from tests.compatibility.fully_sharded import weights
from tests.compatibility.kit import Result, require_refused, result_of
from tests.compatibility.meshed import Case, Run, check, save_all, train, train_all
from tests.compatibility.tensor_parallel import make_net, plan
from tests.distributed.harness import run_ranks
from tests.distributed.test_plans import planned

pytestmark = pytest.mark.distributed

MEM = {"strategy": "mem-opt"}
ALL = {**MEM, "layers": "all"}
KL = {**ALL, "kl_clip": 1e-4}
SHARDED = {"strategy": Sharded(group=None, deferred=True), "layers": "all"}

ALONE: dict[str, Any] = {
    "kind": "none",
    "tensor": 1,
    "passes": 2,
    "syncs": False,
    "checkpoints": True,
}
"""Without a plan."""

CASES: dict[str, Case] = {
    # fully_shard over ranks with other data.
    "mem kl": Case(options=KL),
    "sharded": Case(options=SHARDED, passes=2, syncs=False, checkpoints=True),
    "sequence": Case(kind="sequence", options={**ALL, "norm_clip": 0.03}),
    "observed": Case(observed=True, options=MEM, end=1),
    "after": Case(when="after", options={"kl_clip": 1e-4}),
    "spoilt": Case(spoilt=1, place="part", kind="distributed", options=MEM),
    "own": Case(owner="own", method="shampoo", kind="sequence", options=MEM),
    "own after": Case(owner="own", method="muon", kind="embedding", when="after", options=MEM),
    # In copies.
    "hybrid": Case(framework="hybrid", options=KL),
    "replicate": Case(framework="replicate", kind="sequence", passes=2, options=KL),
    "own replicate": Case(framework="replicate", owner="own", method="adamw", kind="sequence"),
    "hybrid alone": Case(framework="hybrid", spoilt=1, place="part", options=KL, **ALONE),
    "replicate alone": Case(framework="replicate", options=KL, **ALONE),
    "own replicate alone": Case(
        framework="replicate", owner="own", method="shampoo", spoilt=1, place="part", **ALONE
    ),
    "replicate alone later": Case(
        framework="replicate", when="after", options={"kl_clip": 1e-4}, **ALONE
    ),
    # By hand.
    "hand": Case(framework="hand", options=KL),
    "hand sequence": Case(
        framework="hand",
        kind="sequence",
        passes=2,
        checkpoints=True,
        spoilt=1,
        place="part",
        options=SHARDED,
    ),
    "hand later": Case(framework="hand", when="after", options={"kl_clip": 1e-4}),
    "own hand": Case(framework="hand", owner="own", method="muon", kind="sequence", options=MEM),
}


OFTEN = ("sharded", "own after")
"""Cases that differ in what is cut up and when, and in whose step it is."""
REST = tuple(name for name in CASES if name not in OFTEN)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OFTEN, id="often"),
        pytest.param(REST[::2], id="rest", marks=pytest.mark.thorough),
        pytest.param(REST[1::2], id="other rest", marks=pytest.mark.thorough),
    ],
)
def test_ranks_are_one_process(names: tuple[str, ...]) -> None:
    results = run_ranks(train_all, 4, [CASES[name] for name in names], timeout=240)
    for index, name in enumerate(names):
        check([own[index] for own in results], CASES[name], name)


def of_one_part(rank: int, ranks: int) -> list[str]:
    """Build for two copies of a plan, each sharded over one rank; return the blocks."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "shards", "tensor"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["copies", "shards"])
    return [block.name for block in soframe.Preconditioner(model, lr=0.1).blocks]


def test_copies_of_a_plan_have_one_dimension_of_it() -> None:
    assert run_ranks(of_one_part, 4) == [["0", "2"]] * 4


@pytest.mark.thorough
def test_two_copies_of_two_parts_of_two_cuts() -> None:
    """On 8 ranks no dimension of the mesh is of one rank."""
    cases = {
        "hybrid": CASES["hybrid"],
        "own hybrid": Case(framework="hybrid", owner="own", method="muon", options=MEM),
        "spoilt": Case(framework="hybrid", spoilt=1, place="part", options=SHARDED),
    }
    results = run_ranks(train_all, 8, list(cases.values()), timeout=240)
    for index, (name, case) in enumerate(cases.items()):
        check([own[index] for own in results], case, name)


Observed = tuple[dict[str, Tensor], list[tuple[Any, ...]], dict[tuple[str, int], int]]


def all_of_these(rank: int, ranks: int) -> Observed:
    return a_stage(rank, ranks), recorded(rank, ranks, ["mem kl"], 1), all_parts(rank, ranks)


@pytest.fixture(scope="module")
def observed() -> list[Observed]:
    """A stage's weights, what a step sends, and where parts are, by rank."""
    return run_ranks(all_of_these, 4)


# -- states ----------------------------------------------------------------------------------------


def save_and_go_on(
    rank: int, ranks: int, early: Sequence[Case], rest: Sequence[Sequence[Case]]
) -> tuple[list[dict[str, Any]], list[list[Result]]]:
    """Save, and go on in several ways from what the first rank saved."""
    saved = save_all(rank, ranks, early)
    dist.broadcast_object_list(saved, 0)
    return saved, [
        train_all(rank, ranks, [replace(c, state=s) for c, s in zip(way, saved, strict=True)])
        for way in rest
    ]


@pytest.mark.parametrize(
    "frameworks",
    [
        pytest.param(("hybrid",), marks=pytest.mark.thorough),
        pytest.param(("fully_shard", "hand", "replicate"), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_run_goes_on(frameworks: tuple[str, ...]) -> None:
    """In the middle of an interval, from one framework to the next one and to one process."""
    cases = [CASES["mem kl"], replace(CASES["own hand"], framework="fully_shard")]
    early = [replace(case, end=2) for case in cases]
    settings: dict[str, dict[str, Any]] = {
        "fully_shard": {},
        "hand": {},
        "hybrid": {"tensor": 1, "kind": "none"},
        "replicate": {"tensor": 1, "kind": "none"},
    }
    rest = [
        [replace(case, begin=2, framework=framework, **settings[framework]) for case in cases]
        for framework in frameworks
    ]
    by_rank = run_ranks(save_and_go_on, 4, early, rest)
    for number, framework in enumerate(frameworks):
        for index, case in enumerate(cases):
            check([results[number][index] for _, results in by_rank], case, framework)
    for case, state in zip(cases, by_rank[0][0], strict=True):
        options = {k: v for k, v in case.options.items() if k != "strategy"}
        run = train(replace(case, begin=2, state=state, options=options))
        check([result_of(run)], case, "one process")


def a_stage(rank: int, ranks: int) -> dict[str, Tensor]:
    """Half of the ranks have a model to themselves, as a stage of a pipeline has its layers."""
    names = ("stage", "data", "tensor")
    mesh = init_device_mesh("cpu", (ranks // 2, 1, 2), mesh_dim_names=names)
    assert TorchDistributed(mesh).world_size == ranks
    assert TorchDistributed(mesh["tensor"]).world_size == 2
    model = make_net()
    parallelize_module(model, mesh["tensor"], plan("pairs"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    backend = TorchDistributed(mesh["data", "tensor"])
    assert backend.global_ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
    own = soframe.Preconditioner(
        model,
        lr=0.02,
        distribution=soframe.Distribution(backend=backend),
        damping=0.1,
        statistics_every=1,
        solve_every=2,
        kl_clip=1e-3,
        **MEM,
    )
    for step in range(2):
        optimizer.zero_grad()
        tokens, targets = tensor_parallel.batch(step)
        (0.5 * (model(tokens) - targets).square().sum((1, 2)).mean()).backward()
        own.step()
        optimizer.step()
    own.close()
    return weights(model)


def test_a_stage(observed: list[Observed]) -> None:
    """A part of all ranks, whose group is that of its mesh."""
    case = tensor_parallel.Case(end=2, options={"kl_clip": 1e-3})
    expected = tensor_parallel.alone(case)
    for found, _, _ in observed:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)


# -- what travels ----------------------------------------------------------------------------------

PLANNED = ("mem kl", "sharded", "hybrid", "replicate", "hand", "hand later")


def recorded(rank: int, ranks: int, names: Sequence[str], steps: int) -> list[tuple[Any, ...]]:
    """What runs sent and hold, on this rank, with what their placements plan."""
    found = []
    for name in names:
        own = train(replace(CASES[name], when="before", end=steps), ranks).preconditioner
        found.append((own.placement, own.traffic(), own.memory_usage()))
        own.close()
    return found


@pytest.mark.thorough
def test_plans_are_what_is_sent_and_held() -> None:
    for rank, own in enumerate(run_ranks(recorded, 4, PLANNED, 3, timeout=120)):
        for name, (placement, traffic, memory) in zip(PLANNED, own, strict=True):
            used = [work.name for work in placement.work]
            clips = ["kl"] if "kl_clip" in CASES[name].options else []
            assert traffic == planned(placement, rank, 3, (1, 2), used, clips=clips), name
            assert memory == placement.memory(rank, used=used), name
            assert any(len({*s.copies}) > 1 for work in placement.work for s in work.shards), name


def test_a_worker_is_sent_what_it_lacks_and_each_rank_its_part(observed: list[Observed]) -> None:
    """By hand: of what both have cut up a rank has a quarter, of what one has cut up a half."""
    own = [found for _, (found,), _ in observed]
    cut = ("q.weight", "k.weight", "v.weight", "o.weight", "up.weight", "up.bias", "down.weight")
    sizes = {name: p.numel() for name, p in make_net().named_parameters()}
    quarters = sum(size for name, size in sizes.items() if name.endswith(cut))
    halves = sum(sizes.values()) - quarters
    # The worker lacks three quarters, or half of a copy; three ranks lack their part.
    for phase, lacked in (
        ("gradients", 3 * quarters + 2 * halves),
        ("exchange", 3 * quarters + 6 * halves),
    ):
        moved = sum(traffic[phase]["bytes"] for _, traffic, _ in own)
        assert moved == 8 * 2 * lacked / 4, phase  # what one rank gives another one takes


# -- which part a rank has -------------------------------------------------------------------------


def where_parts_are(rank: int, ranks: int, framework: str, along: int) -> int:
    """For rows and columns that fully_shard cuts unevenly, and more ranks than rows.

    Returns the number of matrices that are cut along both dimensions.
    """
    widths = (4, 8, 12) if along else (2, 6, 10)  # torch cuts no columns unevenly
    model = nn.Sequential(*(nn.Linear(n, 8) for n in widths), *(nn.Linear(8, n) for n in widths))
    plan = {str(i): RowwiseParallel() if i < 3 else ColwiseParallel() for i in range(6)}
    plan["2"], plan["3"] = ColwiseParallel(), RowwiseParallel()
    shape = (2, ranks // 4, 2) if framework == "hybrid" else (ranks // 2, 2)
    mesh = init_device_mesh(
        "cpu", shape, mesh_dim_names=("copies", "data", "tensor")[-len(shape) :]
    )
    parallelize_module(model, mesh["tensor"], plan)
    data = mesh["copies", "data"] if framework == "hybrid" else mesh["data"]
    if framework == "replicate":
        replicate(model, mesh=data)
    elif framework != "hand":
        dim = Shard(along)
        fully_shard(model, mesh=data, shard_placement_fn=lambda p: dim if p.dim() > along else None)
    seen = 0
    for parameter in model.parameters():
        found = dtensors.shards(parameter, tuple(range(ranks)))
        assert found is not None
        whole = parameter.detach().full_tensor()
        assert torch.equal(found.part(whole, rank), parameter.to_local())
        seen += len(found.also)
        for copy in set(found.copies):
            of_copy = [r for r in range(ranks) if found.copies[r] == copy]
            entries = [
                found.part(torch.arange(whole.numel()).view(whole.shape), r).flatten()
                for r in of_copy
            ]
            assert sorted(torch.cat(entries).tolist()) == list(range(whole.numel()))
    return seen


PARTS = {  # by framework and dimension: how many matrices are cut along both
    ("fully_shard", 0): 3,
    ("fully_shard", 1): 3,
    ("hybrid", 0): 3,
    ("replicate", 0): 0,
    ("hand", 0): 0,
}


def all_parts(rank: int, ranks: int) -> dict[tuple[str, int], int]:
    return {case: where_parts_are(rank, ranks, *case) for case in PARTS}


def test_parts_are_torchs(observed: list[Observed]) -> None:
    assert [parts for _, _, parts in observed] == [PARTS] * 4


# -- what is seen, and what is refused -------------------------------------------------------------


def forward_only_first(rank: int, ranks: int) -> None:
    """A validation pass leaves whole parameters in the outermost module."""
    names = [type(module).__name__ for module in make_net().modules()]
    for framework in ("fully_shard", "replicate"):
        model = Run(Case(framework=framework), ranks).model
        model(torch.zeros(2, 4, dtype=torch.long))
        own = soframe.Preconditioner(model, kl_clip=None, layers="all")
        assert {type(p).__name__ for p in own.covered()} == {"DTensor"}
        assert len(list(own.covered())) == len(list(model.parameters()))
        assert [sharding.class_name(module) for module in model.modules()] == names
        own.close()


def test_after_a_validation_pass() -> None:
    run_ranks(forward_only_first, 2)


def cut_in_two(ranks: int) -> tuple[nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
    model = make_net()
    parallelize_module(model, mesh["tensor"], plan("pairs"))
    return model, mesh


def in_ddp(rank: int, ranks: int) -> None:
    """torch hides the plan from it."""
    model, mesh = cut_in_two(ranks)
    soframe.Preconditioner(DistributedDataParallel(model, device_mesh=mesh["data"]), kl_clip=None)


def in_ddp_later(rank: int, ranks: int) -> None:
    model, mesh = cut_in_two(ranks)
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    ddp = DistributedDataParallel(model, device_mesh=mesh["data"])
    ddp(torch.zeros(2, 4, dtype=torch.long)).square().mean().backward()
    own.step()


def averaged_by_nobody(rank: int, ranks: int) -> None:
    """A third dimension, over which fully_shard averages nothing."""
    shape = (2, 1, ranks // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("other", "data", "tensor"))
    model = make_net()
    parallelize_module(model, mesh["tensor"], plan("pairs"))
    fully_shard(model, mesh=mesh["data"])
    soframe.Preconditioner(model, kl_clip=None)


def meshes_of_their_own(rank: int, ranks: int) -> None:
    """Each half of the ranks has a mesh that knows of no other."""
    half = range(ranks // 2) if rank < ranks // 2 else range(ranks // 2, ranks)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = DeviceMesh.from_group(groups[rank // 2], "cpu")
    assert mesh.mesh.tolist() == list(half)
    model = make_net()
    parallelize_module(model, mesh, plan("pairs"))
    soframe.Preconditioner(model, kl_clip=None)


def uneven(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    soframe.Preconditioner(model, kl_clip=None)


def drawn(rank: int, ranks: int) -> None:
    model = Run(Case(framework="replicate"), ranks).model
    settings = {"fisher": "monte-carlo", "loss": "squared-error"}
    soframe.Preconditioner(model, kl_clip=None, **grouped(settings))  # type: ignore[arg-type]


def owners_alone(rank: int, ranks: int) -> None:
    soframe.Preconditioner(Run(Case(), ranks).model, kl_clip=None, strategy="owner-local")


def plan_outside(rank: int, ranks: int) -> None:
    """fully_shard on a part of the model, and the plan in another part."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "tensor"))
    model = make_net()
    parallelize_module(model, mesh["tensor"], plan("pairs"))
    fully_shard(model.head, mesh=mesh["data"])
    soframe.Preconditioner(model, kl_clip=None)


def whole_mesh(rank: int, ranks: int) -> None:
    """Parameters that are DTensors of the whole mesh before fully_shard is called."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    placed = [Replicate(), Shard(0)]
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, placed))
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    inputs = distribute_tensor(torch.ones(2, 4), mesh, [Replicate(), Replicate()])
    model(inputs).full_tensor().square().mean().backward()
    own.step()


REFUSED: list[tuple[Callable[[int, int], Any], int, str]] = [
    (in_ddp, 2, "DistributedDataParallel with device_mesh=.* replicate"),
    (in_ddp_later, 2, "DistributedDataParallel with device_mesh=.* replicate"),
    (averaged_by_nobody, 4, "a step needs gradients over all data"),
    (meshes_of_their_own, 4, "be dimensions of one mesh"),
    (uneven, 2, "cuts 5 features into 2 parts that are not equal"),
    (drawn, 2, "monte-carlo.* pass .*fisher='type-2'"),
    (owners_alone, 2, "some ranks take no statistics of it: pass strategy='comm-opt'"),
    (plan_outside, 2, "call fully_shard on the whole model"),
    (whole_mesh, 2, "gradients without statistics"),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_refused(ranks: int) -> None:
    require_refused([(function, words) for function, on, words in REFUSED if on == ranks], ranks)
