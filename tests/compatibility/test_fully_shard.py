"""Under fully_shard (FSDP2) ranks train as one process does with the concatenated batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import soframe
from soframe import available
from soframe.methods.base import Direction, Given
from soframe.methods.kfac import KFAC
from soframe.parallel import dtensors
from soframe.settings import grouped
from soframe.step import fused_adam
from soframe.strategies import HybridOpt, Sharded
from tests.compatibility.fully_sharded import (
    SAMPLES,
    Case,
    Net,
    Run,
    alone,
    batch,
    make_net,
    shard,
    train,
    weights,
    whole,
)
from tests.compatibility.kit import Result, assert_same, require_refused, result_of, state_of
from tests.distributed.harness import run_ranks
from tests.distributed.test_plans import planned

pytestmark = pytest.mark.distributed

STRATEGIES: dict[str, Any] = {
    "comm": "comm-opt",
    "mem": "mem-opt",
    "hybrid": HybridOpt(gradient_workers=2),
    "sharded": Sharded(group=None),
    "deferred": Sharded(group=None, deferred=True),
}
CLIPS = {"kl_clip": 1e-4, "norm_clip": 0.03}
LARGE = {**CLIPS, "damping": 1e23}
MEM = {"strategy": "mem-opt"}

CASES: dict[str, Case] = {
    # Strategies, clips and what they read.
    **{f"kfac {name}": Case(options={"strategy": s}) for name, s in STRATEGIES.items()},
    **{
        f"kfac {name} clips": Case(options={"strategy": s, **CLIPS})
        for name, s in STRATEGIES.items()
    },
    "kfac rates": Case(options={**MEM, **CLIPS}, groups=True),
    "kfac large": Case(options={**MEM, **LARGE}, factor=1e12),
    "kfac large comm": Case(options={"strategy": "comm-opt", **LARGE}, factor=1e12),
    "kfac kl": Case(options={**MEM, "kl_clip": 1e-4}),
    "kfac norm": Case(options={**MEM, "norm_clip": 0.03}),
    "kfac background": Case(options={**MEM, "background": 1}),
    "kfac observed": Case(options=MEM, observed=True),
    # How fully_shard is called.
    "stays": Case(options=MEM, shard={"reshard_after_forward": False}),
    "root": Case(options=MEM, root_only=True),
    "after": Case(options=MEM, when="after"),
    "after, stays, in copies": Case(
        options=MEM, when="after", shard={"reshard_after_forward": False}, hybrid=True
    ),
    "in copies": Case(options={**MEM, **CLIPS}, hybrid=True),
    "in copies, comm": Case(options={**CLIPS}, hybrid=True),
    "in copies, hybrid": Case(options={"strategy": HybridOpt(gradient_workers=2)}, hybrid=True),
    # How steps are made.
    "passes": Case(options=MEM, passes=2),
    "passes, one reduction": Case(options=MEM, passes=2, syncs=False),
    "checkpoints": Case(options=MEM, checkpoints=True),
    "checkpoints, passes": Case(options=MEM, checkpoints=True, passes=2),
    "spoilt": Case(options=MEM, spoilt=2),
    "frozen": Case(options=MEM, frozen=(2, 4), end=6),
    "frozen after": Case(options=MEM, when="after", frozen=(2, 4), end=6),
    # soframe owns the step.
    **{
        f"own {method}": Case(owner="own", method=method, options=MEM)
        for method in ("kfac", "muon", "soap-muon", "adamw", "shampoo", "ekfac")
    },
    "own comm": Case(owner="own", method="soap-muon"),
    "own cautious": Case(
        owner="own", method="soap-muon", options={**MEM, "weight_decay_kind": "cautious"}
    ),
    "own after": Case(owner="own", method="soap-muon", options=MEM, when="after"),
    "own in copies": Case(owner="own", method="soap-muon", options=MEM, hybrid=True),
    "own spoilt": Case(owner="own", method="soap-muon", options=MEM, spoilt=2),
    "own frozen": Case(owner="own", method="soap-muon", options=MEM, frozen=(2, 4), end=6),
}
METHODS = {
    f"method {name}": Case(owner="own", method=name, options={"strategy": strategy}, end=3)
    for strategy, name in (
        ("mem-opt" if index % 2 else "comm-opt", name)
        for index, name in enumerate(sorted(available("method")))
    )
}
UNLIKE = ("ekfac", "eva", "diagonal", "shampoo", "normuon", "newton-muon")
"""Methods that differ in what they read, keep and have solved; bases are unique."""
FEW = ("kfac comm", "kfac mem clips", "own soap-muon", "after", "own after", "frozen", "spoilt")
"""Cases that run on every number of ranks."""
OFTEN = {
    2: (
        "kfac deferred",
        "kfac mem clips",
        "passes, one reduction",
        "checkpoints",
        "spoilt",
        "frozen after",
        "own after",
        "own frozen",
    ),
    4: ("after, stays, in copies", "in copies, hybrid", "own in copies"),
}
"""Cases that `make test` runs, by the number of ranks; `make test-all` runs the others, too."""
TOGETHER = 7
"""Of the others, cases that run in one start of the processes."""


def groups_on(ranks: int) -> list[tuple[str, ...]]:
    """The names of the cases for so many ranks, in groups, of which `make test` runs the first."""
    names = list(FEW)
    if ranks == 2:
        names = [name for name, case in CASES.items() if not case.hybrid]
    if ranks == 4:
        names += [name for name, case in CASES.items() if case.hybrid]
    often = OFTEN.get(ranks, ())
    rest = [name for name in names if name not in often]
    return [often, *(tuple(rest[i : i + TOGETHER]) for i in range(0, len(rest), TOGETHER))]


def train_all(rank: int, ranks: int, cases: list[Case]) -> list[Result]:
    return [result_of(train(case, rank, ranks)) for case in cases]


def check(results: list[Result], case: Case, what: str = "") -> None:
    spoilt, start = case.spoilt is not None, weights(make_net())
    assert_same(results, alone(case), start, spoilt=spoilt, what=what, unused="unused")


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(
            ranks,
            names,
            # On two ranks all run that are not hybrid, so that on four the others are enough.
            marks=[] if names == OFTEN.get(ranks) else [pytest.mark.slow, pytest.mark.thorough],
        )
        for ranks in (1, 2, 3, 4)
        for names in groups_on(ranks)
        if names
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_ranks_are_one_process(ranks: int, names: tuple[str, ...]) -> None:
    results = run_ranks(train_all, ranks, [CASES[name] for name in names], timeout=120)
    for index, name in enumerate(names):
        check([own[index] for own in results], CASES[name], name)


@pytest.mark.slow
@pytest.mark.thorough
def test_methods_of_all_kinds_are_one_process() -> None:
    """All methods do what they do with whole gradients, as the next test says, on two ranks.

    Those are left out whose bases rounding picks: of the rows of tokens that no batch has.
    """
    cases = {name: METHODS[name] for name in map("method {}".format, UNLIKE)}
    results = run_ranks(train_all, 4, list(cases.values()), timeout=300)
    for index, (name, case) in enumerate(cases.items()):
        check([own[index] for own in results], case, name)


class Averaged(Run):
    """Plain parameters on ranks, whose gradients are averaged as DistributedDataParallel does."""

    def backward(self, step: int) -> None:
        super().backward(step)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.ranks


def with_and_without(
    rank: int, ranks: int, names: Sequence[str]
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for case in (METHODS[f"method {name}"] for name in names):
        # Whole weights of AdamW would move by torch's kernel, which rounds otherwise.
        with mock.patch.object(fused_adam, "serves", return_value=False):
            plain = Averaged(case, rank, ranks, sharded=False)
            for step in range(case.end):
                plain.step(step)
        found.append((weights(train(case, rank, ranks).model), weights(plain.model)))
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(UNLIKE, id="unlike"),
        pytest.param(
            sorted({*available("method")} - {*UNLIKE}), id="others", marks=pytest.mark.thorough
        ),
    ],
)
def test_every_method_does_what_it_does_with_whole_gradients(names: Sequence[str]) -> None:
    """To the bit: of two ranks a sum has one order."""
    for own in run_ranks(with_and_without, 2, names, timeout=120):
        for name, (found, expected) in zip(names, own, strict=True):
            for key, weight in found.items():
                assert torch.equal(weight, expected[key]), (name, key)


def test_the_cases_are_not_all_one() -> None:
    """The reference tells clips, decay and frozen weights apart, so equality means something."""
    pairs = [
        ("kfac mem", "kfac mem clips"),
        ("kfac mem", "kfac kl"),
        ("kfac mem", "kfac norm"),
        ("kfac mem clips", "kfac norm"),
        ("kfac mem clips", "kfac rates"),
        ("kfac mem", "kfac background"),
        ("kfac mem", "kfac observed"),
        ("kfac mem", "spoilt"),
        ("own soap-muon", "own cautious"),
        ("own soap-muon", "own muon"),
    ]
    found = {name: alone(CASES[name]) for name in {name for pair in pairs for name in pair}}
    for one, other in pairs:
        first, second = found[one], found[other]
        assert max(float((first[n] - second[n]).abs().max()) for n in first) > 1e-4, (one, other)


# -- states ----------------------------------------------------------------------------------------


def save_all(rank: int, ranks: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [state_of(train(case, rank, ranks)) for case in cases]


RESUMED = [
    Case(options={"strategy": Sharded(group=None)}, end=5),
    Case(owner="own", method="soap-muon", options=MEM, end=5),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 3),
        pytest.param(2, 4, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param(4, 3, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_a_run_goes_on_with_other_ranks(before: int, after: int) -> None:
    """In the middle of an interval; and from one process with plain parameters."""
    saved, *_ = run_ranks(save_all, before, [replace(case, end=3) for case in RESUMED])
    plain = [train(replace(case, end=3), sharded=False).state() for case in RESUMED]
    rest = [
        replace(case, begin=3, state=state)
        for states in (saved, plain)
        for case, state in zip(RESUMED, states, strict=True)
    ]
    results = run_ranks(train_all, after, rest)
    for index, case in enumerate(RESUMED * 2):
        check([own[index] for own in results], case)


# -- less precision in a pass ----------------------------------------------------------------------


def train_narrow(rank: int, ranks: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    found = []
    for when in ("before", "after"):
        for owner, method in (("sgd", "kfac"), ("own", "muon")):
            case = Case(owner=owner, method=method, options=MEM, when=when, end=3)
            run = train(replace(case, shard={"mp_policy": policy}), rank, ranks)
            for block in run.preconditioner.blocks:
                assert block.dtype == torch.float64  # the parameters', whatever a pass computes in
            run.preconditioner.close()
            found.append(weights(run.model))
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)]
)
def test_a_policy_of_precision(dtype: torch.dtype) -> None:
    """Within the rounding of the passes, which is the only difference that there may be."""
    kfac = Case(options=MEM, end=3)
    muon = replace(kfac, owner="own", method="muon")
    bound = 1e-5 if dtype == torch.float32 else 0.05
    for own in run_ranks(train_narrow, 2, dtype):
        for found, case in zip(own, (kfac, muon, kfac, muon), strict=True):
            expected, start = alone(case), weights(make_net())
            moved = max(float((expected[n] - start[n]).norm()) for n in expected)
            off = max(float((found[n] - expected[n]).norm()) for n in expected)
            assert 0 < off < bound * moved


# -- what is seen, and what is refused -------------------------------------------------------------


def net(ranks: int) -> Net:
    model = make_net()
    shard(model, Case(), ranks)
    return model


def forward_only_first(rank: int, ranks: int) -> str:
    """A validation pass leaves the whole parameters in the outermost module."""
    model = net(ranks)
    with torch.no_grad():
        model(torch.tensor([0, 1, 2]))
    own = soframe.Preconditioner(model, kl_clip=None)
    kinds = {type(p).__name__ for p in own.covered()}
    own.close()
    return ", ".join(kinds)


def test_after_a_validation_pass(by_function: Found) -> None:
    assert by_function["forward_only_first"] == ["DTensor", "DTensor"]


Found = dict[str, list[Any]]


def one_after_the_other(rank: int, ranks: int, functions: list[Callable[..., Any]]) -> Any:
    return {function.__name__: function(rank, ranks) for function in functions}


@pytest.fixture(scope="module")
def by_function() -> Found:
    """The results of both ranks of functions that need two ranks, in one start of them."""
    every = [forward_only_first, first_window, endless, train_scaled, again, told]
    results = run_ranks(one_after_the_other, 2, every, timeout=60)
    return {function.__name__: [own[function.__name__] for own in results] for function in every}


def optimizer_in_backward(rank: int, ranks: int) -> None:
    model = net(ranks)
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take(parameter: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    model(torch.tensor([0, 1, 2])).square().mean().backward()
    own.step()


def built_within_a_step(rank: int, ranks: int) -> None:
    model = net(ranks)
    loss = model(torch.tensor([0, 1, 2])).square().mean()
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    loss.backward()
    own.step()


def half_of_the_ranks(rank: int, ranks: int) -> None:
    model = Net()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("other", "own"))
    fully_shard(model, mesh=mesh["own"])
    soframe.Preconditioner(model, kl_clip=None)


def alone_among_many(rank: int, ranks: int) -> None:
    soframe.Preconditioner(
        net(ranks), kl_clip=None, distribution=soframe.Distribution(backend="single")
    )


def local_gradients(rank: int, ranks: int) -> None:
    soframe.Preconditioner(
        net(ranks), kl_clip=None, distribution=soframe.Distribution(gradients="local")
    )


def hyperball(rank: int, ranks: int) -> None:
    soframe.Optimizer(net(ranks), "muon", lr=0.1, constraint="hyperball")


def hyperball_first(rank: int, ranks: int) -> None:
    model = make_net()
    optimizer = soframe.Optimizer(model, "muon", lr=0.1, constraint="hyperball")
    shard(model, Case(), ranks)
    model(torch.tensor([0, 1, 2])).square().mean().backward()
    optimizer.step()


def trust_region(rank: int, ranks: int) -> None:
    soframe.TrustRegion(net(ranks), "mse")


def gone_on_one_rank(rank: int, ranks: int) -> None:
    run = Run(Case(), rank, ranks)
    run.backward(0)
    if rank == 0:
        run.model.head.weight.grad = run.model.head.bias.grad = None
    run.preconditioner.step()


def unreduced(rank: int, ranks: int) -> None:
    run = Run(Case(), rank, ranks)
    run.model.set_requires_gradient_sync(False)
    run.step(0)


REFUSED: list[tuple[Callable[[int, int], Any], int, str]] = [
    (optimizer_in_backward, 2, "Hooks on the parameters .* have taken them"),
    (built_within_a_step, 2, "gradients without statistics"),
    (half_of_the_ranks, 4, "is sharded over the ranks .* let fully_shard's mesh have all"),
    (alone_among_many, 2, "is sharded over the ranks .* let fully_shard's mesh have all"),
    (local_gradients, 2, "pass .*gradients='averaged'"),
    (hyperball, 2, "of which each rank has a part"),
    (hyperball_first, 2, "of which each rank has a part"),
    (trust_region, 2, "TrustRegion needs whole parameters"),
    (gone_on_one_rank, 2, "blocks with gradients"),
    (unreduced, 2, "fully_shard has not reduced them"),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_refused(ranks: int) -> None:
    require_refused([(function, words) for function, on, words in REFUSED if on == ranks], ranks)


# -- what travels ----------------------------------------------------------------------------------


def recorded(rank: int, ranks: int, cases: list[Case]) -> list[tuple[Any, ...]]:
    """What runs sent and hold, on this rank, with what their placements plan."""
    found = []
    for case in cases:
        run = train(case, rank, ranks)
        own = run.preconditioner
        found.append((own.placement, own.traffic(), own.memory_usage()))
        own.close()
    return found


PLANNED = ("kfac comm", "kfac mem clips", "kfac hybrid clips", "kfac sharded", "own soap-muon")


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.thorough])]
)
def test_plans_are_what_is_sent_and_held(ranks: int) -> None:
    cases = {name: replace(CASES[name], end=3) for name in (*PLANNED, "in copies")}
    if ranks == 2:
        del cases["in copies"]
    results = run_ranks(recorded, ranks, list(cases.values()))
    for rank, own in enumerate(results):
        for (name, case), (placement, traffic, memory) in zip(cases.items(), own, strict=True):
            used = [work.name for work in placement.work if not work.name.startswith("unused")]
            clips = [k.removesuffix("_clip") for k in ("kl_clip", "norm_clip") if k in case.options]
            plan = planned(placement, rank, 3, (1, 2), used, clips=clips)
            assert traffic == plan, (name, rank)
            assert memory == placement.memory(rank, used=used), (name, rank)


def test_a_gradient_goes_to_its_worker_and_the_direction_back_to_the_shards() -> None:
    """By hand: of each gradient what its worker lacks, there and back, and nothing else."""
    case = CASES["kfac mem"]
    by_rank = run_ranks(recorded, 2, [case])
    each = [traffic for ((_, traffic, _),) in by_rank]
    placement = by_rank[0][0][0]
    shapes = {work.name: work.shards for work in placement.work}
    lacked = [0, 0]
    for block in placement.blocks:
        if not block.block.startswith("unused"):
            (worker,) = block.gradient_workers
            for shards in shapes[block.block]:
                rows = shards.shape[0]
                other = rows - -(-rows // 2) if worker == 0 else -(-rows // 2)
                lacked[worker] += shards.whole // rows * other
    for traffic in each:
        for phase in ("gradients", "exchange"):
            # A rank gives what the other worker lacks and takes what it lacks itself.
            assert traffic[phase] == {"bytes": case.end * 8 * sum(lacked), "calls": case.end}, phase


# -- one at a time ---------------------------------------------------------------------------------


def where_shards_are(rank: int, ranks: int) -> None:
    whole_mesh = init_device_mesh("cpu", (ranks,))
    where_they_are(rank, ranks, whole_mesh)
    if ranks % 2 == 0:
        shape, names = (2, ranks // 2), ("copies", "rows")
        where_they_are(rank, ranks, init_device_mesh("cpu", shape, mesh_dim_names=names))


def where_they_are(rank: int, ranks: int, mesh: DeviceMesh) -> None:
    model = nn.ParameterList([torch.zeros(n, 2) for n in range(1, 11)])
    fully_shard(model, mesh=mesh)
    for parameter in model:
        found = dtensors.shards(parameter, tuple(range(ranks)))
        assert found is not None
        whole = torch.arange(float(parameter.numel())).view(parameter.shape)
        expected = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        assert torch.equal(found.part(whole, rank), expected.to_local())
        assert all(
            sum(found.numel(r) for r in range(ranks) if found.copies[r] == copy) == found.whole
            for copy in set(found.copies)
        )


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.thorough), 4])
def test_shards_are_torchs(ranks: int) -> None:
    """For any number of rows, more than there are ranks and fewer; and in copies."""
    run_ranks(where_shards_are, ranks)


def first_window(rank: int, ranks: int) -> list[float]:
    run = Run(Case(when="after", options=MEM), rank, ranks)
    run.step(0)
    return [block.mass for block in run.preconditioner.blocks]


def test_the_first_window_of_a_model_that_is_sharded_later(by_function: Found) -> None:
    for masses in by_function["first_window"]:
        assert sum(mass > 0 for mass in masses) == len(masses) - 1  # one layer is not used


class Endless(KFAC):
    """Makes directions of the first layer that are not finite."""

    def direct(self, given: Given) -> Direction:
        direction = super().direct(given)
        if given.updates == 1 and given.incoming.shape[1] == 3:
            return Direction(direction.matrix * float("inf"), direction.state)
        return direction


def endless(rank: int, ranks: int) -> tuple[int, dict[str, Tensor]]:
    options = {**MEM, **LARGE, "damping": 1e-13}  # so small that directions are looked at
    run = Run(Case(method=Endless(), options=options), rank, ranks)
    for step in range(2):
        run.step(step)
    assert not run.preconditioner.updated
    return run.preconditioner.counters["skipped_updates"], weights(run.model)


def test_a_direction_that_is_not_finite(by_function: Found) -> None:
    """One rank makes it, and all leave the step out."""
    results = by_function["endless"]
    for skipped, found in results:
        assert skipped == 1
        assert all(torch.equal(found[name], results[0][1][name]) for name in found)


def train_scaled(rank: int, ranks: int, *, sharded: bool = True) -> tuple[Any, ...]:
    """Under a GradScaler, with an overflow in one rank's part."""
    model = make_net()
    if sharded:
        shard(model, Case(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    options = {**MEM, "kl_clip": 1e-3, "damping": 0.1, "layers": "all"}
    own = soframe.Preconditioner(
        model,
        optimizer=optimizer,
        grad_scaler=scaler,
        statistics_every=1,
        solve_every=2,
        **grouped(options),
    )
    for step in range(5):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        loss = 0.5 * (model(tokens[mine]) - targets[mine]).square().sum(1).mean()
        scaler.scale(loss).backward()
        if step == 2 and rank == 0:
            gradient = own.home.read(model.head.weight)
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        own.step()
        scaler.step(optimizer)
        scaler.update()
    own.close()
    return weights(model), scaler.get_scale(), own.counters


def test_a_scaler_sees_an_overflow_in_any_part(by_function: Found) -> None:
    expected, scale, counters = train_scaled(0, 1, sharded=False)
    assert scale == 512.0
    assert counters["skipped_updates"] == 1
    for found, *others in by_function["train_scaled"]:
        assert others == [scale, counters]
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def again(rank: int, ranks: int, *, sharded: bool = True) -> dict[str, Tensor]:
    run = Run(Case(options=MEM), rank, ranks, sharded=sharded)
    run.backward(0)
    run.preconditioner.step()
    run.preconditioner.damp(dict.fromkeys((b.name for b in run.preconditioner.blocks), 0.5))
    run.preconditioner.propose()
    return {n: whole(p.grad) for n, p in run.model.named_parameters() if p.grad is not None}


def test_preconditioning_again(by_function: Found) -> None:
    expected = again(0, 1, sharded=False)
    for found in by_function["again"]:
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def told(rank: int, ranks: int, *, sharded: bool = True) -> dict[str, Any]:
    run = Run(Case(options={**MEM, "kl_clip": 1e-4}), rank, ranks, sharded=sharded)
    run.preconditioner.measure(norms=True)
    for step in range(2):
        run.step(step)
    return run.preconditioner.metrics(all_ranks=ranks > 1)


def test_metrics(by_function: Found) -> None:
    """Clips and the norms of gradients are those of whole ones; norms of parts are not told."""
    expected = told(0, 1, sharded=False)
    for found in by_function["told"]:
        assert found["kl_clip_factor"] == pytest.approx(expected["kl_clip_factor"], rel=1e-9)
        for name, block in expected["blocks"].items():
            own = found["blocks"][name]
            if block["gradient_norm"] is not None:
                assert own["gradient_norm"] == pytest.approx(block["gradient_norm"], rel=1e-9)
            assert own["direction_norm"] is None
            assert own["weight_norm"] is None
