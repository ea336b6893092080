"""Accelerate itself: equal to the plain loop, on one process and on two, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.integrations.accelerate import AcceleratedPreconditioner, unscale
from tests.distributed.harness import run_ranks
from tests.integrations.kit import (
    CASES,
    MICRO,
    SAVED,
    TIGHT,
    Case,
    Data,
    as_launched,
    assert_equal,
    assert_plain,
    base,
    finish,
    let_scale,
    let_shard,
    network,
    sgd,
)

pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")


def train(
    folder: str = "",
    case: Case = Case(),  # noqa: B008
    *,
    resume: bool = False,
    sharded: bool = False,
    rank: int = 0,
    ranks: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    """Train by Accelerate; save into the folder on the way, or begin there."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=MICRO,
        mixed_precision="bf16" if case.bf16 else "no",
    )
    assert accelerator.num_processes == ranks
    if sharded:
        let_shard(accelerator)
    plain = network(case)
    if case.fp16:
        let_scale(accelerator)
    of_own = {"grad_scaler": accelerator.scaler} if case.fp16 and case.own else {}
    model, optimizer = accelerator.prepare(plain, base(plain, case, **options, **of_own))
    hook = None
    if not case.own:
        settings = {"method": case.method, **case.settings, **options}
        hook = AcceleratedPreconditioner(accelerator, model, optimizer, **settings)
    if resume:
        accelerator.load_state(folder)
    batches = Data(rank, ranks, case).batches()
    begun = SAVED if resume else 0
    for number in range(begun * MICRO, len(batches)):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batches[number])["loss"])
            if case.clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            if hook is not None:
                hook.step()
            optimizer.step()
            optimizer.zero_grad()
        if folder and not resume and number + 1 == SAVED * MICRO:
            accelerator.save_state(folder)
    own = optimizer.optimizer.preconditioner if hook is None else hook.preconditioner
    result = finish(plain, own, case, begun=begun)
    if hook is not None:
        hook.close()
    AcceleratorState._reset_state(reset_partial_state=True)  # the next one may be narrower
    return result


@pytest.mark.parametrize("name", ["clip", *CASES])
def test_equal_to_the_plain_loop(name: str) -> None:
    pytest.importorskip("accelerate")
    case = {"clip": Case(clip=0.05), **CASES}[name]
    assert_plain(train(case=case), case, TIGHT)


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_is_the_same(tmp_path: Path, own: bool) -> None:
    pytest.importorskip("accelerate")
    case = Case(own=own)
    whole = train(str(tmp_path), case)
    assert_plain(whole, case, TIGHT)
    assert_equal(train(str(tmp_path), case, resume=True), whole, 0)


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
    model, optimizer = accelerator.prepare(model, base(model, Case(own=True)))
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


def on_ranks(rank: int, ranks: int, folder: str) -> list[Any]:
    as_launched(rank, ranks)
    options: dict[str, Any] = {"rank": rank, "ranks": ranks, "strategy": "mem-opt"}
    both = []
    for own in (False, True):
        case, where = Case(own=own), f"{folder}/{own}"
        both.append([train(where, case, resume=resume, **options) for resume in (False, True)])
    return [both, [train(case=case, **options) for case in CASES.values()]]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    """By DDP, with a state that is spread over the ranks, and a bad sample on one of them."""
    pytest.importorskip("accelerate")
    for both, cases in run_ranks(on_ranks, 2, str(tmp_path), timeout=240):
        for own, (whole, resumed) in enumerate(both):
            assert_plain(whole, Case(own=bool(own)), 1e-8)
            assert_equal(resumed, whole, 0)
        for found, case in zip(cases, CASES.values(), strict=True):
            assert_plain(found, case, 1e-8)


def on_sharding_ranks(rank: int, ranks: int, folder: str) -> list[Any]:
    as_launched(rank, ranks)
    options: dict[str, Any] = {"rank": rank, "ranks": ranks, "sharded": True}
    both = []
    for own in (False, True):
        case, where = Case(own=own), f"{folder}/{own}"
        both.append([train(where, case, resume=resume, **options) for resume in (False, True)])
    return both


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_resume_under_fully_shard(tmp_path: Path) -> None:
    """The optimizer is built before the model is sharded, and loaded before its first step."""
    pytest.importorskip("accelerate")
    for both in run_ranks(on_sharding_ranks, 2, str(tmp_path), timeout=240):
        for own, (whole, resumed) in enumerate(both):
            assert_plain(whole, Case(own=bool(own)), 1e-8)
            assert_equal(resumed, whole, 0)
