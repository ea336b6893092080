"""What the loss is multiplied by, where its gradients would underflow in half precision.

The scale is read while a backward pass runs, on one rank, where nothing may be raised: the other
ranks would wait for that pass. So what is wrong is kept until the step, at which ranks agree on
errors; the statistics of such a pass are NaN, which nobody uses.

A scale that nobody told of cannot be seen in the gradients. A ``GradScaler`` leaves no mark on what
it scales either. But it notes which optimizers it has unscaled, and its tensor counts how often it
was updated. So a preconditioner that was given none looks for such objects at its first steps.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from numbers import Real

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

LEAST, MOST = 1e-100, 1e100
"""Scales are squared, in numbers of 64 bits."""

LOOKS = 2
"""Steps at which a preconditioner without a ``GradScaler`` looks for one; it takes milliseconds."""


class LossScale:
    """Reads a ``GradScaler``.

    Args:
        scaler: The ``GradScaler`` in use, or a callable that returns the scale or, where it is not
            there yet, the ``GradScaler``; None for a loss that is not scaled.

    Raises:
        TypeError: If it is something else.
    """

    def __init__(self, scaler: torch.amp.GradScaler | Callable[[], float] | None) -> None:
        if not (scaler is None or callable(scaler) or isinstance(scaler, torch.amp.GradScaler)):
            raise TypeError(
                f"grad_scaler must be a torch.amp.GradScaler, a callable that returns what the "
                f"loss is multiplied by, or None, not {scaler!r}"
            )
        self._scaler = scaler
        self._known = scaler if isinstance(scaler, torch.amp.GradScaler) else None
        self._problem: Exception | None = None
        self._read: tuple[object, float] | None = None  # from which version of a tensor, and what
        self._of_window: float | None = None
        self._looks = 0 if scaler is None else LOOKS
        self._others: dict[int, _Other] = {}

    def begin(self) -> None:
        """Begin a window: everything until the next step, or until a batch is given up."""
        self._of_window, self._problem = None, None

    @property
    def used(self) -> bool:
        """Whether the loss may be multiplied by anything."""
        return self._scaler is not None

    def now(self) -> float:
        """Return what the loss of the backward pass under way is multiplied by.

        Returns:
            The scale; NaN if it is none, which `check` raises.
        """
        scaler = self._scaler
        if scaler is None:
            return 1.0
        try:
            told = scaler if isinstance(scaler, torch.amp.GradScaler) else scaler()
            if not isinstance(told, torch.amp.GradScaler):
                return _checked("grad_scaler()", told)
            self._known = told
            return self._of_scaler(told) if told.is_enabled() else 1.0
        except Exception as error:  # whatever it is: it is raised at the step, on all ranks
            self._problem = self._problem or error
            return math.nan

    def _of_scaler(self, scaler: torch.amp.GradScaler) -> float:
        tensor = scaler._scale
        if tensor is None:
            raise RuntimeError(
                "the given grad_scaler has not scaled the loss: call scaler.scale(loss).backward()"
            )
        version = (id(tensor), tensor._version)
        if self._read is None or self._read[0] != version:
            self._read = (version, float(scaler.get_scale()))  # makes the host wait
        scale = _checked("the scale of grad_scaler", self._read[1])
        if self._of_window is not None and _backed_off(scaler, self._of_window, scale):
            # The gradients of the earlier passes overflowed and nobody stepped: these statistics
            # belong to no step, and with those of this pass in one sum.
            return math.nan
        if self._of_window not in (None, scale):
            raise RuntimeError(
                f"the scale of grad_scaler changed from {self._of_window} to {scale} between two "
                f"backward passes of one step, so that their gradients do not add up: call "
                f"scaler.update() after scaler.step() alone, and preconditioner.reset_batch() "
                f"where gradients are zeroed without a step"
            )
        self._of_window = scale
        return scale

    def changed(self) -> bool:
        """Return whether a ``GradScaler`` has another scale than in a pass of this window.

        A scaler that finds an overflow lets the optimizer not step: then the window has passes
        whose gradients are zeroed without a step.
        """
        if self._known is None or self._of_window is None or self._known._scale is None:
            return False
        tensor = self._known._scale
        if self._read is not None and self._read[0] == (id(tensor), tensor._version):
            return False
        return float(self._known.get_scale()) != self._of_window  # makes the host wait

    def check(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Check, before a step, that gradients are no longer scaled, as far as can be known.

        Args:
            optimizer: The optimizer of these gradients, where it is known.

        Raises:
            RuntimeError: If the scaler has not unscaled them since the last step; or if a
                ``GradScaler`` that was not given has.
            Exception: What reading the scale has raised in a backward pass of this window.
        """
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        if self._scaler is None:
            self._look_for_others(optimizer)
        elif self._known is not None and self._known.is_enabled():
            _require_unscaled(self._known, optimizer)

    def _look_for_others(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Look for a ``GradScaler`` that scales this loss, though it was not given."""
        if self._looks < LOOKS:
            self._looks += 1
            for scaler in _live_scalers():
                self._others.setdefault(id(scaler), _Other(scaler))
        for number, other in list(self._others.items()):
            used = other.use(optimizer)
            if used == "by this optimizer":
                raise RuntimeError(
                    "a GradScaler unscales the gradients of this optimizer, and the preconditioner "
                    "was not given it, so that statistics would carry the square of the scale: "
                    "pass grad_scaler=scaler"
                )
            if used == "in this loop":
                del self._others[number]
                warnings.warn(
                    "soframe: a GradScaler is in use between steps of a preconditioner that was "
                    "not given it. If it scales this model's loss the statistics carry the square "
                    "of the scale: pass grad_scaler=scaler, and call scaler.unscale_(optimizer) "
                    "before preconditioner.step(). If it scales another one's, pass "
                    "grad_scaler=lambda: 1.0",
                    stacklevel=9,
                )


class _Other:
    """A ``GradScaler`` that was not given, held weakly.

    Args:
        scaler: The scaler.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = weakref.ref(scaler)
        self._updates = _updates(scaler)

    def use(self, optimizer: torch.optim.Optimizer | None) -> str:
        """Return how it is in use, as far as can be known without reading a tensor.

        Args:
            optimizer: The optimizer of the preconditioner's gradients, where it is known.

        Returns:
            ``"by this optimizer"``, ``"in this loop"``, or an empty text.
        """
        scaler = self._scaler()
        if scaler is None:
            return ""
        if any(_stage(scaler, one) is not OptState.READY for one in _unwrapped(optimizer)):
            return "by this optimizer"
        return "in this loop" if _updates(scaler) != self._updates else ""


def _backed_off(scaler: torch.amp.GradScaler, before: float, now: float) -> bool:
    """Return whether a scale is lower by what a scaler multiplies it with at each overflow."""
    while before > now and not math.isclose(before, now):
        before *= scaler.get_backoff_factor()
        if math.isclose(before, now):
            return True
    return False


def _checked(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not LEAST <= value <= MOST:  # type: ignore[operator]  # it is real
        raise ValueError(
            f"{name} must be a positive, finite number (from {LEAST:g} to {MOST:g}), not {value!r}"
        )
    return float(value)  # type: ignore[arg-type]  # it is real


def _require_unscaled(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None
) -> None:
    remedy = "call scaler.unscale_(optimizer) between backward() and preconditioner.step()"
    if optimizer is None:
        stages = [state["stage"] for state in scaler._per_optimizer_states.values()]
        if OptState.UNSCALED not in stages:
            raise RuntimeError(
                f"the gradients are still scaled, as the GradScaler has unscaled no optimizer's: "
                f"{remedy}, and pass optimizer= as well. If they are unscaled in another way, pass "
                f"grad_scaler=scaler.get_scale"
            )
        return
    stages = [_stage(scaler, one) for one in _unwrapped(optimizer)]
    if OptState.STEPPED in stages:
        raise RuntimeError(
            "preconditioner.step() came after scaler.step(optimizer), which it was to prepare: "
            "call it between scaler.unscale_(optimizer) and scaler.step(optimizer)"
        )
    if OptState.UNSCALED not in stages:
        raise RuntimeError(f"the gradients are still scaled: {remedy}")


def _unwrapped(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.optim.Optimizer]:
    """Yield an optimizer and those that it wraps, as Accelerate's does; a scaler knows the last."""
    while isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _stage(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> OptState:
    """Return what a scaler has done to an optimizer's gradients since its last update."""
    known = scaler._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})
    stage: OptState = known["stage"]
    return stage


def _updates(scaler: torch.amp.GradScaler) -> int:
    """Return a number that grows with every update of a scaler that has scaled something."""
    return 0 if scaler._scale is None else scaler._scale._version


_NO_SCALER_AT: dict[int, int] = {}
"""The id of each class of scalers -> how many objects referred to it when there was no scaler."""


def _live_scalers() -> list[torch.amp.GradScaler]:
    """Return the enabled scalers of this process: objects refer to their classes.

    To go through all objects takes a tenth of a second in a large process. An object counts among
    those that refer to its class, so that there is nothing new where their number is that of the
    last time; without a global lock these counts are not exact, and say nothing.
    """
    kinds: list[type] = [torch.amp.GradScaler]
    for kind in kinds:
        kinds += set(kind.__subclasses__()).difference(kinds)
    counts = {id(kind): sys.getrefcount(kind) for kind in kinds}
    if counts == _NO_SCALER_AT and getattr(sys, "_is_gil_enabled", lambda: True)():
        return []
    scalers = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    _NO_SCALER_AT.clear()
    if not scalers:
        _NO_SCALER_AT.update(counts)
    return [one for one in scalers if one.is_enabled()]
