"""What the loss is multiplied by, where its gradients would underflow in half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.amp.grad_scaler import OptState


class LossScale:
    """Reads a ``GradScaler``.

    Args:
        scaler: The ``GradScaler`` in use, or a callable that returns the scale; None for a loss
            that is not scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler | Callable[[], float] | None) -> None:
        self._scaler = scaler

    @property
    def used(self) -> bool:
        """Whether the loss may be multiplied by anything."""
        return self._scaler is not None

    def now(self) -> float:
        """Return what the loss of the backward pass under way is multiplied by."""
        scaler = self._scaler
        if scaler is None:
            return 1.0
        return float(scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else scaler())

    def require_unscaled(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Check that gradients are no longer scaled, where that can be known.

        Args:
            optimizer: The optimizer of these gradients.

        Raises:
            RuntimeError: If the scaler has not unscaled them since the last step.
        """
        scaler = self._scaler
        if optimizer is None or not isinstance(scaler, torch.amp.GradScaler):
            return
        if not scaler.is_enabled():
            return
        known = scaler._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})
        if known["stage"] is OptState.READY:
            raise RuntimeError(
                "the gradients are still scaled: call scaler.unscale_(optimizer) between "
                "backward() and preconditioner.step()"
            )
