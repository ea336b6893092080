"""A callback for the ``Trainer`` of Hugging Face transformers.

::

    trainer = Trainer(model, args, callbacks=[SoframeCallback(damping=1e-3)], ...)
    trainer.train()

The ``Trainer`` calls it once per optimizer step, after the gradients of all micro-batches have been
accumulated and clipped (``max_grad_norm``), and before the optimizer steps. With ``deepspeed=`` the
engine steps within the trainer's backward pass, and the engine's optimizer calls it.

With a `soframe.Optimizer` the callback, without settings, saves the optimizer's state on all ranks;
the ``Trainer`` alone saves it from rank 0, which only has all of it under ``comm-opt``.
"""

from __future__ import annotations

import operator
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # also without DeepSpeed
from transformers import TrainerCallback

from soframe.integrations.accelerate import load, plain, require_plain, save, unscale
from soframe.integrations.deepspeed import require_unscaled
from soframe.optimizer import Optimizer
from soframe.preconditioner import Preconditioner


class SoframeCallback(TrainerCallback):
    """Preconditions the gradients of a Hugging Face ``Trainer``.

    The preconditioner is built when training begins, from the trainer's model and optimizer at that
    time. Another ``train()`` goes on with it as long as the trainer goes on with these two. Its
    state is saved into the trainer's checkpoints, and a run that resumes loads it.

    Args:
        resume_from: The checkpoint that a run resumes from, if it is not
            ``checkpoint-{global_step}`` in the trainer's ``output_dir``.
        **settings: Settings of `soframe.Preconditioner`, except the optimizer and the gradient
            scaler.

    Attributes:
        preconditioner: The preconditioner; None until training begins.

    Raises:
        TypeError: If the optimizer is a `soframe.Optimizer` and there are settings, or was not
            passed to the trainer in ``optimizers=``.
        FileNotFoundError: If the checkpoint to resume from has no state of a preconditioner, or the
            trainer saves its checkpoints elsewhere than in ``output_dir``.
        ValueError: If a setting is out of range, the state belongs to another model, or DeepSpeed
            trains in float16, or without ZeRO in bfloat16.
    """

    def __init__(
        self, *, resume_from: str | os.PathLike[str] | None = None, **settings: Any
    ) -> None:
        self.preconditioner: Preconditioner | None = None
        self._settings, self._resume_from = settings, resume_from
        self._scaler: Any = None
        self._engines: Any = None  # the optimizer of DeepSpeed's engine
        self._stateful: Any = None
        self._trained: tuple[Any, Any] = None, None  # the model and its innermost optimizer

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over the state of a `soframe.Optimizer`."""
        optimizer = plain(kwargs["optimizer"])
        if not isinstance(optimizer, Optimizer):
            return
        if self._settings:
            require_plain(optimizer)
        self.preconditioner = optimizer.preconditioner
        self._stateful = SimpleNamespace(
            state_dict=optimizer.state_dict, load_state_dict=optimizer.load_state_dict
        )
        # The trainer saves from rank 0 alone, while ranks have to gather the state: see `on_save`.
        vars(optimizer)["state_dict"] = partial(torch.optim.Optimizer.state_dict, optimizer)
        vars(optimizer)["load_state_dict"] = lambda state: None  # when training begins, see there

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Build the preconditioner, and load its state if a run resumes."""
        if not isinstance(self._stateful, SimpleNamespace):
            self._build(args, kwargs["model"], kwargs["optimizer"])
        elif getattr(plain(kwargs["optimizer"]), "preconditioner", None) is not self.preconditioner:
            raise TypeError(
                "the trainer does not use the soframe.Optimizer of optimizers=, as with deepspeed: "
                "leave it out, and give SoframeCallback the settings of a preconditioner"
            )
        if state.global_step > 0:
            load(self._stateful, self._resume_from or _folder(args, state))

    def _build(self, args: Any, model: Any, optimizer: Any) -> None:
        require_plain(optimizer)
        former, self._trained = self._trained, (model, plain(optimizer))
        if all(map(operator.is_, self._trained, former)):
            return  # the trainer keeps the optimizer's state, too
        if self.preconditioner is not None:
            self.preconditioner.close()
        engines = isinstance(optimizer, DeepSpeedOptimizerWrapper)
        if engines:
            config = args.hf_deepspeed_config
            fp16, bf16 = (config.is_true(f"{name}.enabled") for name in ("fp16", "bf16"))
            stage = config.get_value("zero_optimization.stage", 0)
            require_unscaled(fp16=fp16, bf16=bf16, stage=stage)
            optimizer = optimizer.optimizer
        self._scaler = None if engines else getattr(optimizer, "scaler", None)
        self._stateful = self.preconditioner = Preconditioner(
            model, **{"optimizer": optimizer, "grad_scaler": self._scaler, **self._settings}
        )
        if engines and optimizer is not self._engines:  # else its step is this already
            self._engines, step = optimizer, optimizer.step

            def precondition_and_step(*args: Any, **keywords: Any) -> Any:
                assert self.preconditioner is not None
                self.preconditioner.step()
                return step(*args, **keywords)

            optimizer.step = precondition_and_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Precondition the gradients, unless an engine or a `soframe.Optimizer` has done so."""
        if self._stateful is self.preconditioner and self._engines is None:
            assert self.preconditioner is not None
            unscale(kwargs["optimizer"], self._scaler)
            self.preconditioner.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the preconditioner's state into the checkpoint that the trainer has written."""
        folder = _folder(args, state)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"the trainer has saved no {folder}: its checkpoint is elsewhere"
            )
        if self._stateful is not None:
            save(self._stateful, folder)


def _folder(args: Any, state: Any) -> Path:
    """Return the folder of the trainer's checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
