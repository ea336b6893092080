"""The status of a step: each rank's flags and weights, reduced over all ranks by one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from soframe.comm.agreement import add_over_ranks
from soframe.comm.base import Backend
from soframe.step.clip import Limits


@dataclass(frozen=True)
class Settings:
    """The settings of one step, evaluated.

    Attributes:
        damping: The damping of blocks without one of their own.
        decay: The EMA decay of running averages.
        limits: The bounds of the clips.
    """

    damping: float
    decay: float
    limits: Limits


@dataclass(frozen=True)
class Poll:
    """Status of one rank before a step; summed by one all-reduce.

    Every field is a number or a list of numbers, equally long on every rank.

    Attributes:
        failed: Whether this rank is about to raise an error instead of taking the step.
        changed: Whether parameters or modules of the model have changed.
        bad_gradient: Whether a gradient is not finite.
        large: Whether gradients are so large that products with them may not be finite.
        bad_statistics: Whether the statistics of the window are not finite.
        common: The `fingerprint` of the settings that decide which collectives are entered.
        weights: The weights of this rank's statistics.
        present: Which gradients this rank has, where gradients are local.
        rebuilt: Under a pipeline, whether any stage's model has changed.
        waits: Whether this rank still solves in the background, where that matters.
        reached: Gradients and statistics of each block, see `soframe.step.effect`.
    """

    failed: float
    changed: float
    bad_gradient: float
    large: float
    bad_statistics: float
    common: Sequence[float]
    weights: Sequence[float] = ()
    present: Sequence[float] = ()
    rebuilt: Sequence[float] = ()
    waits: Sequence[float] = ()
    reached: Sequence[float] = ()

    def over_ranks(self, backend: Backend) -> Poll:
        """Return the sums over all ranks, the same on every rank."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        # One buffer for all fields: one all-reduce per step.
        flat: list[float] = []
        for value in mine.values():
            flat += [value] if isinstance(value, float) else value
        sums = iter(add_over_ranks(backend, flat))
        added = {
            name: next(sums) if isinstance(value, float) else [next(sums) for _ in value]
            for name, value in mine.items()
        }
        return Poll(**added)  # type: ignore[arg-type]  # each as it was


@dataclass(frozen=True)
class Status:
    """The status of a step on which all ranks have agreed.

    Attributes:
        finite: Whether the gradients of all ranks are finite; None if it is read later.
        weights: The weights of the statistics of all ranks; None if statistics are not used.
        settings: The settings of this step.
    """

    finite: bool | None
    weights: Sequence[float] | None
    settings: Settings
