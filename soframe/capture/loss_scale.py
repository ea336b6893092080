"""The factor of a scaled loss, which keeps float16 gradients from underflow.

The scale is read during a backward pass, where one rank must not raise: the other ranks would hang
in that pass. So an error is kept until the step, where all ranks raise together; the statistics of
such a pass are NaN, and are dropped (`soframe.capture.counting.Passes.loss_scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from soframe.checks.values import is_number

LEAST, MOST = 1e-100, 1e100
"""Scales are squared, in numbers of 64 bits."""


class LossScale:
    """Reads a ``GradScaler``, or a callable that returns the scale or the ``GradScaler``."""

    def __init__(self, scaler: torch.amp.GradScaler | Callable[[], float] | None) -> None:
        self._scaler, self.is_given = scaler, scaler is not None
        self._known: torch.amp.GradScaler | None = None
        if isinstance(scaler, torch.amp.GradScaler):
            self._known = scaler
        self._version: tuple[int, int] | None = None  # of the scale that was read last
        self._scale = 1.0

    def reader(self) -> Callable[[], float]:
        """Return a function for the scale of the backward pass under way.

        Between its calls the scale of a GradScaler must stay: each window has a reader of its own.
        """
        of_window: list[float] = []

        def now() -> float:
            if self._scaler is None:
                return 1.0
            scale = self._current()
            if not isinstance(scale, torch.amp.GradScaler):
                return _checked("grad_scaler()", scale)
            if not scale.is_enabled():
                return 1.0
            number = self._of_scaler(scale)
            if of_window and of_window[0] != number:
                raise RuntimeError(
                    f"the scale of grad_scaler changed from {of_window[0]} to {number} between two "
                    f"backward passes of one step, so that their gradients do not add up: call "
                    f"scaler.update() after scaler.step() alone, and zero the gradients of a batch "
                    f"that is given up"
                )
            of_window.append(number)
            return number

        return now

    def _current(self) -> object:
        """Return the GradScaler, or the callable's present result; remember a GradScaler."""
        scale: object = self._scaler
        if callable(scale):
            scale = scale()
            if isinstance(scale, torch.amp.GradScaler):
                self._known = scale
        return scale

    def _of_scaler(self, scaler: torch.amp.GradScaler) -> float:
        tensor = scaler._scale
        if tensor is None:
            raise RuntimeError(
                "the given grad_scaler has not scaled the loss: call scaler.scale(loss).backward()"
            )
        version = (id(tensor), tensor._version)
        if self._version != version:
            self._scale = float(scaler.get_scale())  # makes the host wait
            self._version = version
        return _checked("the scale of grad_scaler", self._scale)

    def check(self, optimizer: torch.optim.Optimizer | None, *, half: bool, probed: bool) -> None:
        """Check before a step that gradients are no longer scaled."""
        # `half`: layers with float32 parameters had float16 gradients; `probed`: statistics are of
        # probes, which are not scaled, and have no `reader`.
        if self._scaler is None and half:
            raise RuntimeError(
                "the model runs under float16 autocast and grad_scaler= is not given; if a "
                "GradScaler scales the loss, the statistics carry the square of its scale. Pass "
                "grad_scaler=scaler, or grad_scaler=lambda: 1.0 for a loss that is not scaled"
            )
        if probed and self._known is None:
            self._current()
        if self._known is not None and self._known.is_enabled():
            _require_unscaled(self._known, optimizer)


def _checked(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value) or not LEAST <= value <= MOST:  # type: ignore[operator]  # it is real
        raise ValueError(
            f"{name} must be a positive, finite number (from {LEAST:g} to {MOST:g}), not {value!r}"
        )
    return float(value)  # type: ignore[arg-type]  # it is real


def _require_unscaled(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None
) -> None:
    remedy = "call scaler.unscale_(optimizer) between backward() and preconditioner.step()"
    states = scaler._per_optimizer_states
    if optimizer is None:
        if not any(state["stage"] is OptState.UNSCALED for state in states.values()):
            raise RuntimeError(
                f"the gradients are still scaled, as the GradScaler has unscaled no optimizer's: "
                f"{remedy}, and pass optimizer= as well. If they are unscaled in another way, pass "
                f"grad_scaler=scaler.get_scale"
            )
        return
    known = [id(layer) for layer in _unwrapped(optimizer) if id(layer) in states]
    stages = [states[number]["stage"] for number in known]
    if OptState.STEPPED in stages:
        raise RuntimeError(
            "preconditioner.step() came after scaler.step(optimizer), which it was to prepare: "
            "call it between scaler.unscale_(optimizer) and scaler.step(optimizer)"
        )
    if OptState.UNSCALED not in stages:
        raise RuntimeError(f"the gradients are still scaled: {remedy}")


def _unwrapped(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.optim.Optimizer]:
    """Yield an optimizer and the ones it wraps (as in Accelerate); a scaler unscales the last."""
    while isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)
