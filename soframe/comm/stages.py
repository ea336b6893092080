"""The seam to `soframe.parallel.pipeline`: what a step asks of the other stages of a model.

Under a pipeline the ranks of one process group, a *pipe*, hold one copy of a model, each with some
of its layers. What concerns the whole model goes over the pipe: whether gradients are finite, the
length of a step, errors. All else is among the copies of a stage, over the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from soframe.comm.base import Backend

PHASE = "stages"
"""Under which phase the traffic between stages is counted."""

STAGES = "stages"
"""The key of a state for whose it is."""


@dataclass(frozen=True)
class Seen:
    """Status of a step on one stage; over stages, the largest of each number counts.

    Attributes:
        failed: Whether this rank is about to raise.
        changed: Whether its model has changed.
        bad_gradient: Whether a gradient is not finite.
        large: Whether one is so large that products of it may be out of range, or what it becomes
            may be.
        bad_statistics: Whether statistics are not finite.
        due: Whether it takes statistics.
        curved: Whether any block has factors.
        passes: How many backward passes gave statistics.
        samples: How many samples these had.
    """

    failed: float
    changed: float
    bad_gradient: float
    large: float
    bad_statistics: float
    due: float
    curved: float
    passes: float
    samples: float


class Stages:
    """A model that a rank has whole: every answer is its own, and nothing is sent.

    Attributes:
        backend: The backend of the pipe; None here.
        name: Which stages this rank has, as text; empty here.
    """

    backend: Backend | None = None
    name = ""

    # -- at the start -------------------------------------------------------------------------

    def require_backend(self, backend: Backend | None) -> None:
        """Raise a ValueError if ``backend=`` is not that of the copies of a stage."""

    def require_settings(self, *, probed: bool, scaled: bool) -> None:
        """Raise a ValueError for a Fisher that is probed, or a scaled loss, if these cannot be."""

    def require_uncounted(self) -> None:
        """Raise a ValueError if a schedule runs the forward passes, so that none can be counted."""

    def require_served(self, model: nn.Module, blocks: Sequence[Any]) -> None:
        """Raise a ValueError if blocks are not those of the stages, or run in unserved ways."""

    def say_failed(self, error: BaseException) -> None:
        """Send the other stages the error for which this one cannot start."""

    def meet(self, model: nn.Module, settings: str) -> nn.Module | None:
        """Compare settings, and return the module with the model's head, if a stage here has it."""
        return None

    def look_over(self, registration: Any) -> None:
        """Check what the stages have registered together."""

    def own_part(self, saved: Any) -> Any:
        """Return this rank's part of a state."""
        return saved

    # -- micro-batches ------------------------------------------------------------------------

    def part_of(self, block: Any) -> int:
        """Return which of this rank's stages has a block: a backward pass is of one stage."""
        return 0

    def scaled(self, loss_scale: Callable[[], float]) -> Callable[[], float]:
        """Return a function for the scale of output gradients relative to gradients."""
        return loss_scale

    def miscounted(self, passes: float) -> Exception | None:
        """Return an error if a step had other backward passes than the schedule's."""
        return None

    # -- in a step ----------------------------------------------------------------------------

    def together(self) -> AbstractContextManager[None]:
        """Return a context: an error that all copies of one stage raise is raised on all stages."""
        return nullcontext()

    def put_together(
        self, seen: Seen, common: Mapping[str, object], error: Exception | None
    ) -> tuple[Seen, Exception | None]:
        """Reduce the status over stages, and compare what they must have in common, by name."""
        return seen, error

    def spread(self, error: Exception | None) -> Exception | None:
        """Return this rank's error, or one that names another stage's, once some rank has one."""
        return error

    def require_none(self, problem: Exception | None) -> None:
        """Raise a problem, the same on all copies of this stage, on all stages."""
        if problem is not None:
            raise problem

    def any(self, flag: bool) -> bool:
        """Return whether something holds on any stage."""
        return flag

    def largest(self, number: float) -> float:
        """Return the largest of a number over stages."""
        return number

    def total(self, number: Tensor) -> Tensor:
        """Return the sum of a scalar over stages."""
        return number

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the sum of each of a few numbers over stages."""
        return numbers

    def of(self, add: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that adds up over the copies of a stage, and then over stages."""
        return lambda number: self.total(add(number))


ALONE = Stages()
