"""The schedule of a step: three streams, the points at which ranks wait for one another, and turns.

A rank computes on one stream, solves in the background on another, and the network is a third.
Phases come in the order of the step's table (`soframe.step.phases`):

- gradients are averaged in buckets while the backward pass runs;
- statistics travel from the end of their step to the beginning of the next, or to the solve;
- results of solves, and updates, travel while further ones are computed;
- every step begins with an agreement, at which all ranks wait for the last.

A message's time is *exposed* where no rank computes meanwhile.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from soframe.planning.costs import Arithmetic
from soframe.planning.hardware import Hardware
from soframe.step.phases import names
from soframe.strategies.plan import Message

BUCKET = 25e6  # bytes of a bucket of DistributedDataParallel
FORWARD = 1 / 3  # the forward pass's part of both passes: the backward pass has twice its products

Messages = Sequence[tuple[str, Sequence[Message]]]


@dataclass(frozen=True)
class PricedPart:
    """Ranks with equal work, by its price."""

    ranks: int
    arithmetic: Arithmetic
    messages: Mapping[str, Messages]  # collectives by phase, of each of `STEP_KINDS`


STEP_KINDS = ("plain", "statistics", "solve")


@dataclass(frozen=True)
class Timing:
    """Seconds of a step.

    Attributes:
        mean: The mean over an interval of solves.
        longest: The longest step.
        phases: The mean of each phase, of the rank that the others wait for.
        exposed: The part of the mean in which only the network works, by phase.
        imbalance: The longest solve of a rank over the mean of all ranks.
    """

    mean: float
    longest: float
    phases: Mapping[str, float]
    exposed: Mapping[str, float]
    imbalance: float


Amounts = defaultdict[str, float]
"""Seconds by phase; of a step ``"total"``, ``"busy <phase>"`` and ``"exposed <phase>"``."""


class Durations(NamedTuple):
    """Seconds of messages in a step, by phase."""

    totals: Amounts
    longest: Amounts  # of one message


class _Clock:
    """The time of all ranks and of the network, from step to step."""

    def __init__(self, *, is_crowded: bool) -> None:
        self._is_crowded = is_crowded  # ranks compute and send on the same processors
        self.now = self.network = self.arrival = self.solved = 0.0
        self.spent = Amounts(float)

    def compute(self, phase: str, seconds: float) -> None:
        self.spent[f"busy {phase}"] += seconds
        self.now += seconds

    def send(self, seconds: float, since: float, last: float = 0.0) -> float:
        """Start messages, the first since some time and the last of them now; return their end."""
        if self._is_crowded:
            since = self.now
        self.network = max(max(self.network, since) + seconds, self.now + last)
        return self.network

    def wait(self, phase: str, until: float) -> None:
        self.spent[f"exposed {phase}"] += max(0.0, until - self.now)
        self.now = max(self.now, until)


class Schedule:
    """The steps of one placement; rare parts with little work may have no messages."""

    def __init__(
        self,
        hardware: Hardware,
        parts: Sequence[PricedPart],
        *,
        ranks: int,
        passes: float,  # seconds of a forward and backward pass
        gradients: int,  # bytes that DistributedDataParallel averages; 0 if soframe does
        optimizer: float,  # seconds of the optimizer's step
        background: int,  # steps for which solves run on a stream of their own
        added: Mapping[str, float],  # seconds of phases with a price of their own
    ) -> None:
        self._hardware, self._parts, self._background = hardware, parts, background
        crowd = hardware.crowd(ranks)
        self._is_crowded = crowd >= 1
        slowdown = max(1.0, crowd)
        self._passes, self._optimizer = slowdown * passes, slowdown * optimizer
        self._added = {name: slowdown * time for name, time in added.items()}
        buckets = -(-gradients // BUCKET)
        size = gradients / max(1, buckets)
        self._bucket = hardware.collective("all_reduce", size, range(ranks))
        self._average = buckets * self._bucket
        # The longest of a rank, or the work of all where more ranks compute than processors.
        self._slowest: dict[str, float] = {}
        for field in fields(Arithmetic):
            longest = total = 0.0
            for part in parts:
                seconds = getattr(part.arithmetic, field.name)
                longest = max(longest, seconds)
                total += part.ranks * seconds
            self._slowest[field.name] = max(longest, crowd * total / ranks)
        self._network: dict[str, Durations] = {}
        for kind in STEP_KINDS:
            self._network[kind] = self._durations([part.messages[kind] for part in parts])

    def _durations(self, messages_of_parts: Sequence[Messages]) -> Durations:
        """Return the durations of messages of the parts whose messages take longest."""
        totals, longest = Amounts(float), Amounts(float)
        for messages in messages_of_parts:
            of_part = Amounts(float)
            for phase, collectives in messages:
                for route, size in collectives:
                    seconds = self._hardware.collective(route.operation, size, route.group)
                    of_part[phase] += seconds
                    longest[phase] = max(longest[phase], seconds)
            for phase, seconds in of_part.items():
                totals[phase] = max(totals[phase], seconds)
        return Durations(totals, longest)

    def timing(self, statistics_every: int, solve_every: int, turns: int = 1) -> Timing:
        """Return the time of a step, with the solves of an interval spread over some turns."""
        usual = "statistics" if statistics_every == 1 else "plain"
        base = self._steps([usual, usual])[1]  # as all later ones
        solving, longest = self._extra("solve", usual, base)
        gathering, long = Amounts(float), base["total"]
        if usual == "plain":
            gathering, long = self._extra("statistics", usual, base)
        rarely = max(0.0, 1 / statistics_every - 1 / solve_every)
        mean = Amounts(float)
        for name in dict.fromkeys(itertools.chain(base, solving, gathering)):
            mean[name] = base[name] + solving[name] / solve_every + gathering[name] * rarely
        return Timing(
            mean=mean["total"],
            longest=max(base["total"] + (longest - base["total"]) / turns, long),
            phases=_of(mean, "busy "),
            exposed=_of(mean, "exposed "),
            imbalance=self._imbalance(),
        )

    def _extra(self, kind: str, usual: str, base: Amounts) -> tuple[Amounts, float]:
        """Return the times that a step and its effects add to usual steps, and the longest step."""
        after = max(1, self._background)
        steps = self._steps([usual, kind, *itertools.repeat(usual, after)])[1:]
        added = Amounts(float)
        for name in dict.fromkeys(itertools.chain.from_iterable(steps)):
            total = sum(step[name] for step in steps)
            added[name] = total - (1 + after) * base[name]
        return added, max(step["total"] for step in steps)

    def _imbalance(self) -> float:
        longest = total = ranks = 0.0
        for part in self._parts:
            longest = max(longest, part.arithmetic.solve)
            total += part.ranks * part.arithmetic.solve
            ranks += part.ranks
        return longest * ranks / total if total else 1.0

    def _steps(self, kinds: Sequence[str]) -> list[Amounts]:
        """Return the times of successive steps; a solve in the background lands in a later one."""
        clock, steps, lands = _Clock(is_crowded=self._is_crowded), list[Amounts](), None
        for number, kind in enumerate(kinds):
            clock.spent, start = Amounts(float), clock.now
            if kind == "solve" and self._background:
                lands = number + self._background
            self._step(clock, kind, landing=number == lands)
            clock.spent["total"] = clock.now - start
            steps.append(clock.spent)
        return steps

    def _step(self, clock: _Clock, kind: str, *, landing: bool) -> None:
        slowest, network = self._slowest, self._network[kind]
        clock.compute("forward", FORWARD * self._passes)
        backward = clock.now
        clock.compute("backward", (1 - FORWARD) * self._passes)
        if kind != "plain":
            clock.compute("statistics", slowest["statistics"])
        if self._average:
            clock.wait("average", clock.send(self._average, backward, self._bucket))
        # Sums of an earlier step.
        clock.wait("reduce", clock.arrival)
        self._exchange(clock, "agree", network)
        for phase in names():
            match phase:
                case "reduce" if kind != "plain":
                    self._reduce(clock, network)
                case "average":
                    self._exchange(clock, "gradients", network)
                    # Both, of gradients into stacks and of updates from them.
                    clock.compute("write", slowest["write"])
                case "observe":
                    clock.compute("observe", slowest["observe"])
                case "solve":
                    self._solve(clock, kind, landing=landing)
                case "direct":
                    start = clock.now
                    clock.compute("direct", slowest["direct"])
                    self._exchange(clock, "exchange", network, since=start)
                case _ if phase in self._added:
                    clock.compute(phase, self._added[phase])
        clock.compute("optimizer", self._optimizer)

    def _reduce(self, clock: _Clock, network: Durations) -> None:
        """Average sums into factors, and start to send them."""
        clock.compute("reduce", self._slowest["reduce"])
        seconds = network.totals["reduce"]
        clock.arrival = clock.now
        if seconds:
            clock.arrival = clock.send(seconds, clock.now)
        if self._is_crowded:
            clock.wait("reduce", clock.now + seconds)

    def _solve(self, clock: _Clock, kind: str, *, landing: bool) -> None:
        """Solve, or begin to in the background; share the results, also of an earlier solve."""
        seconds = self._slowest["solve"]
        if kind == "solve":
            clock.wait("reduce", clock.arrival)  # for the sums
            start = clock.now
            if self._background:
                clock.compute("solve", seconds if self._is_crowded else 0.0)
                clock.solved = clock.now + seconds
            else:
                clock.compute("solve", seconds)
                self._exchange(clock, "share", self._network["solve"], since=start)
        if landing:
            clock.wait("solve", clock.solved)
            self._exchange(clock, "share", self._network["solve"])

    def _exchange(
        self, clock: _Clock, phase: str, network: Durations, since: float | None = None
    ) -> None:
        """Send a phase's messages and wait: while arithmetic makes them, if it began before."""
        seconds = network.totals[phase]
        if seconds:
            if since is None:
                since = clock.now
            clock.wait(phase, clock.send(seconds, since, network.longest[phase]))


def _of(amounts: Amounts, prefix: str) -> dict[str, float]:
    """Return the amounts of all phases whose names have a prefix, which is left out."""
    return {n.removeprefix(prefix): v for n, v in amounts.items() if n.startswith(prefix)}
