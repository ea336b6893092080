"""A callback for the ``Trainer`` of Hugging Face transformers.

::

    trainer = Trainer(model, args, callbacks=[SoframeCallback(damping=1e-3)], ...)
    trainer.train()

The ``Trainer`` calls it once per optimizer step, after the gradients of all micro-batches have been
accumulated and clipped (``max_grad_norm``), and before the optimizer steps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from soframe.integrations.accelerate import load, require_plain, save, unscale
from soframe.preconditioner import Preconditioner


class SoframeCallback(TrainerCallback):
    """Preconditions the gradients of a Hugging Face ``Trainer``.

    The preconditioner is built when training begins, from the trainer's model and optimizer at that
    time. Its state is saved into the trainer's checkpoints, and a run that resumes loads it.

    Args:
        resume_from: The checkpoint that a run resumes from, if it is not
            ``checkpoint-{global_step}`` in the trainer's ``output_dir``.
        **settings: Settings of `soframe.Preconditioner`, except the optimizer and the gradient
            scaler.

    Attributes:
        preconditioner: The preconditioner; None until training begins.

    Raises:
        TypeError: When training begins, if the optimizer is a `soframe.Optimizer`, which needs no
            callback.
        FileNotFoundError: If the checkpoint to resume from has no state of a preconditioner, or the
            trainer saves its checkpoints elsewhere than in ``output_dir``.
        ValueError: If a setting is out of range, or the state belongs to another model.
    """

    def __init__(
        self, *, resume_from: str | os.PathLike[str] | None = None, **settings: Any
    ) -> None:
        self.preconditioner: Preconditioner | None = None
        self._settings, self._resume_from = settings, resume_from
        self._scaler: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Build the preconditioner, and load its state if a run resumes."""
        optimizer = kwargs["optimizer"]
        require_plain(optimizer)
        if self.preconditioner is not None:
            self.preconditioner.close()
        self._scaler = getattr(optimizer, "scaler", None)
        self.preconditioner = Preconditioner(
            kwargs["model"],
            **{"optimizer": optimizer, "grad_scaler": self._scaler, **self._settings},
        )
        if state.global_step > 0:
            load(self.preconditioner, self._resume_from or _folder(args, state))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Precondition the gradients."""
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
        if self.preconditioner is not None:
            save(self.preconditioner, folder)


def _folder(args: Any, state: Any) -> Path:
    """Return the folder of the trainer's checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
