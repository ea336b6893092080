"""Under DeepSpeed's ZeRO, stages 1 to 3, ranks train as one process does with all samples."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import soframe
from soframe import available
from soframe.comm import shards
from soframe.integrations.deepspeed import DeepSpeedPreconditioner
from soframe.settings import grouped
from soframe.strategies import work
from soframe.strategies.placement import Placement
from tests.compatibility.fully_sharded import SAMPLES, Net, make_net, weights
from tests.compatibility.kit import assert_rounded
from tests.compatibility.partitioned import (
    FIRST,
    STEPS,
    Case,
    alone,
    assert_same,
    base,
    freeze,
    losses,
    net,
    settings_of,
)
from tests.distributed.harness import run_ranks
from tests.distributed.test_plans import planned
from tests.integrations.kit import as_launched

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CLIPS = {"kl_clip": 2e-4, "norm_clip": 0.03}
MEM = {"strategy": "mem-opt"}
CUT = {"stage3_param_persistence_threshold": 0}


CASES: dict[str, Case] = {
    **{
        f"{stage} {when} {strategy}": Case(stage, when, options={"strategy": strategy, **CLIPS})
        for stage, when, strategy in (
            (1, "after", "mem-opt"),
            (1, "after", "comm-opt"),
            (2, "after", "comm-opt"),
            (2, "after", "mem-opt"),
            (2, "hook", "sharded"),
        )
    },
    "1 passes": Case(1, "hook", options=MEM, passes=3),
    "2 passes": Case(2, "hook", options=MEM, passes=2),
    "2 more passes": Case(2, "after", options=MEM, passes=3),
    "1 rates": Case(1, options={**MEM, **CLIPS}, groups=True),
    "2 rates": Case(2, "after", options={**MEM, **CLIPS}, groups=True),
    "2 spoilt": Case(2, options=MEM, spoilt=2),
    "1 frozen": Case(1, options=MEM, frozen=(2, 4), momentum=0.0),
    "2 clipped": Case(2, "hook", options=MEM, clip=0.05),
    # Parameters that are cut too: as small ones are not by default.
    "3 before": Case(3, "before", options={**MEM, **CLIPS}, zero=CUT),
    "3 after": Case(3, "after", options={**CLIPS, "strategy": "comm-opt"}, zero=CUT),
    "3 hook": Case(3, "hook", options={**CLIPS, "strategy": "sharded"}, zero=CUT),
    "3 whole": Case(3, "hook", options=MEM),
    "3 passes": Case(3, "hook", options=MEM, passes=2, zero=CUT),
    "3 rates": Case(3, options={**MEM, **CLIPS}, groups=True, zero=CUT),
    "3 rates, before": Case(3, "before", options={**MEM, **CLIPS}, groups=True, zero=CUT),
    "3 spoilt": Case(3, options=MEM, spoilt=2, zero=CUT),
    "3 frozen": Case(3, options=MEM, frozen=(2, 4), momentum=0.0, zero=CUT),
    "3 frozen first": Case(3, "before", options=MEM, frozen=(FIRST, STEPS), zero=CUT),
    "2 frozen first": Case(2, "after", options=MEM, frozen=(FIRST, STEPS)),
    "3 clipped": Case(3, "hook", options=MEM, clip=0.05, zero=CUT),
    "3 overlapped": Case(3, "hook", options=MEM, zero={**CUT, "overlap_comm": True}),
    "3 in small groups": Case(
        3, options=MEM, groups=True, zero={**CUT, "sub_group_size": 40, "reduce_bucket_size": 50}
    ),
    "1 checkpoints": Case(1, "hook", options=MEM, checkpoints="torch"),
    "2 checkpoints": Case(2, "after", options=MEM, passes=2, checkpoints="deepspeed"),
    "3 checkpoints": Case(3, "hook", options=MEM, zero=CUT, checkpoints="deepspeed"),
    "3 checkpoints, torch's": Case(3, "before", options=MEM, zero=CUT, checkpoints="torch"),
    # Settings of ZeRO by which it lays out, or reduces, otherwise.
    "2 in turns": Case(2, options=MEM, zero={"round_robin_gradients": True}),
    "1 in turns, passes": Case(1, "hook", options=MEM, passes=2, zero={"round_robin_gradients": 1}),
    "2 aligned": Case(2, options=MEM, zero={"parameter_alignment": True}),
    "2 overlapped": Case(2, "hook", options=MEM, passes=2, zero={"overlap_comm": True}),
    "1 all-reduced": Case(1, options=MEM, zero={"reduce_scatter": False}),
    "2 in small buckets": Case(
        2, options=MEM, zero={"reduce_bucket_size": 50, "allgather_bucket_size": 100}
    ),
}
FEW = ("1 after mem-opt", "2 hook sharded", "2 passes", "2 rates", "3 hook", "3 rates")
TOGETHER = 12


def library() -> Any:
    """DeepSpeed, set up for CPUs."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled for a minute
    return deepspeed


def initialize(model: nn.Module, optimizer: Any, case: Case, ranks: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks // case.passes,
        "gradient_accumulation_steps": case.passes,
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage, **case.zero},
        **case.config,
    }
    engine, *_ = library().initialize(model=model, optimizer=optimizer, config=config)
    return engine


def gathered(model: nn.Module) -> Any:
    """A context in which parameters are whole."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def deepspeed_init() -> Any:
    """A context in which models are made in parts."""
    import deepspeed

    return deepspeed.zero.Init()


def compute_anew(model: Net, case: Case) -> list[int]:
    """Compute the layers' activations anew, and return what their numbers are noted in."""
    deepspeed, runs = library(), []
    again: Callable[..., Tensor] = partial(checkpoint, use_reentrant=False)
    if case.checkpoints == "deepspeed":
        deepspeed.init_distributed("gloo")
        deepspeed.checkpointing.configure(None)
        again = deepspeed.checkpointing.checkpoint

    def checkpointed(index: int, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            runs.append(index)
            return forward(x)

        return again(inner, x)

    for index, layer in enumerate(model.layers):
        layer.forward = partial(checkpointed, index, layer.forward)  # type: ignore[method-assign]
    return runs


def train(rank: int, ranks: int, case: Case) -> tuple[dict[str, Tensor], dict[str, int]]:
    found, own = trained(rank, ranks, case)
    return found, own.counters


def trained(rank: int, ranks: int, case: Case) -> tuple[dict[str, Tensor], soframe.Preconditioner]:
    model = net()
    runs = compute_anew(model, case) if case.checkpoints else None
    freeze(model, FIRST, case)
    optimizer = base(model, case)
    hook: DeepSpeedPreconditioner | None = None
    settings = settings_of(case)
    if case.when == "before":
        own = soframe.Preconditioner(model, case.method, optimizer=optimizer, **grouped(settings))
    engine = initialize(model, optimizer, case, ranks)
    if case.when == "after":
        own = soframe.Preconditioner(
            engine, case.method, optimizer=engine.optimizer, **grouped(settings)
        )
    if case.when == "hook":
        hook = DeepSpeedPreconditioner(engine, method=case.method, **grouped(settings))
        own = hook.preconditioner
    for step in range(STEPS):
        freeze(model, step, case)
        for loss in losses(step, case, engine, rank, ranks):
            engine.backward(loss)
            if hook is not None:
                hook.step()
            elif engine.is_gradient_accumulation_boundary():
                own.step()
            engine.step()
    own.close()
    assert runs is None or sorted(runs) == sorted([0, 1] * 2 * STEPS * case.passes)
    with gathered(model):
        found = weights(model)
    engine.destroy()
    return found, own


def train_all(rank: int, ranks: int, cases: list[Case]) -> list[Any]:
    as_launched(rank, ranks)
    return [train(rank, ranks, case) for case in cases]


def groups_on(ranks: int) -> list[tuple[str, ...]]:
    names = list(CASES) if ranks == 2 else list(FEW)
    return [tuple(names[i : i + TOGETHER]) for i in range(0, len(names), TOGETHER)]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(ranks, names) for ranks in (1, 2, 3) for names in groups_on(ranks)],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_ranks_are_one_process(ranks: int, names: tuple[str, ...]) -> None:
    pytest.importorskip("deepspeed")
    results = run_ranks(train_all, ranks, [CASES[name] for name in names], timeout=240)
    for index, name in enumerate(names):
        assert_same([own[index] for own in results], CASES[name], name)


def with_and_without(rank: int, ranks: int, cases: list[Case]) -> list[Any]:
    begin = shards._begin

    def copy(split: shards.Split, own: int) -> None:
        # Products are rounded otherwise where a tensor begins elsewhere in memory.
        assert split.part is not None
        split.part = split.part.clone()
        begin(split, own)

    shards._begin = copy
    work.SMALL = 0  # a batched product may be rounded otherwise than one alone
    as_launched(rank, ranks)
    return [(train(rank, ranks, case)[0], alone(case, rank, ranks)) for case in cases]


def test_every_method_does_what_it_does_with_whole_gradients() -> None:
    """To the bit: of two ranks a sum has one order."""
    pytest.importorskip("deepspeed")
    names = sorted(available("method"))
    cases = [
        Case(1 + index % 3, method=name, options={**strategy, "auxiliary": "adamw"}, zero=CUT)
        for index, name in enumerate(names)
        for strategy in (MEM if index % 3 else {"strategy": "comm-opt"},)
    ]
    for own in run_ranks(with_and_without, 2, cases, timeout=240):
        for name, (found, expected) in zip(names, own, strict=True):
            for key, weight in found.items():
                assert torch.equal(weight, expected[key]), (name, key)


class Mixed(nn.Module):
    """Layers that look at the shapes of their parameters when a gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.ConvTranspose2d(4, 3, 2)
        self.square = nn.LayerNorm((3, 5))
        self.memory = nn.GRU(5, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x)).tanh())
        x = self.square(x.mean(2))
        return self.head(self.memory(x)[0][:, -1])


def train_mixed(rank: int, ranks: int, stage: int | None, when: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"layers": "all", "damping": 0.1, "solve_every": 2}
    options.update(statistics_every=1, kl_clip=None, auxiliary="sgd")
    if stage is not None:
        as_launched(rank, ranks)
    if when == "before":
        own = soframe.Preconditioner(model, lr=0.1, **grouped(options))
    engine: Any = model
    if stage is not None:
        engine = initialize(model, optimizer, Case(stage, zero=CUT), ranks)
    if when == "after":
        own = soframe.Preconditioner(engine, lr=0.1, **grouped(options))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 2, 4, 4, generator=generator)[rank::ranks]
        loss = (engine(x) - x.mean((2, 3))).square().sum(1).mean()
        (loss if stage is None else engine).backward(*() if stage is None else (loss,))
        own.step()
        (optimizer if stage is None else engine).step()
        if stage is None:
            optimizer.zero_grad()
    own.close()
    if stage is None:
        return weights(model)
    with gathered(model):
        return weights(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_kind_of_layer(when: str) -> None:
    pytest.importorskip("deepspeed")
    expected = train_mixed(0, 1, None, "after")
    for found in run_ranks(train_mixed, 2, 3, when):
        for name, weight in found.items():
            assert float((weight - expected[name]).abs().max()) < 2e-6, name


def test_the_cases_are_not_all_one() -> None:
    """The reference tells clips, rates and frozen weights apart, so equality means something."""
    one = Case(options=MEM)
    others = ("2 after mem-opt", "1 rates", "2 spoilt", "2 clipped")
    for first, other in [
        *((one, CASES[name]) for name in others),
        (CASES["2 after mem-opt"], Case(options={**MEM, "kl_clip": 2e-6})),
        (CASES["2 after mem-opt"], Case(options={**MEM, "norm_clip": 0.03})),
        (CASES["2 after mem-opt"], CASES["1 rates"]),
        (CASES["1 frozen"], replace(CASES["1 frozen"], frozen=(-1, -1))),
    ]:
        found, expected = alone(first), alone(other)
        assert max(float((found[n] - expected[n]).abs().max()) for n in found) > 1e-4, other


# -- what travels ----------------------------------------------------------------------------------


def recorded(rank: int, ranks: int, case: Case) -> tuple[Placement, dict[str, Any]]:
    as_launched(rank, ranks)
    own = trained(rank, ranks, case)[1]
    return own.placement, own.traffic()


def test_a_gradient_goes_to_its_worker_and_the_direction_back_to_the_partitions() -> None:
    """What is planned is recorded: of each gradient what its worker lacks, there and back."""
    pytest.importorskip("deepspeed")
    case = Case(options={**MEM, "skip": ["unused"]})
    each = run_ranks(recorded, 2, case)
    lacked = [0, 0]
    for block, placed in zip(each[0][0].blocks, each[0][0].work, strict=True):
        (worker,) = block.gradient_workers
        lacked[worker] += sum(shards.numel(1 - worker) for shards in placed.shards)
    assert all(lacked)
    for rank, (placement, traffic) in enumerate(each):
        used = [work.name for work in placement.work]
        assert traffic == planned(placement, rank, STEPS, (1, 2), used), rank
        for phase in ("gradients", "exchange"):
            assert traffic[phase] == {"bytes": STEPS * 4 * sum(lacked), "calls": STEPS}, phase


# -- less precision in a pass ----------------------------------------------------------------------


BF16 = {"bf16": {"enabled": True}}
NARROW: dict[str, Case] = {
    "autocast": Case(
        2, "hook", config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, options=MEM
    ),
    "1": Case(1, "hook", config=BF16, options=MEM),
    "3": Case(3, "hook", config=BF16, options=MEM, zero=CUT),
    "2 passes": Case(2, "hook", config=BF16, options=MEM, passes=2),
    "2 added up in float32": Case(
        2,
        "hook",
        config={**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        options=MEM,
        passes=2,
    ),
}


def test_less_precision() -> None:
    """Within the rounding of the passes, and of what DeepSpeed reduces and keeps."""
    pytest.importorskip("deepspeed")
    results = run_ranks(train_all, 2, list(NARROW.values()), timeout=240)
    start = weights(net())
    for index, (name, case) in enumerate(NARROW.items()):
        expected = alone(case)
        for own in results:
            assert_rounded(own[index][0], expected, start, name)


# -- what is refused -------------------------------------------------------------------------------


def said(function: Any) -> str:
    """What is raised."""
    try:
        function()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int, ranks: int) -> dict[str, str]:
    as_launched(rank, ranks)
    found: dict[str, str] = {}

    def engine_of(case: Case, model: nn.Module | None = None, optimizer: Any = None) -> Any:
        model = net() if model is None else model
        return initialize(model, optimizer or base(model, case), case, ranks)

    def built(engine: Any, **settings: Any) -> str:
        what = said(lambda: soframe.Preconditioner(engine, kl_clip=None, **grouped(settings)))
        engine.destroy()
        return what

    def step(engine: Any, own: Any, case: Case, number: int = 1) -> str:
        all_losses = list(losses(0, case, engine, rank, ranks))
        for loss in all_losses[:number]:
            engine.backward(loss)
        return said(own.step)

    def step_early(case: Case, when: str = "after") -> str:
        model = net()
        own = soframe.Preconditioner(model, lr=0.1) if when == "before" else None
        engine = engine_of(case, model)
        own = own or soframe.Preconditioner(engine, lr=0.1)
        what = step(engine, own, case)
        own.close()
        engine.destroy()
        return what

    offload = {"offload_optimizer": {"device": "cpu"}}
    case = Case(2, zero=offload, config={"zero_force_ds_cpu_optimizer": False})
    found["offload"] = built(engine_of(case))
    wide = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    found["bfloat16 and float32"] = built(engine_of(Case(1, config=wide)))
    found["bfloat16 and float32, early"] = step_early(Case(2, passes=2, config=wide))
    found["float64"] = built(engine_of(Case(1), make_net()))
    case = Case(3, zero=offload, config={"zero_force_ds_cpu_optimizer": False})
    found["3 offload"] = built(engine_of(case))
    found["3 offload_param"] = built(engine_of(Case(3, zero={"offload_param": {"device": "cpu"}})))
    found["3 float64"] = built(engine_of(Case(3), make_net()))
    found["3 local"] = built(engine_of(Case(3)), gradients="local")
    found["3 early"] = step_early(Case(3, passes=2, zero=CUT))
    with deepspeed_init():
        model = net()
    found["3 no engine"] = said(lambda: soframe.Preconditioner(model, lr=0.1))
    model = net()
    some = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    found["3 not in the optimizer"] = built(engine_of(Case(3), model, some))
    engine = engine_of(Case(3))
    found["3 own step"] = said(lambda: soframe.Optimizer(engine, "kfac", lr=0.1))
    found["3 trust region"] = said(lambda: soframe.TrustRegion(engine.module, "squared-error"))
    engine.destroy()
    found["local"] = built(engine_of(Case(1)), gradients="local")
    model = net()
    some = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    found["not in the optimizer"] = built(engine_of(Case(1), model, some))
    engine = engine_of(Case(2))
    found["another optimizer"] = built(engine, optimizer=torch.optim.SGD(net().parameters(), lr=1))
    engine = engine_of(Case(2))
    found["own step"] = said(lambda: soframe.Optimizer(engine, "kfac", lr=0.1))
    engine.destroy()
    engine = engine_of(Case(2))
    found["trust region"] = said(lambda: soframe.TrustRegion(engine.module, "squared-error"))
    engine.destroy()

    found["before"] = step_early(Case(2, passes=2), "before")
    found["after, not at the boundary"] = step_early(Case(2, passes=2))

    model = net()
    optimizer = soframe.Optimizer(model, "kfac", lr=0.1)
    engine = engine_of(Case(1), model, optimizer)
    found["own step, before"] = step(engine, engine, Case(1))
    optimizer.close()
    engine.destroy()

    model = net()
    engine = engine_of(Case(1), model)
    own = soframe.Preconditioner(engine, lr=0.1)
    again = engine_of(Case(1), model)
    found["again"] = step(again, own, Case(1))
    own.close()
    return found


EXPECTED = {
    "3 offload": "ValueError: .* offload_optimizer out",
    "3 offload_param": "ValueError: .* offload_param out",
    "3 float64": "ValueError: the parameter .*: train in float32",
    "3 local": "ValueError: .* pass .*gradients='averaged'",
    "3 early": "RuntimeError: .*is_gradient_accumulation_boundary",
    "3 no engine": "ValueError: the parameter .* after deepspeed.initialize",
    "3 not in the optimizer": "ValueError: .* give it to the optimizer",
    "3 own step": "ValueError: a soframe.Optimizer moves .*DeepSpeedPreconditioner",
    "3 trust region": "ValueError: TrustRegion needs whole .* DeepSpeed's ZeRO",
    "offload": "ValueError: .* offload_optimizer out",
    "bfloat16 and float32": "ValueError: the parameter .* its bf16 optimizer",
    "bfloat16 and float32, early": "RuntimeError: .*is_gradient_accumulation_boundary",
    "float64": "ValueError: the parameter .*: train in float32",
    "local": "ValueError: .* pass .*gradients='averaged'",
    "not in the optimizer": "ValueError: .* give it to the optimizer",
    "another optimizer": "ValueError: .* is not in the given optimizer",
    "own step": "ValueError: a soframe.Optimizer moves .*DeepSpeedPreconditioner",
    "own step, before": "ValueError: a soframe.Optimizer moves .*DeepSpeedPreconditioner",
    "trust region": "ValueError: TrustRegion needs whole .* DeepSpeed's ZeRO",
    "before": r"ValueError: the parameter .*optimizer=engine\.optimizer",
    "after, not at the boundary": "RuntimeError: .*is_gradient_accumulation_boundary",
    "again": "RuntimeError: deepspeed.initialize was called again",
}


def test_what_is_refused() -> None:
    pytest.importorskip("deepspeed")
    for found in run_ranks(refusals, 2, timeout=240):
        assert set(found) == set(EXPECTED)
        for name, what in EXPECTED.items():
            assert re.match(what, found[name], re.DOTALL), (name, found[name])
