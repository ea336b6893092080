"""DeepSpeed's engine itself, under ZeRO stages 0 to 3: equal to the plain loop, and resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from soframe.integrations.deepspeed import DeepSpeedPreconditioner
from tests.distributed.harness import RankFailure, run_ranks
from tests.integrations.kit import (
    BATCH,
    MICRO,
    OPTIONS,
    OWN,
    SAVED,
    Data,
    as_launched,
    assert_equal,
    network,
    plain,
    sgd,
    weights,
)


def engine_of(ranks: int, own: bool, settings: dict[str, Any]) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled for a minute
    model = network(torch.float32)
    optimizer = soframe.Optimizer(model, **OWN) if own else sgd(model)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_accumulation_steps": MICRO,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **settings,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(
    rank: int, ranks: int, folder: str, own: bool, resume: bool, settings: dict[str, Any]
) -> dict[str, Tensor]:
    engine = engine_of(ranks, own, settings)
    hook = None if own else DeepSpeedPreconditioner(engine, strategy="mem-opt", **OPTIONS)
    if resume:
        _, kept = engine.load_checkpoint(folder)
        if hook is not None:
            hook.preconditioner.load_state_dict(kept["soframe"])
    batches = Data(rank, ranks, torch.float32).batches()
    for number in range(SAVED * MICRO if resume else 0, len(batches)):
        engine.backward(engine(**batches[number])["loss"])
        if hook is not None:
            hook.step()
        engine.step()
        if not resume and number + 1 == SAVED * MICRO:
            kept = {} if hook is None else {"soframe": hook.preconditioner.state_dict()}
            engine.save_checkpoint(folder, client_state=kept)
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return weights(engine.module)


def on_ranks(rank: int, ranks: int, folder: str, own: bool, settings: dict[str, Any]) -> list[Any]:
    as_launched(rank, ranks)
    whole = train(rank, ranks, folder, own, False, settings)
    return [whole, train(rank, ranks, folder, own, True, settings)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "own"), [(0, False), (0, True), (1, False), (2, False), (3, False)]
)
def test_two_ranks(tmp_path: Path, stage: int, own: bool) -> None:
    """With accumulation, and a state that is spread over the ranks; it reduces no float64."""
    pytest.importorskip("deepspeed")
    expected = plain(own=own, dtype=torch.float32)
    settings = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    for whole, resumed in run_ranks(on_ranks, 2, str(tmp_path), own, settings):
        assert_equal(whole, expected, 2e-5)
        assert_equal(resumed, whole, 0)


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    bf16 = {"bf16": {"enabled": True}}
    (result,) = run_ranks(on_ranks, 1, str(tmp_path), False, bf16, check=False)
    assert isinstance(result, RankFailure)
    assert isinstance(result.exception, ValueError), result
    assert "bf16 under ZeRO stage 0" in str(result.exception)
