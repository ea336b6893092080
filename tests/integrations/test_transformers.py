"""The Trainer of transformers itself: equal to the plain loop, and resumed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.settings import grouped
from tests.distributed.harness import run_ranks
from tests.integrations.kit import (
    BATCH,
    CASES,
    MICRO,
    OPTIONS,
    SAVED,
    STEPS,
    TIGHT,
    Case,
    Data,
    as_launched,
    assert_equal,
    assert_plain,
    base,
    finish,
    let_scale,
    network,
    sgd,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")

TOKENS = 11

# The Trainer zeroes gradients by the model: a step that its scaler skips costs the statistics of
# the next batch, see docs/guides/unchecked.md.
EXACT = {name: case for name, case in CASES.items() if name != "own fp16"}


def trainer_of(folder: str, model: nn.Module, optimizer: Any, data: Any, **settings: Any) -> Any:
    """A Trainer that takes samples in their order, at one learning rate."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class Ordered(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def create_optimizer(self, *args: Any) -> Any:  # DeepSpeed leaves out the given one
            self.optimizer = optimizer
            return optimizer

    callbacks = settings.pop("callbacks")
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu="deepspeed" not in settings,  # else it leaves DeepSpeed out
        max_steps=STEPS,
        gradient_accumulation_steps=MICRO,
        save_steps=SAVED,
        lr_scheduler_type="constant",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Ordered(
        model=model,
        args=arguments,
        train_dataset=data,
        optimizers=(optimizer, constant),
        callbacks=callbacks,
    )


def train(
    folder: str,
    case: Case = Case(),  # noqa: B008
    *,
    resume: bool | str = False,
    with_callback: bool | None = None,
    ranks: int = 1,
    resume_from: str | None = None,
    placed: str = "comm-opt",
    engine: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Train by the Trainer; save into the folder on the way, or begin there."""
    from soframe.integrations.transformers import SoframeCallback

    model = network(case)
    trainers: list[Any] = []
    of_own: dict[str, Any] = {"strategy": placed}
    if case.fp16:
        of_own["grad_scaler"] = lambda: trainers[0].accelerator.scaler
    optimizer = base(model, case, **of_own)
    callbacks: list[Any] = []
    if not case.own if with_callback is None else with_callback:
        settings = {"method": case.method, **case.settings, "strategy": placed}
        callbacks.append(SoframeCallback(**grouped(settings), resume_from=resume_from))
    elif case.own and placed != "comm-opt":
        callbacks.append(SoframeCallback(resume_from=resume_from))  # saves the optimizer's state
    trainer = trainer_of(
        folder,
        model,
        optimizer,
        Data(case=case),
        callbacks=callbacks,
        per_device_train_batch_size=BATCH // ranks,
        max_grad_norm=case.clip or 0.0,
        bf16=case.bf16,
        **({} if engine is None else {"deepspeed": engine}),
    )
    assert trainer.args.world_size == ranks
    trainers.append(trainer)
    assert trainer.is_deepspeed_enabled == (engine is not None)
    if case.fp16:
        let_scale(trainer.accelerator)
    trainer.train(resume_from_checkpoint=resume or None)
    every = [callback.preconditioner for callback in callbacks]
    if isinstance(optimizer, soframe.Optimizer):
        every = [optimizer.preconditioner]
    for preconditioner in every:
        finish(model, preconditioner, case, begun=SAVED if resume else 0)
    if engine is None:
        return weights(model)
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):  # stage 3 leaves none
        return weights(model)


@pytest.mark.parametrize("name", ["clip", *EXACT])
def test_equal_to_the_plain_loop(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    case = {"clip": Case(clip=0.05), **EXACT}[name]
    assert_plain(train(str(tmp_path), case), case, TIGHT)


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_is_the_same(tmp_path: Path, own: bool) -> None:
    pytest.importorskip("transformers")
    case = Case(own=own)
    whole = train(str(tmp_path / "whole"), case)
    assert_plain(whole, case, TIGHT)
    last = str(tmp_path / "whole" / f"checkpoint-{SAVED}")
    elsewhere = train(str(tmp_path / "other"), case, resume=last, resume_from=last)
    assert_equal(elsewhere, whole, 0)
    shutil.rmtree(tmp_path / "whole" / f"checkpoint-{STEPS}")
    assert_equal(train(str(tmp_path / "whole"), case, resume=True), whole, 0)


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=6,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).double()  # type: ignore[no-any-return]


def test_gradient_checkpointing(tmp_path: Path) -> None:
    """The trainer's own, of a GPT-2, whose loss it divides by the tokens of all micro-batches."""
    pytest.importorskip("transformers")
    from soframe.integrations.transformers import SoframeCallback

    drawn = torch.Generator().manual_seed(7)
    tokens = torch.randint(TOKENS, (STEPS * MICRO * BATCH, 6), generator=drawn)
    labels = tokens.clone()
    labels[:, 0] = -100  # which no model predicts, and the trainer would count
    settings = {**OPTIONS, "samples": "positions", "layers": "all", "skip": ["wpe"]}

    expected = gpt()
    optimizer = sgd(expected)
    preconditioner = soframe.Preconditioner(expected, optimizer=optimizer, **grouped(settings))
    for step in range(STEPS):
        for number in range(MICRO):
            start = (step * MICRO + number) * BATCH
            rows = slice(start, start + BATCH)
            (expected(tokens[rows], labels=labels[rows]).loss / MICRO).backward()
        preconditioner.step()
        optimizer.step()
        optimizer.zero_grad()
    preconditioner.close()

    model, callback = gpt(), SoframeCallback(**grouped(settings))
    runs = []
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: runs.append(None))
    trainer = trainer_of(
        str(tmp_path),
        model,
        sgd(model),
        [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)],
        callbacks=[callback],
        per_device_train_batch_size=BATCH,
        max_grad_norm=0.0,
        gradient_checkpointing=True,
        save_strategy="no",
    )
    trainer.train()
    assert trainer.model_accepts_loss_kwargs
    assert len(runs) == 2 * STEPS * MICRO
    callback.preconditioner.close()
    assert len(callback.preconditioner.blocks) == 14
    assert_equal(weights(model), weights(expected), 1e-6)  # the loss is in float32
    assert not torch.equal(model.lm_head.weight, gpt().lm_head.weight)


def test_a_second_call_of_train_goes_on(tmp_path: Path) -> None:
    """With the preconditioner, as with the optimizer; another model has another."""
    pytest.importorskip("transformers")
    from soframe.integrations.transformers import SoframeCallback

    case = Case()
    expected = network()
    optimizer = sgd(expected)
    preconditioner = soframe.Preconditioner(expected, optimizer=optimizer, **grouped(case.settings))
    for batch in 2 * Data().batches(MICRO):
        expected(**batch)["loss"].backward()
        preconditioner.step()
        optimizer.step()
        optimizer.zero_grad()

    model, callback = network(), SoframeCallback(**grouped(case.settings))
    trainer = trainer_of(
        str(tmp_path),
        model,
        sgd(model),
        Data(),
        callbacks=[callback],
        per_device_train_batch_size=BATCH,
        max_grad_norm=0.0,
        save_strategy="no",
    )
    trainer.train()
    first = callback.preconditioner
    trainer.train()
    assert callback.preconditioner is first
    assert first.steps == 2 * STEPS
    assert_equal(weights(model), weights(expected), TIGHT)

    arguments, state = SimpleNamespace(), SimpleNamespace(global_step=0)
    another = network()
    callback.on_train_begin(arguments, state, None, model=another, optimizer=sgd(another))
    assert callback.preconditioner is not first
    with pytest.raises(RuntimeError, match="closed"):
        first.step()
    callback.preconditioner.close()


def test_a_checkpoint_without_a_state(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train(str(tmp_path), with_callback=False)
    with pytest.raises(FileNotFoundError, match=f"checkpoint-{STEPS} has no state of a precond"):
        train(str(tmp_path), resume=True)


def test_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    """As of a trial in a search for hyper-parameters."""
    pytest.importorskip("transformers")
    from soframe.integrations.transformers import SoframeCallback

    arguments = SimpleNamespace(output_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="checkpoint-3: its checkpoint is elsewhere"):
        SoframeCallback().on_save(arguments, SimpleNamespace(global_step=3), None)


def test_optimizers_that_it_is_not_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match="a preconditioner of its own"):
        train(str(tmp_path), Case(own=True), with_callback=True)


def on_ranks(rank: int, ranks: int, folder: str) -> list[Any]:
    """Every case, and two that resume, with states that are spread over the ranks."""
    as_launched(rank, ranks)
    every = {"plain": Case(), "owned": Case(own=True), **EXACT}
    found: dict[str, Any] = {}
    for name, case in every.items():
        found[name] = train(f"{folder}/{name}", case, ranks=ranks, placed="mem-opt")
    resumed = []
    for name in ("plain", "owned"):
        last = f"{folder}/{name}/checkpoint-{SAVED}"
        resumed.append(
            train(f"{folder}/{name}", every[name], ranks=ranks, resume=last, placed="mem-opt")
        )
    return [found, *resumed]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    """By DDP, with states that are spread over the ranks, and a bad sample on one of them."""
    pytest.importorskip("transformers")
    for found, plain, owned in run_ranks(on_ranks, 2, str(tmp_path), timeout=240):
        assert_equal(plain, found["plain"], 0)
        assert_equal(owned, found["owned"], 0)
        for name, case in {"plain": Case(), "owned": Case(own=True), **EXACT}.items():
            assert_plain(found[name], case, 1e-8)


def let_engines_run_on_cpus() -> None:
    """Let Accelerate choose Gloo for DeepSpeed, which it leaves out on CPUs."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"}
    import deepspeed.ops
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled for a minute
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)


def by_engine(rank: int, ranks: int, folder: str, stage: int) -> list[Any]:
    as_launched(rank, ranks)
    let_engines_run_on_cpus()
    case = Case(dtype=torch.float32)  # it reduces no float64
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    each = []
    for resume in (False, f"{folder}/checkpoint-{SAVED}"):
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        each.append(
            train(
                folder,
                case,
                ranks=ranks,
                resume=resume,
                placed="mem-opt",
                engine={**engine, **auto, "gradient_clipping": "auto"},
            )
        )
    return each


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    """The trainer's ``deepspeed=``, whose engine steps within the backward pass."""
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    for whole, resumed in run_ranks(by_engine, 2, str(tmp_path), stage, timeout=240):
        assert_plain(whole, Case(dtype=torch.float32), 2e-5)
        assert_equal(resumed, whole, 0)
