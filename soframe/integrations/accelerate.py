"""A preconditioner for loops with Accelerate: it steps when the optimizer does.

::

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    preconditioner = AcceleratedPreconditioner(accelerator, model, optimizer)
    ...
    with accelerator.accumulate(model):
        accelerator.backward(loss(model(x), y))
        preconditioner.step()  # between backward() and optimizer.step(), in each micro-batch
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from soframe import checkpoint
from soframe.preconditioner import Preconditioner

KEY = "preconditioner"
FOLDER = "soframe"
"""The preconditioner's folder within a trainer's checkpoint."""


class AcceleratedPreconditioner:
    """Steps with Accelerate's optimizer, and is saved and loaded with Accelerate's state.

    ``accelerator.save_state`` and ``load_state`` run on every rank, as the state of a
    preconditioner needs; ``register_for_checkpointing`` would keep only rank 0's.

    Args:
        accelerator: The ``Accelerator``.
        model: The model returned by ``accelerator.prepare``.
        optimizer: The optimizer returned by ``accelerator.prepare``.
        **settings: Further settings of `soframe.Preconditioner`, except the optimizer and the
            gradient scaler.

    Attributes:
        preconditioner: The `soframe.Preconditioner`, with ``observe``, ``count`` and ``report``.

    Raises:
        TypeError: If the optimizer is a `soframe.Optimizer`, which needs no preconditioner.
        ValueError: If a setting is out of range, or the combination of model and trainer is
            refused.
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
    ) -> None:
        require_plain(optimizer)
        self._accelerator, self._optimizer = accelerator, optimizer
        self.preconditioner = Preconditioner(
            model, **{"optimizer": optimizer, "grad_scaler": accelerator.scaler, **settings}
        )
        self._hooks = [
            accelerator.register_save_state_pre_hook(
                lambda models, weights, folder: save(self.preconditioner, folder)
            ),
            accelerator.register_load_state_pre_hook(
                lambda models, folder: load(self.preconditioner, folder)
            ),
        ]

    def step(self) -> None:
        """Precondition the gradients, if this micro-batch is the last before a step.

        Scaled gradients are unscaled first. To clip raw gradients call
        ``accelerator.clip_grad_norm_`` before this, not after.

        Raises:
            RuntimeError: See `soframe.Preconditioner.step`.
            ValueError: See `soframe.Preconditioner.step`.
        """
        if self._accelerator.sync_gradients:
            unscale(self._optimizer, self._accelerator.scaler)
            self.preconditioner.step()

    def close(self) -> None:
        """Remove every hook, Accelerate's too."""
        for hook in self._hooks:
            hook.remove()
        self.preconditioner.close()


def plain(optimizer: Any) -> Any:
    """Return the innermost optimizer of a wrapped one, such as Accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def require_plain(optimizer: Any) -> None:
    """Raise a TypeError if an optimizer, perhaps wrapped, preconditions by itself."""
    preconditioner = getattr(plain(optimizer), "preconditioner", None)
    if isinstance(preconditioner, Preconditioner):
        raise TypeError(
            "the optimizer is a soframe optimizer, which has a preconditioner of its own: give it "
            "to the trainer as any other optimizer, and leave this one out"
        )


def unscale(optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
    """Unscale gradients that the `GradScaler` has not unscaled since its last update."""
    if scaler is None or not scaler.is_enabled():
        return
    inner = plain(optimizer)
    # The scaler itself raises if gradients, clipped in between, would be unscaled twice.
    if scaler._per_optimizer_states[id(inner)]["stage"] is OptState.READY:
        scaler.unscale_(inner)


def save(stateful: Any, folder: str | os.PathLike[str]) -> None:
    """Save the state of a preconditioner or an optimizer into the folder of a trainer's checkpoint.

    Call on every rank.
    """
    checkpoint.save(Path(folder) / FOLDER, {KEY: stateful.state_dict()}, keep=1)


def load(stateful: Any, folder: str | os.PathLike[str]) -> None:
    """Load a state that `save` wrote; call on every rank."""
    last = checkpoint.latest(Path(folder) / FOLDER)
    if last is None:
        raise FileNotFoundError(
            f"{folder} has no state of a preconditioner (a folder {FOLDER!r}), so that a resumed "
            f"run would not be the one that was interrupted: it was saved without soframe"
        )
    stateful.load_state_dict(checkpoint.read(last)[KEY])
