"""The report of a rank before a step: numbers that are reduced over stages and over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from soframe.comm.agreement import add_over_ranks
from soframe.comm.base import Backend


def _reduced(*, stages: str = "", ranks: str = "", **default: Any) -> Any:
    """Return a field of a report with its reductions."""
    return field(metadata={"stages": stages, "ranks": ranks}, **default)


@dataclass(frozen=True)
class Report:
    """The numbers of a rank before a step.

    Over the stages of a model the reduction is the maximum, over ranks the sum; each field has the
    ones that its metadata name. Lists are equally long on every rank.
    """

    failed: float = _reduced(stages="max", ranks="sum")  # raises an error instead of the step
    bad_gradient: float = _reduced(stages="max", ranks="sum")  # a gradient is not finite
    large: float = _reduced(stages="max", ranks="sum")  # products with one, or updates, overflow
    bad_statistics: float = _reduced(stages="max", ranks="sum")  # some are not finite
    changed: float = _reduced(ranks="sum")  # this stage has other parameters or modules
    changed_stages: float = _reduced(stages="max")  # any stage has
    due: float = _reduced(stages="max")  # the window takes statistics
    curved: float = _reduced(stages="max")  # any block has factors
    passes: float = _reduced(stages="max")  # backward passes with statistics
    samples: float = _reduced(stages="max")  # of these passes, the most of any stage here
    fewest: float = _reduced(stages="max")
    # The fingerprint of the values that decide which collectives are entered.
    common: Sequence[float] = _reduced(ranks="sum", default=())
    weights: Sequence[float] = _reduced(ranks="sum", default=())  # of this rank's statistics
    present: Sequence[float] = _reduced(ranks="sum", default=())  # local gradients that are here
    changed_anywhere: Sequence[float] = _reduced(ranks="sum", default=())  # under a pipeline
    waits: Sequence[float] = _reduced(ranks="sum", default=())  # still solves in the background
    reached: Sequence[float] = _reduced(ranks="sum", default=())  # see `soframe.step.effect`

    def numbers(self) -> list[float]:
        """Return the numbers that stages reduce."""
        return [getattr(self, name) for name in OVER_STAGES]

    def with_numbers(self, numbers: Sequence[float]) -> Report:
        """Return the report with other `numbers`, of a model with several stages."""
        named: dict[str, Any] = dict(zip(OVER_STAGES, numbers, strict=True))
        return replace(self, **named, changed_anywhere=[named["changed_stages"]])

    def over_ranks(self, backend: Backend) -> Report:
        """Return the sums over all ranks, the same on every rank, by one all-reduce."""
        flat: list[float] = [getattr(self, name) for name in _NUMBERS]
        for name in _LISTS:
            flat += getattr(self, name)
        sums = iter(add_over_ranks(backend, flat))
        total: dict[str, Any] = {name: next(sums) for name in _NUMBERS}
        for name in _LISTS:
            total[name] = list(islice(sums, len(getattr(self, name))))
        return replace(self, **total)


OVER_STAGES = tuple(f.name for f in fields(Report) if f.metadata["stages"])
OVER_RANKS = tuple(f.name for f in fields(Report) if f.metadata["ranks"])
_LISTS = tuple(f.name for f in fields(Report) if f.default == ())
_NUMBERS = tuple(name for name in OVER_RANKS if name not in _LISTS)
