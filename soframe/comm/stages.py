"""The seam to `soframe.parallel.pipeline`: a step's communication with a model's other stages.

Under a pipeline the ranks of one process group, a *pipe*, hold one copy of a model, each with some
of its layers. Values of the whole model go over the pipe: whether gradients are finite, the length
of a step, errors. All other values go over the backend, among the copies of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from soframe.comm.base import Backend
from soframe.comm.report import Report

PHASE = "stages"
"""The phase that traffic between stages is counted under."""

STAGES = "stages"
"""The key of a state's stages."""


class Stages:
    """A model without a pipeline: every result is this rank's own, and nothing is sent."""

    backend: Backend | None = None  # of the pipe
    name = ""  # the stages of this rank, as text

    # -- at the start -------------------------------------------------------------------------

    def require_backend(self, backend: Backend | None) -> None:
        """Raise a ValueError if ``backend=`` does not join the copies of a stage."""

    def require_settings(self, *, probed: bool, scaled: bool) -> None:
        """Raise a ValueError if the stages cannot run a probed Fisher or a scaled loss."""

    def require_uncounted(self) -> None:
        """Raise a ValueError if a schedule runs the forward passes, so that none can be counted."""

    def require_served(self, model: nn.Module, blocks: Sequence[Any]) -> None:
        """Raise a ValueError if blocks lie outside the stages, or run in unsupported ways."""

    def say_failed(self, error: BaseException) -> None:
        """Send the other stages the error for which this one cannot start."""

    def meet(self, model: nn.Module, settings: str) -> nn.Module | None:
        """Compare settings, and return the module with the model's head, if a stage here has it."""
        return None

    def look_over(self, registration: Any) -> None:
        """Check the registrations of all stages together."""

    def own_part(self, saved: Any) -> Any:
        """Return this rank's part of a state."""
        return saved

    # -- micro-batches ------------------------------------------------------------------------

    def roots(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules whose arguments show the batch of a forward pass."""
        return (model,)

    def stage_of(self, block: Any) -> int:
        """Return the index of the stage with a block: a backward pass belongs to one stage."""
        return 0

    def scaled(self, loss_scale: Callable[[], float]) -> Callable[[], float]:
        """Return a function for the scale of output gradients relative to gradients."""
        return loss_scale

    # -- in a step ----------------------------------------------------------------------------

    def together(self) -> AbstractContextManager[None]:
        """Return a context that raises an error of all copies of one stage on all stages."""
        return nullcontext()

    def put_together(
        self, report: Report, common: Mapping[str, object], error: Exception | None
    ) -> tuple[Report, Exception | None]:
        """Reduce a report over stages, and compare their common values by name."""
        return report, error

    def spread(self, error: Exception | None) -> Exception | None:
        """Return this rank's error, or one that names another stage's if only that one failed."""
        return error

    def any(self, flag: bool) -> bool:
        """Return the logical or of a flag over stages."""
        return flag

    def largest(self, number: float) -> float:
        """Return the maximum of a number over stages."""
        return number

    def total(self, number: Tensor) -> Tensor:
        """Return the sum of a scalar over stages."""
        return number

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the sum of each of a few numbers over stages."""
        return numbers


ALONE = Stages()
