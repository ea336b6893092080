"""The Trainer of transformers itself: equal to the plain loop, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from tests.distributed.harness import run_ranks
from tests.integrations.kit import (
    BATCH,
    MICRO,
    OPTIONS,
    OWN,
    SAVED,
    STEPS,
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
    folder: str,
    *,
    resume: bool | str = False,
    own: bool = False,
    with_callback: bool | None = None,
    clip: float = 0.0,
    ranks: int = 1,
    late: bool = False,
    resume_from: str | None = None,
    placed: str = "comm-opt",
) -> dict[str, Tensor]:
    """Train by the Trainer; save into the folder on the way, or begin there."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    from soframe.integrations.transformers import SoframeCallback

    class Ordered(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    model = network()
    optimizer = soframe.Optimizer(model, **OWN, strategy=placed) if own else sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // ranks,
        gradient_accumulation_steps=MICRO,
        max_grad_norm=clip,
        save_steps=SAVED,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    callbacks: list[Any] = []
    if not own if with_callback is None else with_callback:
        callbacks.append(SoframeCallback(**OPTIONS, strategy=placed, resume_from=resume_from))
    trainer = Ordered(
        model=model,
        args=arguments,
        train_dataset=Data(),
        optimizers=(optimizer, constant),
        callbacks=[] if late else callbacks,
    )
    assert arguments.world_size == ranks
    if late:
        trainer.callback_handler.on_train_begin = _adding(trainer, callbacks)
    trainer.train(resume_from_checkpoint=resume or None)
    for callback in callbacks:
        assert callback.preconditioner.state_dict()["step"] == STEPS
        callback.preconditioner.close()
    return weights(model)


def _adding(trainer: Any, callbacks: list[Any]) -> Any:
    began = trainer.callback_handler.on_train_begin

    def begin(*args: Any) -> Any:
        control = began(*args)
        for callback in callbacks:
            trainer.add_callback(callback)
        return control

    return begin


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_equal_to_the_plain_loop(tmp_path: Path, clip: float) -> None:
    pytest.importorskip("transformers")
    assert_equal(train(str(tmp_path), clip=clip), plain(clip=clip or None), TIGHT)


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_is_the_same(tmp_path: Path, own: bool) -> None:
    pytest.importorskip("transformers")
    whole = train(str(tmp_path / "whole"), own=own)
    assert_equal(whole, plain(own=own), TIGHT)
    last = str(tmp_path / "whole" / f"checkpoint-{SAVED}")
    elsewhere = train(str(tmp_path / "other"), resume=last, own=own, resume_from=last)
    assert_equal(elsewhere, whole, 0)
    shutil.rmtree(tmp_path / "whole" / f"checkpoint-{STEPS}")
    assert_equal(train(str(tmp_path / "whole"), resume=True, own=own), whole, 0)


def test_a_checkpoint_without_a_state(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train(str(tmp_path), with_callback=False)
    with pytest.raises(FileNotFoundError, match=f"checkpoint-{STEPS} has no state of a precond"):
        train(str(tmp_path), resume=True)


def test_optimizers_and_times_that_it_is_not_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match="a preconditioner of its own"):
        train(str(tmp_path), own=True, with_callback=True)
    with pytest.raises(RuntimeError, match="added after training had begun"):
        train(str(tmp_path), late=True)


def on_ranks(rank: int, ranks: int, folder: str, strategy: str) -> list[Any]:
    as_launched(rank, ranks)
    whole = train(folder, ranks=ranks, placed=strategy)
    last = str(Path(folder) / f"checkpoint-{SAVED}")
    resumed = train(folder, ranks=ranks, resume=last, placed=strategy)
    return [whole, resumed]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    """By DDP, with a state that is spread over the ranks."""
    pytest.importorskip("transformers")
    expected = plain()
    for whole, resumed in run_ranks(on_ranks, 2, str(tmp_path), "mem-opt"):
        assert_equal(whole, expected, 1e-8)
        assert_equal(resumed, whole, 0)
