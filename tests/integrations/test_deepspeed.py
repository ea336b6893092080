"""DeepSpeed's engine itself, under ZeRO stages 0 to 3: equal to the plain loop, and resumed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.integrations.deepspeed import DeepSpeedPreconditioner
from soframe.settings import grouped
from tests.distributed.harness import RankFailure, run_ranks
from tests.integrations.kit import (
    BATCH,
    CASES,
    MICRO,
    SAVED,
    Case,
    Data,
    as_launched,
    assert_equal,
    assert_plain,
    base,
    finish,
    network,
    weights,
)


def engine_of(ranks: int, case: Case, settings: dict[str, Any]) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled for a minute
    deepspeed.init_distributed("gloo")
    deepspeed.checkpointing.configure(None)
    model = network(case, deepspeed.checkpointing.checkpoint)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_accumulation_steps": MICRO,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": case.clip or 0.0,
        **settings,
    }
    if case.bf16:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=base(model, case), config=config)
    return engine


def train(
    rank: int,
    ranks: int,
    folder: str,
    case: Case,
    settings: dict[str, Any],
    *,
    resume: bool = False,
) -> dict[str, Tensor]:
    import deepspeed

    case = replace(case, dtype=torch.float32)  # it reduces no float64
    engine = engine_of(ranks, case, settings)
    hook = None
    if not case.own:
        options = {"method": case.method, "strategy": "mem-opt", **case.settings}
        hook = DeepSpeedPreconditioner(engine, **grouped(options))
    if resume:
        _, kept = engine.load_checkpoint(folder)
        if hook is not None:
            hook.preconditioner.load_state_dict(kept["soframe"])
    batches = Data(rank, ranks, case).batches()
    begun = SAVED if resume else 0
    for number in range(begun * MICRO, len(batches)):
        engine.backward(engine(**batches[number])["loss"])
        if hook is not None:
            hook.step()
        engine.step()
        if folder and not resume and number + 1 == SAVED * MICRO:
            kept = {} if hook is None else {"soframe": hook.preconditioner.state_dict()}
            engine.save_checkpoint(folder, client_state=kept)
    own = engine.optimizer.preconditioner if hook is None else hook.preconditioner
    finish(engine.module, own, case, begun=begun)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return weights(engine.module)


def saved_and_resumed(
    rank: int, ranks: int, folder: str, own: bool, settings: dict[str, Any]
) -> list[Any]:
    as_launched(rank, ranks)
    case = Case(own=own)
    return [train(rank, ranks, folder, case, settings, resume=later) for later in (False, True)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "own"), [(0, False), (0, True), (1, False), (2, False), (3, False)]
)
def test_two_ranks(tmp_path: Path, stage: int, own: bool) -> None:
    """With accumulation, and a state that is spread over the ranks."""
    pytest.importorskip("deepspeed")
    settings = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    case = Case(own=own, dtype=torch.float32)
    for whole, resumed in run_ranks(saved_and_resumed, 2, str(tmp_path), own, settings):
        assert_plain(whole, case, 2e-5)
        assert_equal(resumed, whole, 0)


IN_FLOAT32 = {name: case for name, case in CASES.items() if not case.fp16}
IN_FLOAT32["shampoo"] = Case(method="muon", lr=0.01)
"""Shampoo takes what is not quite zero for curvature, and steps of float32 part by that."""


def every_case(rank: int, ranks: int) -> list[Any]:
    as_launched(rank, ranks)
    return [train(rank, ranks, "", case, {}) for case in IN_FLOAT32.values()]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_zero(ranks: int) -> None:
    """With the checkpoints of activations that DeepSpeed has, and its autocast."""
    pytest.importorskip("deepspeed")
    for own in run_ranks(every_case, ranks, timeout=240):
        for found, case in zip(own, IN_FLOAT32.values(), strict=True):
            assert_plain(found, replace(case, dtype=torch.float32), 2e-5, clips="directions")


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    bf16 = {"bf16": {"enabled": True}}
    (result,) = run_ranks(saved_and_resumed, 1, str(tmp_path), False, bf16, check=False)
    assert isinstance(result, RankFailure)
    assert isinstance(result.exception, ValueError), result
    assert "bf16 under ZeRO stage 0" in str(result.exception)
