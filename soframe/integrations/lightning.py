"""A callback for the ``Trainer`` of Lightning.

::

    trainer = lightning.Trainer(callbacks=[SoframeCallback(damping=1e-3)], ...)
    trainer.fit(module, data)

Lightning calls it once per optimizer step, after the gradients of all micro-batches
(``accumulate_grad_batches``) have been accumulated and unscaled, and before clipping
(``gradient_clip_val``), which applies to preconditioned gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from soframe.integrations.accelerate import require_plain
from soframe.preconditioner import Preconditioner

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # its former name, which is still published
    from pytorch_lightning.callbacks import Callback


class SoframeCallback(Callback):
    """Preconditions the gradients of a Lightning module with one optimizer.

    The preconditioner is built when training starts. Its state is part of Lightning's checkpoints,
    and a run that resumes (``ckpt_path``) loads it.

    Args:
        **settings: Settings of `soframe.Preconditioner`, except the optimizer and the gradient
            scaler.

    Attributes:
        preconditioner: The preconditioner; None until training starts.

    Raises:
        TypeError: When training starts, if the optimizer is a `soframe.Optimizer`, which needs no
            callback.
        ValueError: When training starts, if the module has not one optimizer, a setting is out of
            range, or the checkpoint has no state or another model's.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.preconditioner: Preconditioner | None = None
        self._settings = settings
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the preconditioner, and load its state if a run resumes."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"SoframeCallback is for modules with one optimizer, and this has "
                f"{len(trainer.optimizers)}: build soframe.Preconditioner in configure_optimizers "
                f"and call its step in on_before_optimizer_step, for the optimizer that it is of"
            )
        (optimizer,) = trainer.optimizers
        require_plain(optimizer)
        saved, self._saved = self._saved, {}
        goes_on = trainer.global_step > 0
        if self.preconditioner is not None:
            if goes_on and not saved:  # a second call of fit
                saved = self.preconditioner.state_dict()
            self.preconditioner.close()
        if goes_on and not saved:
            raise ValueError(
                f"training goes on from step {trainer.global_step} without the state of its "
                f"preconditioner, so that it would not be the run that was interrupted: the "
                f"checkpoint was saved without this callback"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.preconditioner = Preconditioner(
            pl_module, **{"optimizer": optimizer, "grad_scaler": scaler, **self._settings}
        )
        if saved:
            self.preconditioner.load_state_dict(saved)

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Precondition the gradients."""
        assert self.preconditioner is not None
        self.preconditioner.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the preconditioner's state; Lightning calls it on every rank."""
        return {} if self.preconditioner is None else self.preconditioner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until training starts."""
        self._saved = state_dict
