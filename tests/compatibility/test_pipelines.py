"""Under a pipeline ranks train as one process does with the whole model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import parallelize_module

import soframe
from soframe import checkpoint
from soframe.comm import TorchDistributed
from soframe.parallel import pipeline
from soframe.settings import grouped
from soframe.state.checksums import seal
from tests.compatibility.kit import assert_rounded, require_refused
from tests.compatibility.pipelined import (
    BATCHES,
    PLAN,
    SAMPLES,
    WIDTH,
    Case,
    Part,
    Run,
    alone,
    batch,
    load,
    loss_of,
    make_net,
    shared,
    together,
    train,
    weights,
)
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

KL = {"kl_clip": 1e-4}
MEM = {**KL, "strategy": "mem-opt"}
BALL = {"constraint": "hyperball", "weight_decay": 0.0}
SQUARE = {r"layers.[13].linear": "soap"}
"""Where gradients have a full rank, so that rounding picks no basis."""

PASSES: dict[str, Case] = {  # schedules, micro-batches and clips
    "gpipe": Case(schedule="gpipe"),
    "1f1b kl": Case(options=KL),
    "kl rates": Case(options=KL, rates=True, checkpoints=True),
    "norm": Case(options={"norm_clip": 1e-2}, rates=True),
    "interleaved": Case(schedule="interleaved"),
    "interleaved kl": Case(schedule="interleaved", options=KL),
    "looped": Case(schedule="looped", checkpoints=True),
    "bf16": Case(options=KL, bf16=True),
    "interleaved bf16": Case(schedule="interleaved", bf16=True),
    "loss divided": Case(schedule="interleaved", options=KL, scales=False),
    "global": Case(options={**KL, "loss_average": "global"}),
    "rare": Case(rare=True, options={"skip": ["layers.1"]}),
    "rare divided": Case(rare=True, scales=False, options={"skip": ["layers.1"]}),
}
TROUBLE: dict[str, Case] = {  # what goes wrong, or changes, on one stage
    "loss": Case(trouble="loss", options=KL),
    "gradient": Case(trouble="gradient", options=KL),
    "direction": Case(trouble="direction"),
    "first gradient": Case(trouble="first gradient", options={"statistics_every": 3}),
    "frozen": Case(trouble="frozen", options=KL),
    "no block": Case(trouble="gradient", options={**KL, "skip": [r"layers\.[01]"]}),
    "thawed": Case(trouble="thawed", options={**KL, "statistics_every": 4}, end=6),
    "no block at first": Case(
        trouble="thawed", options={**KL, "statistics_every": 4, "skip": [r"layers\.1"]}, end=6
    ),
    "owed": Case(trouble="gradient", options={**KL, "skip": [r"layers\.[01]"]}, end=3),
}
METHODS: dict[str, Case] = {
    "ekfac": Case(method="ekfac", options=KL),
    "foof": Case(method="foof", options={**KL, "fisher": "forward-only"}),
    "background": Case(options={**KL, "background": 1}),
    "own kfac": Case(owner="own", options=KL),
    "own ball": Case(owner="own", method="muon", options=BALL),
    "own muon": Case(owner="own", method="muon"),
    "own muon interleaved": Case(owner="own", method="muon", schedule="interleaved"),
    "own soap halves": Case(owner="own", method=SQUARE, schedule="zero bubble", checkpoints=True),
    "halves": Case(
        method="shampoo",
        schedule="zero bubble",
        rates=True,
        trouble="gradient",
    ),
    "own muon halves bf16": Case(owner="own", method="muon", schedule="zero bubble", bf16=True),
    "own adamw": Case(owner="own", method="adamw", schedule="gpipe"),
}
COPIES: dict[str, Case] = {  # two of each stage, on four ranks; or four stages
    "kl": Case(options=KL),
    "mem": Case(options=MEM, trouble="gradient", checkpoints=True),
    "interleaved sharded": Case(schedule="interleaved", options={**KL, "strategy": "sharded"}),
    "local": Case(averaged="local", options=MEM, trouble="loss"),
    "frozen": Case(options={"norm_clip": 1e-2, "strategy": "mem-opt"}, trouble="frozen"),
    "ddp": Case(averaged="ddp", options=MEM),
    "fully_shard": Case(averaged="fully_shard", options=MEM),
    "own muon": Case(owner="own", method="muon", options={"strategy": "sharded"}),
    "own muon shards": Case(owner="own", method="muon", averaged="fully_shard"),
    "bf16": Case(averaged="ddp", options=MEM, bf16=True),
    "four stages": Case(pipe=4, options=KL),
    "cut": Case(tensor=2, options=MEM, trouble="gradient", checkpoints=True),
    "cut interleaved": Case(tensor=2, schedule="interleaved", options=KL),
    "cut bf16": Case(tensor=2, options=KL, bf16=True),
    "own muon cut": Case(tensor=2, owner="own", method="muon", options={"strategy": "mem-opt"}),
}

TWO = {**PASSES, **TROUBLE, **METHODS}

OFTEN = (
    *("kl rates", "norm", "looped", "interleaved bf16", "global", "rare"),
    *("loss", "direction", "frozen", "no block", "thawed", "owed"),
    *("foof", "own ball", "own muon interleaved", "halves", "own adamw"),
)
"""Cases that `make test` runs, besides those that go on or are looked at below."""

Result = tuple[dict[str, Tensor], dict[str, int]]


def train_all(rank: int, ranks: int, cases: list[Case]) -> list[Result]:
    found = []
    for case in cases:
        run = train(case, ranks, case.copies(ranks))
        run.preconditioner.close()
        found.append((weights(run.model), told(run)))
        del run
        gc.collect()
    return found


def told(run: Run) -> dict[str, int]:
    """What a run says of what went wrong."""
    own = run.preconditioner
    return {**own.counters, "owed": own.state_dict()["owed_statistics"]}


def assert_same(results: list[Result], case: Case, copies: int, what: str) -> None:
    reference = alone(replace(case, state=None, begin=0), copies)
    expected, start = weights(reference.model), weights(make_net())
    assert set(together([found for found, _ in results])) == set(expected)
    for found, counters in results:
        assert counters == told(reference), what
        if case.bf16:
            assert_rounded(found, expected, start, what)
            continue
        for name, weight in found.items():
            where = f"{what}, {name}"
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=where)
            assert not torch.equal(weight, start[name]), where


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, {name: TWO[name] for name in OFTEN}, id="often"),
        pytest.param(
            2,
            {name: case for name, case in TWO.items() if name not in OFTEN},
            id="rest",
            marks=[pytest.mark.slow, pytest.mark.thorough],
        ),
        pytest.param(4, COPIES, id="copies", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_ranks_are_one_process(ranks: int, cases: dict[str, Case]) -> None:
    results = run_ranks(train_all, ranks, list(cases.values()), timeout=150)
    for index, (name, case) in enumerate(cases.items()):
        assert_same([own[index] for own in results], case, case.copies(ranks), name)


def test_the_cases_are_not_all_one() -> None:
    """The reference tells clips, rare layers and bad batches apart, so equality means something."""
    pairs = [
        ("gpipe", "1f1b kl"),
        ("gpipe", "norm"),
        ("gpipe", "rare"),
        ("1f1b kl", "loss"),
        ("gpipe", "direction"),
        ("1f1b kl", "frozen"),
        ("1f1b kl", "ekfac"),
        ("own muon", "own adamw"),
    ]
    skip = ("loss", "gradient", "direction", "first gradient", "no block")
    runs = {name: alone(TWO[name]) for name in {*(name for pair in pairs for name in pair), *skip}}
    for one, other in pairs:
        first, second = weights(runs[one].model), weights(runs[other].model)
        assert max(float((first[n] - second[n]).abs().max()) for n in first) > 1e-4, (one, other)
    for name in skip:
        assert runs[name].preconditioner.counters["skipped_updates"] == 1, name


# -- pipelines of another kind ---------------------------------------------------------------------


def by_hand(rank: int, ranks: int) -> Result:
    """All forward passes, then all backward passes, between two ranks."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    run = Run(replace(TWO["1f1b kl"], scales=False), ranks)
    run.preconditioner.close()
    model = run.model
    del run
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    settings: dict[str, Any] = {"damping": 0.1, "statistics_every": 1, "solve_every": 2, **KL}
    own = soframe.Preconditioner(
        model, optimizer=optimizer, **grouped({"pipeline": mesh["pp"], **settings})
    )
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = (part.chunk(BATCHES) for part in batch(step, 0))
        between = [torch.empty(len(x), WIDTH).double() for x in inputs]
        if rank == 0:
            outputs = [model(x) for x in inputs]
            for output in outputs:
                dist.send(output.detach(), 1)
            for output, gradient in zip(outputs, between, strict=True):
                dist.recv(gradient, 1)
                output.backward(gradient)
        else:
            for x in between:
                dist.recv(x, 0)
            losses = [
                shared(model(x.requires_grad_()), y) for x, y in zip(between, targets, strict=True)
            ]
            for loss, x in zip(losses, between, strict=True):
                loss.backward()
                assert x.grad is not None
                dist.send(x.grad, 0)
        own.step()
        optimizer.step()
    return weights(model), {**own.counters, "owed": own.state_dict()["owed_statistics"]}


def test_a_pipeline_by_hand() -> None:
    assert_same(run_ranks(by_hand, 2), TWO["1f1b kl"], 1, "by hand")


class Table(nn.Module):
    """Tokens and their positions, whose table is called without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(5, WIDTH), nn.Embedding(3, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return found


def mean_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(2).mean()


def factors_of_a_table(rank: int, ranks: int) -> dict[str, Any]:
    """The factors after a step, of a model whose table is a stage; on one process without ranks."""
    torch.manual_seed(0)
    layers = {"0": Table(), **{str(n): nn.Linear(WIDTH, WIDTH) for n in range(1, 4)}}
    net = Part(layers).double()
    x, y = torch.randint(5, (SAMPLES, 3)), torch.randn(SAMPLES, 3, WIDTH, dtype=torch.float64)
    settings: dict[str, Any] = {
        "layers": "all",
        "statistics": soframe.Statistics(samples="positions"),
        "damping": 0.1,
    }
    if ranks == 0:
        own = soframe.Preconditioner(net, kl_clip=None, **settings)
        for x_, y_ in zip(x.chunk(BATCHES), y.chunk(BATCHES), strict=True):
            (mean_of_squares(net(x_), y_) / BATCHES).backward()
    else:
        modules = {n: Part({str(n): layers[str(n)]}) for n in range(rank, 4, ranks)}
        stages = [PipelineStage(m, n, 4, torch.device("cpu")) for n, m in modules.items()]
        schedule = ScheduleInterleaved1F1B(stages, BATCHES, mean_of_squares)
        mine = Part({str(n): layers[str(n)] for n in modules})
        distribution = soframe.Distribution(pipeline=schedule)
        own = soframe.Preconditioner(mine, kl_clip=None, distribution=distribution, **settings)
        schedule.step(*([x] if rank == 0 else ()), **({"target": y} if rank == 1 else {}))
    own.step()
    blocks = own.state_dict()["blocks"]
    own.close()
    return {f"{n}.{f}": t for n, b in blocks.items() for f, t in b["factors"].items()}


def test_a_stage_sees_the_batch_itself() -> None:
    expected = factors_of_a_table(0, 0)
    found = together(run_ranks(factors_of_a_table, 2))
    assert set(found) == set(expected)
    for name, factor in found.items():
        torch.testing.assert_close(factor, expected[name], rtol=1e-9, atol=1e-12, msg=name)


# -- states ----------------------------------------------------------------------------------------


def go_on(rank: int, ranks: int, cases: list[Case], folder: str) -> list[Any]:
    """Save after three steps and go on: from what each rank has, and from a sharded checkpoint."""
    found: list[Any] = []
    for number, case in enumerate(cases):
        copies = case.copies(ranks)
        run = train(replace(case, end=3), ranks, copies)
        state = run.state()
        where = Path(folder) / str(number)
        checkpoint.save(where, {"own": checkpoint.part(run.preconditioner)}, sharded=True)
        run.preconditioner.close()
        again = Run(replace(case, begin=3, state=state), ranks, copies)
        again.step(3)
        again.preconditioner.close()
        results = [(weights(again.model), told(again))]
        plain = Run(replace(case, begin=3), ranks, copies)
        load(plain.model, state["model"])
        checkpoint.load(plain.preconditioner, checkpoint.latest(where), key="own")
        if case.owner == "sgd":
            plain.step(3)
            results.append((weights(plain.model), told(plain)))
        plain.preconditioner.close()
        found.append((state, results))
    return found


def test_a_run_goes_on(tmp_path: Path) -> None:
    """In the middle of an interval: as it was cut, as a whole, and cut otherwise."""
    cases = [TWO["interleaved kl"], TWO["own muon"], TWO["own soap halves"]]
    found = run_ranks(go_on, 2, cases, str(tmp_path))
    for index, case in enumerate(cases):
        for way in range(2 if case.owner == "sgd" else 1):
            assert_same([own[index][1][way] for own in found], case, 1, f"{case.method} {way}")
    case = cases[0]
    states = [own[0][0] for own in found]
    whole = {
        "model": together([state["model"] for state in states]),
        "own": checkpoint.merge(state["own"] for state in states),
    }
    run = train(replace(case, begin=3, state=whole))
    assert_same([(weights(run.model), told(run))], case, 1, "whole")
    plain = alone(replace(case, end=3)).state()
    assert whole["own"]["history"] == plain["own"]["history"]
    for state in (whole, plain):
        state.pop("optimizer", None)
        rest = replace(TWO["1f1b kl"], begin=3, state=state)
        assert_same([own[0] for own in run_ranks(train_all, 2, [rest])], case, 1, "cut otherwise")
    with pytest.raises(ValueError, match="have blocks of the name"):
        checkpoint.merge([states[0]["own"], states[0]["own"]])
    # Blocks that wait for statistics of new bases are those of all stages.
    late = [seal({**one["own"], "late": [next(iter(one["own"]["blocks"]))]}) for one in states]
    assert checkpoint.merge(late)["late"] == [one["late"][0] for one in late]
    assert checkpoint.merge(late[:1])["blocks"] == late[0]["blocks"]  # of a pipeline of one stage
    # Stages skip the same updates, and solve blocks of their own.
    counters = {**states[0]["own"]["counters"], "skipped_updates": 2, "failed_solves": 1}
    counted = [seal({**state["own"], "counters": counters}) for state in states]
    merged = checkpoint.merge(counted)["counters"]
    assert (merged["skipped_updates"], merged["failed_solves"]) == (2, 2)
    for of_no_stage in ([whole["own"]], [states[0]["own"], whole["own"]]):
        with pytest.raises(ValueError, match="takes the states of the stages"):
            checkpoint.merge(of_no_stage)


@pytest.mark.slow
@pytest.mark.thorough
def test_copies_go_on(tmp_path: Path) -> None:
    """Each copy of a stage from its state, of which it holds a part; and one process from all."""
    cases = {2: Case(options=MEM), 1: Case(options=MEM, tensor=2)}
    found = run_ranks(go_on, 4, list(cases.values()), str(tmp_path))
    for index, (copies, case) in enumerate(cases.items()):
        for way in range(2):
            results = [own[index][1][way] for own in found]
            assert_same(results, case, copies, f"copies {way}")
        states = [found[rank][index][0] for rank in (0, case.tensor)]  # of each stage
        whole = {
            "model": together([state["model"] for state in states]),
            "own": checkpoint.merge(state["own"] for state in states),
        }
        options = {**case.options, "strategy": "comm-opt"}
        run = train(replace(case, begin=3, state=whole, options=options), copies=copies)
        assert_same([(weights(run.model), told(run))], case, copies, "whole")


# -- what travels ----------------------------------------------------------------------------------


def recorded(rank: int, ranks: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    run = train(TWO["1f1b kl"], ranks)
    before = run.preconditioner.traffic()
    run.step(4)
    clipped = run.preconditioner.metrics()["kl_clip_factor"]
    return before, run.preconditioner.traffic(), clipped


def test_what_stages_tell_each_other() -> None:
    """Twelve numbers, whether anything is wrong, and the sum of the KL clip."""
    expected = alone(replace(TWO["1f1b kl"], end=5)).preconditioner.metrics()["kl_clip_factor"]
    for before, after, clipped in run_ranks(recorded, 2):
        assert set(after) == {"stages", "total"}
        assert after["stages"] == after["total"]
        assert after["stages"]["bytes"] - before["stages"]["bytes"] == 2 * (12 * 8 + 4 + 8)
        assert after["stages"]["calls"] - before["stages"]["calls"] == 3
        assert clipped == pytest.approx(expected, rel=1e-9)
        assert clipped < 1


# -- what is refused -------------------------------------------------------------------------------


def stage_of(rank: int, ranks: int, **settings: Any) -> tuple[nn.Module, Any]:
    """A stage of a linear layer, and its schedule."""
    model = nn.Linear(WIDTH, WIDTH).double()
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    return model, Schedule1F1B(stage, n_microbatches=BATCHES, loss_fn=loss_of, **settings)


def run_once(rank: int, schedule: Any, step: int = 0) -> None:
    inputs, targets = batch(step, 0)
    schedule.step(*((inputs,) if rank == 0 else ()), **({"target": targets} if rank else {}))


def stages_without(rank: int, ranks: int) -> None:
    """No schedule to be seen, and every rank another model."""
    soframe.Preconditioner(nn.Linear(4 + rank, 4), kl_clip=None)


def copies_of_all(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule, backend="torch")
    )


def copies_unknown(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "pp"))
    soframe.Preconditioner(
        nn.Linear(2, 2), kl_clip=None, distribution=soframe.Distribution(pipeline=mesh["pp"])
    )


def plan_alone(rank: int, ranks: int) -> None:
    """The ranks of a plan are not among those that are said to have copies of a stage."""
    names = ("dp", "pp", "tp")
    mesh = init_device_mesh("cpu", (1, 2, ranks // 2), mesh_dim_names=names)
    model, group = make_net(), mesh.get_group("pp")
    parallelize_module(model, mesh["tp"], PLAN)
    stage = PipelineStage(model, mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=BATCHES, loss_fn=loss_of)
    copies = TorchDistributed(mesh.get_group("dp"))
    soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule, backend=copies)
    )


def mesh_of_two(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "pp"))
    soframe.Preconditioner(
        nn.Linear(2, 2), kl_clip=None, distribution=soframe.Distribution(pipeline=mesh)
    )


def no_pipeline(rank: int, ranks: int) -> None:
    soframe.Preconditioner(
        nn.Linear(2, 2), kl_clip=None, distribution=soframe.Distribution(pipeline="pp")
    )


def halves(rank: int, ranks: int) -> None:
    Run(Case(schedule="zero bubble"), ranks)


def drawn(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    settings: dict[str, Any] = {"fisher": "type-2", "loss": "squared-error"}
    soframe.Preconditioner(model, kl_clip=None, **grouped({"pipeline": schedule, **settings}))


def scaled(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    scaler = torch.amp.GradScaler("cpu")
    soframe.Preconditioner(
        model,
        kl_clip=None,
        distribution=soframe.Distribution(pipeline=schedule),
        grad_scaler=scaler,
    )


def other_module(rank: int, ranks: int) -> None:
    _, schedule = stage_of(rank, ranks)
    soframe.Preconditioner(
        nn.Linear(2, 2), kl_clip=None, distribution=soframe.Distribution(pipeline=schedule)
    )


def part_of_stages(rank: int, ranks: int) -> None:
    run = Run(Case(schedule="interleaved"), ranks)
    run.preconditioner.close()
    soframe.Preconditioner(
        run.model.get_submodule(f"layers.{rank}"),
        kl_clip=None,
        distribution=soframe.Distribution(pipeline=run.schedule),
    )


def counted(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule)
    ).count(4)


def trust_region(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    soframe.TrustRegion(model, "mse", distribution=soframe.Distribution(pipeline=schedule))


def nothing_at_all(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule), skip=[""]
    )


def twice(rank: int, ranks: int) -> None:
    """The schedule divides what it has divided already."""
    model, schedule = stage_of(rank, ranks)
    own = soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule)
    )
    run_once(rank, schedule)
    run_once(rank, schedule, 1)
    own.step()


def other_settings(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    soframe.Preconditioner(
        model,
        kl_clip=None,
        distribution=soframe.Distribution(pipeline=schedule),
        damping=0.1 + rank,
    )


def fails_to_start(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    soframe.Preconditioner(
        model,
        kl_clip=None,
        distribution=soframe.Distribution(pipeline=schedule),
        statistics_every=0 if rank == 1 else 1,
    )


def fails_to_register(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    own = [torch.zeros(1)] if rank == 1 else list(model.parameters())
    optimizer = torch.optim.SGD(own, lr=0.1)
    soframe.Preconditioner(
        model,
        kl_clip=None,
        distribution=soframe.Distribution(pipeline=schedule),
        optimizer=optimizer,
    )


def fails_in_a_step(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)

    def damping(step: int) -> float:
        if rank == 1 and step == 1:
            raise ArithmeticError("no damping on the second stage")
        return 0.1

    own = soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule), damping=damping
    )
    for step in range(2):
        model.zero_grad()
        run_once(rank, schedule, step)
        own.step()


def no_effect(rank: int, ranks: int) -> None:
    """One stage's gradients are gone before the step."""
    model, schedule = stage_of(rank, ranks)
    own = soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule)
    )
    run_once(rank, schedule)
    if rank == 1:
        model.zero_grad()
    own.step()


def nothing_to_keep(rank: int, ranks: int) -> None:
    """One stage's matrix has no norm that a constraint could keep."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    if rank == 0:
        nn.init.zeros_(model[0].weight)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=BATCHES, loss_fn=loss_of)
    soframe.Optimizer(
        model,
        "muon",
        lr=0.1,
        constraint="hyperball",
        distribution=soframe.Distribution(pipeline=schedule),
    )


def other_samples(rank: int, ranks: int) -> None:
    """One stage sees positions as samples, and nobody says what the loss is a mean over."""

    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x.flatten(0, 1) if rank == 0 else x)
            return out

    model = Reshaped().double()
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=lambda out, y: out.square().mean())
    own = soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule)
    )
    inputs = torch.ones(4, 2, WIDTH).double()
    schedule.step(*((inputs,) if rank == 0 else ()), **({"target": inputs} if rank else {}))
    own.step()


def other_samples_on_both(rank: int, ranks: int) -> None:
    """The first stage of each rank sees fewer samples than its second one."""

    def stage(number: int) -> nn.Module:
        flat = [nn.Flatten(0, 1)] if number == 1 else []
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *flat).double()

    modules = {n: stage(n) for n in range(rank, 4, ranks)}
    stages = [PipelineStage(m, n, 4, torch.device("cpu")) for n, m in modules.items()]
    schedule = ScheduleInterleaved1F1B(stages, 2, lambda out, y: out.square().mean())
    own = soframe.Preconditioner(
        nn.ModuleDict({str(n): module for n, module in modules.items()}),
        kl_clip=None,
        distribution=soframe.Distribution(pipeline=schedule),
    )
    inputs = torch.ones(4, 2, WIDTH).double()
    schedule.step(*((inputs,) if rank == 0 else ()), **({"target": inputs} if rank else {}))
    own.step()


def other_stage(rank: int, ranks: int) -> None:
    """Every rank loads what the first one has saved."""
    model, schedule = stage_of(rank, ranks)
    own = soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule)
    )
    run_once(rank, schedule)
    own.step()
    states = [None] * ranks
    dist.all_gather_object(states, own.state_dict())
    own.load_state_dict(states[0])  # type: ignore[arg-type]


def same_names(rank: int, ranks: int) -> None:
    model, schedule = stage_of(rank, ranks)
    own = soframe.Preconditioner(
        model, kl_clip=None, distribution=soframe.Distribution(pipeline=schedule)
    )
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    alone = soframe.Preconditioner(
        whole, kl_clip=None, distribution=soframe.Distribution(backend="single")
    )
    own.load_state_dict(alone.state_dict())


REFUSED: list[tuple[Callable[[int, int], None], str]] = [
    (stages_without, r"placement of rank\(s\) \[1\] differs .* pass Distribution\(pipeline="),
    (copies_of_all, r"ranks \[0, 1\] are copies of one stage, .* pass .*backend="),
    (mesh_of_two, r"such as mesh\['pp'\], not a mesh of 2 dimensions"),
    (no_pipeline, "pipeline must be a schedule of torch.distributed.pipelining"),
    (halves, "zero bubble.* choose ScheduleGPipe"),
    (drawn, "with pipeline= pass .*fisher='empirical'"),
    (scaled, "a GradScaler sees what is not finite on its own stage alone"),
    (other_module, "is in no stage that the schedule"),
    (part_of_stages, "is not in the given model: build one Preconditioner"),
    (counted, r"count\(\) applies to the next forward pass"),
    (trust_region, "TrustRegion takes no pipeline="),
    (nothing_at_all, "nothing to precondition in any stage"),
    (twice, r"8 backward passes .* call its step\(\) once for each step"),
    (other_settings, r"settings of rank\(s\) \[1\] differ"),
    (fails_to_start, "statistics_every"),
    (fails_to_register, "is not in the given optimizer"),
    (fails_in_a_step, "no damping on the second stage"),
    (no_effect, "statistics without gradients"),
    (nothing_to_keep, "constraint='hyperball' keeps the norm of 0.weight, which is zero"),
    (other_samples, r"different numbers of samples \(4, 8\)"),
    (other_samples_on_both, r"different numbers of samples \(4, 8\)"),
    (other_stage, "state is that of stages 0 of 2|could not load the state"),
    (same_names, "have blocks of the same names"),
]


def test_what_is_refused() -> None:
    require_refused(REFUSED, 2)


def which_split(rank: int, ranks: int) -> dict[str, bool]:
    """Whether each schedule of torch takes the gradients of inputs and of weights apart."""
    found = {}
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", *HALVES):
        mine = (rank, 2 * ranks - 1 - rank if name in FOLDED else ranks + rank)
        one = name in ("GPipe", "1F1B")
        count = ranks if one else 2 * ranks
        stages = [
            PipelineStage(nn.Linear(2, 2), index, count, torch.device("cpu"))
            for index in mine[: 1 if one else 2]
        ]
        schedule = get_schedule_class(name)(stages[0] if one else stages, BATCHES, loss_fn=loss_of)
        found[name] = pipeline._splits(schedule)
    return found


FOLDED = ("ZBVZeroBubble", "DualPipeV")
HALVES = ("InterleavedZeroBubble", *FOLDED)


def test_which_schedules_take_halves() -> None:
    for found in run_ranks(which_split, 2):
        assert [name for name, split in found.items() if split] == list(HALVES)


def copies_apart(rank: int, ranks: int) -> None:
    """A copy of one stage cannot take the step, so no copy of any stage does."""
    run = Run(Case(averaged="local"), ranks, ranks // 2)
    run.step(0)
    if rank == 3:
        run.model.get_submodule("layers.2.linear").requires_grad_(False)
    run.step(1)


@pytest.mark.slow
def test_what_copies_are_refused() -> None:
    unknown = "others may have copies of them: pass .*backend="
    apart = "frozen, thawed or replaced on 1 of 2 ranks"
    table = [
        (copies_unknown, unknown),
        (copies_apart, apart),
        (plan_alone, "it is sharded over the ranks .* be dimensions of one mesh"),
    ]
    require_refused(table, 4)
