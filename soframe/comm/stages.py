"""Stages: what the ranks that have one model between them agree on, each with some of its layers.

Under a pipeline the ranks of one process group hold one copy of a model, a *pipe*. A backend of
theirs carries what concerns the whole model: whether gradients are finite, how long its step is,
what cannot go on. All else of a preconditioner is among the copies of a stage, over a backend of
their own. Each rank is in one pipe and among the copies of one stage, so that what is agreed over
one of these groups and then over the other is agreed by all.

Numbers are gathered and put together in the order of the ranks, so that all copies of all stages
have the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from soframe.comm.agreement import (
    add_over_ranks,
    compare_settings,
    describe_error,
    fingerprint,
    gather_texts,
    require_common,
    say_failed,
)
from soframe.comm.base import Backend

PHASE = "stages"
"""Under which phase what travels between stages is counted."""

_NOTHING = hashlib.sha256().digest()


@dataclass(frozen=True)
class Seen:
    """What a stage has seen of a step; together the largest of each number counts.

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
    """The ranks of one pipe.

    Args:
        backend: Their backend; None for a model that is in no pipe. All methods then give back what
            they are given, and send nothing.

    Attributes:
        backend: As given.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend

    # -- at the start -------------------------------------------------------------------------

    def say_failed(self, error: BaseException) -> None:
        """Tell the other stages that this one cannot start, and why.

        Args:
            error: Why.
        """
        if self.backend is not None:
            say_failed(self.backend, error)

    def compare(self, settings: str) -> None:
        """Check, where stages first meet, that they have the same settings.

        Args:
            settings: The settings, as text, one in each line.

        Raises:
            ValueError: On every rank, if they have not, or if one cannot start.
        """
        if self.backend is not None:
            compare_settings(self.backend, _NOTHING, settings)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let what all copies of one stage raise be raised on all stages.

        Yields:
            Nothing.
        """
        try:
            yield
        except Exception as error:  # whatever it is: other stages wait, and must be told
            self.require_none(error)
        else:
            self.require_none(None)

    # -- in a step ----------------------------------------------------------------------------

    def put_together(
        self, seen: Seen, common: Mapping[str, object], error: Exception | None
    ) -> tuple[Seen, Exception | None]:
        """Tell the other stages what this one has seen.

        Args:
            seen: What it has.
            common: What all stages must have in common, by name.
            error: What this rank is about to raise.

        Returns:
            What the stages have seen together, and the error; a `ValueError` where there was none
            and stages differ.
        """
        if self.backend is None:
            return seen, error
        names = [field.name for field in fields(seen)]
        digest = fingerprint(common)
        mine = [*(getattr(seen, name) for name in names), *digest]
        rows = self._gather(torch.tensor(mine, dtype=torch.float64, device="cpu")).tolist()
        every = [Seen(*row[: len(names)]) for row in rows]
        most = Seen(*(max(getattr(one, name) for one in every) for name in names))
        if most.failed:
            return most, error
        counted = {one.samples for one in every if one.passes == most.passes}
        if len(counted) > 1:
            text = ", ".join(f"{number:.0f}" for number in sorted(counted))
            return most, ValueError(
                f"in the backward passes since the last step the layers of different stages were "
                f"called with different numbers of samples ({text}), so how many the loss is a "
                f"mean over cannot be told: pass a callable samples= that returns it for one "
                f"micro-batch"
            )
        sums = [sum(column) for column in zip(*(row[len(names) :] for row in rows), strict=True)]
        try:
            require_common(self.backend, common, sums)
        except ValueError as differ:
            text = f"the stages of the pipeline differ (ranks are those of a pipe): {differ}"
            return most, ValueError(text)
        return most, None

    def spread(self, error: Exception | None) -> Exception | None:
        """Return why this pipe cannot go on, once all ranks know that some cannot.

        Args:
            error: This rank's reason, if it has one.

        Returns:
            The same; or else that of another stage, if one has any.
        """
        if self.backend is None:
            return error
        texts = gather_texts(self.backend, "" if error is None else describe_error(error), PHASE)
        said = "; ".join(
            f"rank {rank} of the pipe: {text}" for rank, text in enumerate(texts) if text
        )
        if error is None and said:
            return RuntimeError(f"another stage of the pipeline cannot go on, so none does. {said}")
        return error

    def require_none(self, problem: Exception | None) -> None:
        """Raise on all stages what one of them has found, the same on all copies of it.

        Args:
            problem: What this one has found.

        Raises:
            Exception: The problem, where there is one; a `RuntimeError` on the other stages.
        """
        if self.backend is not None and self.any(problem is not None):
            problem = self.spread(problem)
        if problem is not None:
            raise problem

    def any(self, flag: bool) -> bool:
        """Return whether something holds on any stage.

        Args:
            flag: Whether it holds on this one.
        """
        if self.backend is None:
            return flag
        return bool(self._gather(torch.tensor([float(flag)], device="cpu")).any())

    def largest(self, number: float) -> float:
        """Return the largest of a number over stages.

        Args:
            number: This stage's.
        """
        if self.backend is None:
            return number
        return float(self._gather(torch.tensor([number], dtype=torch.float64, device="cpu")).max())

    def total(self, number: Tensor) -> Tensor:
        """Return the sum of a number over stages.

        Args:
            number: A scalar of this stage.

        Returns:
            The sum, added up in float64, in the number's dtype and on its device.
        """
        if self.backend is None:
            return number
        rows = self._gather(number.detach().double().reshape(1))
        return rows.sum().to(number)

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the sum of each of a few numbers over stages."""
        return numbers if self.backend is None else add_over_ranks(self.backend, numbers)

    def texts(self, mine: str) -> list[str]:
        """Return every stage's text.

        Args:
            mine: This stage's.
        """
        return [mine] if self.backend is None else gather_texts(self.backend, mine, PHASE)

    def of(self, add: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what adds up a number over the copies of a stage, and then over stages.

        Args:
            add: Adds it up over the copies.
        """
        return lambda number: self.total(add(number))

    def _gather(self, numbers: Tensor) -> Tensor:
        """Return every stage's numbers, ``[ranks, numbers]``."""
        backend = self.backend
        assert backend is not None
        # Rows of zeros but for this rank's own: their sum has the bits of all.
        rows = numbers.new_zeros(backend.world_size, len(numbers))
        rows[backend.rank] = numbers
        rows = rows.to(backend.wire_device(rows.device))
        backend.all_reduce(rows, PHASE).wait()
        return rows


ALONE = Stages()
"""The stages of a model that one rank has whole."""
