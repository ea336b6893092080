"""DeepSpeed's pipeline: its stages train as one process does with the whole model."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe.comm import TorchDistributed
from soframe.integrations.deepspeed import DeepSpeedPreconditioner
from soframe.settings import grouped
from tests.compatibility.kit import assert_refused, assert_rounded
from tests.distributed.harness import RankFailure, run_ranks
from tests.integrations.kit import as_launched
from tests.methods.stages import damping_for

pytestmark = pytest.mark.distributed

BATCHES, SAMPLES, WIDTH, STEPS, SAVED = 4, 2, 5, 4, 3
OPTIONS: dict[str, Any] = {
    "damping": 0.1,
    "statistics_every": 1,
    "solve_every": 2,
    "kl_clip": 1e-4,
}


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1).mean()


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        own: Whether `soframe.Optimizer` owns the step.
        method: The method.
        spoilt: Whether a sample of the third step has targets that are NaN.
        checkpoints: Whether the engine computes activations anew.
        bf16: Whether it lets the stages run under autocast to bfloat16.
    """

    own: bool = False
    method: str = "kfac"
    spoilt: bool = False
    checkpoints: bool = False
    bf16: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the preconditioner that its method reads."""
        unread = set() if damping_for(self.method) else {"damping"}
        return {name: value for name, value in OPTIONS.items() if name not in unread}


CASES: dict[str, Case] = {
    "kfac": Case(),
    "own muon": Case(own=True, method="muon"),
    "muon": Case(method="muon"),
    "spoilt": Case(spoilt=True, checkpoints=True),
    "own spoilt": Case(own=True, spoilt=True),
    "bf16": Case(bf16=True),
}


def batches(step: int, copy: int, case: Case) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a copy of the model in a step."""
    generator = torch.Generator().manual_seed(100 + 10 * step + copy)
    shape = (2, BATCHES, SAMPLES, WIDTH)
    inputs, targets = torch.randn(shape, generator=generator)
    if case.spoilt and step == 2 and copy == 0:
        targets[-1, 0] = torch.nan
    return list(zip(inputs, targets, strict=True))


def initialise(module: Any, optimizer: Any, **settings: Any) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": BATCHES,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **settings,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def module_of(
    rank: int, ranks: int, every: list[Any] | None = None, *, checkpoints: bool = False
) -> Any:
    as_launched(rank, ranks)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops
    from deepspeed.pipe import PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled for a minute
    deepspeed.init_distributed("gloo")
    every = list(layers()) if every is None else every
    return PipelineModule(
        every,
        num_stages=2,
        loss_fn=loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=int(checkpoints),
    )


def train(
    rank: int, ranks: int, case: Case, *, folder: str = "", begin: int = 0
) -> dict[str, Tensor]:
    """Train; save into the folder after `SAVED` steps, or begin there."""
    module = module_of(rank, ranks, checkpoints=case.checkpoints)
    grid = module._grid
    autocast = {"torch_autocast": {"enabled": case.bf16, "dtype": "bfloat16"}}
    if case.own:
        copies = TorchDistributed(grid.get_data_parallel_group())
        pipe = grid.get_pipe_parallel_group()
        optimizer: Any = soframe.Optimizer(
            module,
            case.method,
            lr=0.05,
            **grouped({"pipeline": pipe, "backend": copies, **case.settings}),
        )
        engine = initialise(module, optimizer, **autocast)
        own = optimizer.preconditioner
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        engine = initialise(module, optimizer, **autocast)
        hook = DeepSpeedPreconditioner(engine, method=case.method, **grouped(case.settings))
        own = hook.preconditioner
        assert own.world_size == ranks // 2
        with pytest.raises(RuntimeError, match="leave step"):
            hook.step()
    kept = Path(folder) / f"soframe-{rank}.pt"
    if begin:
        engine.load_checkpoint(folder)
        if not case.own:
            own.load_state_dict(torch.load(kept))
    runs: list[None] = []
    linear = next(layer for layer in module.forward_funcs if isinstance(layer, nn.Linear))
    linear.register_forward_pre_hook(lambda *_: runs.append(None))
    for step in range(begin, STEPS):
        if folder and step == SAVED and not begin:
            engine.save_checkpoint(folder)
            torch.save(own.state_dict(), kept)
        engine.train_batch(iter(batches(step, grid.get_data_parallel_rank(), case)))
    assert len(runs) == (1 + case.checkpoints) * BATCHES * (STEPS - begin)
    assert own.steps == STEPS
    assert own.counters["skipped_updates"] == case.spoilt
    own.close()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def alone(copies: int, case: Case) -> dict[str, Tensor]:
    model = nn.Sequential(*layers())
    if case.own:
        optimizer: Any = soframe.Optimizer(model, case.method, lr=0.05, **grouped(case.settings))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        preconditioner = soframe.Preconditioner(
            model, case.method, optimizer=optimizer, **grouped(case.settings)
        )
    for step in range(STEPS):
        optimizer.zero_grad()
        every = [pair for copy in range(copies) for pair in batches(step, copy, case)]
        inputs, targets = (torch.cat(parts) for parts in zip(*every, strict=True))
        loss_of(model(inputs), targets).backward()
        if not case.own:
            preconditioner.step()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_all(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    return [train(rank, ranks, case) for case in CASES.values()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_one_process(ranks: int) -> None:
    """In float32, with micro-batches, the KL clip over both stages, and the head of the last."""
    pytest.importorskip("deepspeed")
    start = dict(nn.Sequential(*layers()).named_parameters())
    results = run_ranks(train_all, ranks, timeout=240)
    for index, (what, case) in enumerate(CASES.items()):
        expected, names = alone(ranks // 2, case), set()
        for own in results:
            found = own[index]
            names.update(found)
            if case.bf16:
                assert_rounded(found, expected, start, what)
                continue
            for name, weight in found.items():
                where = f"{what}, {name}"
                torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=2e-6, msg=where)
        assert names == set(expected)


def saved_and_resumed(rank: int, ranks: int, folder: str) -> list[list[dict[str, Tensor]]]:
    found = []
    for name in ("kfac", "own muon"):
        case, where = CASES[name], f"{folder}/{name}"
        found.append([train(rank, ranks, case, folder=where, begin=n) for n in (0, SAVED)])
    return found


@pytest.mark.slow
def test_a_run_goes_on(tmp_path: Path) -> None:
    """Of two copies, from what DeepSpeed has saved of each stage, to the bit."""
    pytest.importorskip("deepspeed")
    for own in run_ranks(saved_and_resumed, 4, str(tmp_path), timeout=240):
        for whole, resumed in own:
            for name, weight in whole.items():
                assert torch.equal(resumed[name], weight), name


def tied(rank: int, ranks: int) -> None:
    from deepspeed.pipe import TiedLayerSpec

    ends = [TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    module = module_of(rank, ranks, [ends[0], nn.Linear(WIDTH, WIDTH), nn.Tanh(), ends[1]])
    pipe = module._grid.get_pipe_parallel_group()
    soframe.Preconditioner(module, kl_clip=None, distribution=soframe.Distribution(pipeline=pipe))


def under_zero(rank: int, ranks: int) -> None:
    module = module_of(rank, ranks)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    zero = {"stage": 1}
    DeepSpeedPreconditioner(initialise(module, optimizer, zero_optimization=zero), **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (tied, "belongs to a layer that DeepSpeed ties over stages"),
        (under_zero, "a pipeline of DeepSpeed under ZeRO is not served"),
    ],
)
def test_what_is_refused(function: Callable[..., None], words: str) -> None:
    pytest.importorskip("deepspeed")
    assert_refused(function, 2, words)


# -- without DeepSpeed -----------------------------------------------------------------------------


class PipelineModule(nn.Sequential):
    """Stands in for DeepSpeed's: its layers, and those that it ties over stages."""

    def __init__(self, *modules: nn.Module, ties: bool = False) -> None:
        super().__init__(*modules)
        self.tied_comms = {"ends": {}} if ties else {}
        self.tied_modules = nn.ModuleDict({"ends": modules[0]} if ties else {})


def tied_stand_in(rank: int, ranks: int) -> None:
    module = types.ModuleType("deepspeed.runtime.pipe.module")
    module.PipelineModule = PipelineModule  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    free = PipelineModule(nn.Linear(2, 2))
    soframe.Preconditioner(
        free, kl_clip=None, distribution=soframe.Distribution(pipeline=dist.group.WORLD)
    ).close()
    ends = PipelineModule(nn.Linear(2, 2), ties=True)
    soframe.Preconditioner(
        ends, kl_clip=None, distribution=soframe.Distribution(pipeline=dist.group.WORLD)
    )


def test_tied_layers_are_refused() -> None:
    (failure,) = run_ranks(tied_stand_in, 1, check=False)
    assert isinstance(failure, RankFailure)
    assert "DeepSpeed ties over stages" in str(failure.exception)
