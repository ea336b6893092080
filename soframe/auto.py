"""The strategy ``"auto"``: measures the ranks, plans, and takes the fastest strategy that fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from soframe.registry import register
from soframe.strategies.base import Circumstances, Strategy
from soframe.strategies.kaisa import CommOpt
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockWork
from soframe.text import format_bytes, parse_bytes

if TYPE_CHECKING:
    from soframe.planning.hardware import Hardware
    from soframe.planning.planner import Plan

log = logging.getLogger("soframe")

RUNNERS_UP = 3  # that the report names


@register("strategy", "auto")
@dataclass(frozen=True)
class Auto(Strategy):
    """The fastest strategy within a limit of memory, by a plan on measured hardware.

    Once all ranks agree on the model and the settings, they measure at the same time: collectives
    over their group, products, and factorisations of the model's own sizes. All plan with the same
    medians. Equal measurements give equal choices. If a strategy with the statistics of all ranks
    fits, one of these is taken, so that the choice changes cost alone. Intervals and all other
    settings stay as they are. `Placement.notes` has the choice, the runners-up and the reason.

    Attributes:
        memory_limit: The bytes that a rank may hold for curvature at the peak of a step, as they
            are planned, as a number or as ``"2GiB"``; None for no limit.
        hardware: A profile by its name or file, in place of measuring; see `soframe plan`.
        budget: The seconds of measuring by the wall clock; two points of each curve are measured
            in any case.

    Raises:
        ValueError: If the limit has no unit that is known.
    """

    memory_limit: int | str | None = None
    hardware: str | Path | None = None
    budget: float = 4.0

    def __post_init__(self) -> None:
        self._limit()  # an error, if it is none

    def _limit(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        """Place as ``"comm-opt"``, for the comparison of ranks before they measure."""
        return CommOpt().place(work, ranks)

    def settled(self, now: Circumstances) -> Strategy:
        """Return the choice; every rank must call.

        Raises:
            ValueError: If no strategy fits into the limit, or ranks are simulated and there is no
                profile.
        """
        if not now.blocks:  # of a stage of a pipeline
            return CommOpt()
        # On one rank all strategies are alike.
        if now.ranks == 1 and self.memory_limit is None:
            return CommOpt()
        # Imported here: a run with a named strategy needs neither.
        from soframe.planning.planner import Option, plan, strategies
        from soframe.planning.task import Task

        base = Option(
            CommOpt(),
            local=now.local,
            background=now.background,
            stagger=now.stagger,
            statistics_every=now.statistics_every,
            solve_every=now.solve_every,
        )
        options = [replace(base, strategy=strategy) for strategy in strategies(now.ranks)]
        planned = plan(
            Task(now.blocks, now.work, now.parameters),
            ranks=now.ranks,
            # Activations are unknown here, so the limit alone counts.
            hardware=replace(self._hardware(now), memory=None),
            memory_limit=self._limit(),
            options=options,
            refused=now.refused,
        )
        note = f"chosen by a plan on {planned.hardware.name}, of {len(options)}: "
        note += f"{_prices(planned)}; {planned.why}"
        log.info("soframe: %s", note)
        return _Noted(planned.chosen.option.strategy, note)

    def _hardware(self, now: Circumstances) -> Hardware:
        from soframe.planning.hardware import Hardware
        from soframe.planning.measure import SIDES, measure

        if self.hardware is not None:
            return Hardware.load(self.hardware)
        if now.backend.on_paper:
            raise ValueError(
                "strategy 'auto' measures its ranks, and these are simulated: give it a profile, "
                "soframe.Auto(hardware=...)"
            )
        sides: set[int] = set()
        for work in now.work:
            sides.update(factor.size for factor in work.factors)
        return measure(
            now.blocks[0].device,
            backend=now.backend,
            sides=sorted(sides) or SIDES,
            dtypes=sorted({work.dtype for work in now.work}),
            budget=self.budget,
        )


def _prices(planned: Plan) -> str:
    """Return the time and the memory of the choice and of the runners-up."""
    rows = [planned.chosen]
    rows += [row for row in planned.fitting if row != planned.chosen][:RUNNERS_UP]
    prices: list[str] = []
    for row in rows:
        size = format_bytes(row.memory["total"])
        prices.append(f"{row.option} {1e3 * row.timing.mean:.3g} ms, {size}")
    return "; ".join(prices)


@dataclass(frozen=True)
class _Noted(Strategy):
    """A strategy whose placements have a further note."""

    inner: Strategy
    note: str

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        placement = self.inner.place(work, ranks)
        return replace(placement, notes=(*placement.notes, self.note))
