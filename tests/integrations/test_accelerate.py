"""Accelerate itself: equal to the plain loop, on one process and on two, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from soframe.integrations.accelerate import AcceleratedPreconditioner, unscale
from tests.distributed.harness import run_ranks
from tests.integrations.kit import (
    MICRO,
    OPTIONS,
    OWN,
    SAVED,
    TIGHT,
    Data,
    as_launched,
    assert_equal,
    network,
    plain,
    sgd,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")


def train(
    folder: str = "",
    *,
    resume: bool = False,
    own: bool = False,
    clip: float | None = None,
    rank: int = 0,
    ranks: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    """Train by Accelerate; save into the folder on the way, or begin there."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    assert accelerator.num_processes == ranks
    model = network()
    optimizer = soframe.Optimizer(model, **OWN, **options) if own else sgd(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    hook = None
    if not own:
        hook = AcceleratedPreconditioner(accelerator, model, optimizer, **OPTIONS, **options)
    if resume:
        accelerator.load_state(folder)
    batches = Data(rank, ranks).batches()
    for number in range(SAVED * MICRO if resume else 0, len(batches)):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batches[number])["loss"])
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            if hook is not None:
                hook.step()
            optimizer.step()
            optimizer.zero_grad()
        if folder and not resume and number + 1 == SAVED * MICRO:
            accelerator.save_state(folder)
    result = weights(accelerator.unwrap_model(model))
    if hook is not None:
        hook.close()
    else:
        optimizer.optimizer.close()
    return result


@pytest.mark.parametrize("clip", [None, 0.05])
def test_equal_to_the_plain_loop(clip: float | None) -> None:
    pytest.importorskip("accelerate")
    assert_equal(train(clip=clip), plain(clip=clip), TIGHT)


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_is_the_same(tmp_path: Path, own: bool) -> None:
    pytest.importorskip("accelerate")
    whole = train(str(tmp_path), own=own)
    assert_equal(whole, plain(own=own), TIGHT)
    assert_equal(train(str(tmp_path), resume=True, own=own), whole, 0)


def test_a_checkpoint_without_a_state(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    train(str(tmp_path))
    shutil.rmtree(tmp_path / "soframe")
    with pytest.raises(FileNotFoundError, match="no state of a preconditioner"):
        train(str(tmp_path), resume=True)


def test_an_optimizer_that_has_a_preconditioner() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = network()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, soframe.Optimizer(model, **OWN))
    with pytest.raises(TypeError, match="a preconditioner of its own"):
        AcceleratedPreconditioner(accelerator, model, optimizer)


def test_gradients_are_unscaled_once() -> None:
    """Where Accelerate has unscaled them, to clip, and where nobody has."""
    for before in (False, True):
        model = network()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        (batch, *_) = Data().batches()
        scaler.scale(model(**batch)["loss"]).backward()
        if before:
            scaler.unscale_(optimizer)
        unscale(optimizer, scaler)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(**batch)["loss"].backward()
        for own, p in zip(found, model.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(own, p.grad)


def on_ranks(rank: int, ranks: int, folder: str, own: bool, strategy: str) -> list[Any]:
    as_launched(rank, ranks)
    options = {"rank": rank, "ranks": ranks, "own": own, "strategy": strategy}
    return [train(folder, **options), train(folder, resume=True, **options)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("own", [False, True])
def test_two_ranks(tmp_path: Path, own: bool) -> None:
    """By DDP, with a state that is spread over the ranks."""
    pytest.importorskip("accelerate")
    expected = plain(own=own)
    for whole, resumed in run_ranks(on_ranks, 2, str(tmp_path), own, "mem-opt"):
        assert_equal(whole, expected, 1e-8)
        assert_equal(resumed, whole, 0)
