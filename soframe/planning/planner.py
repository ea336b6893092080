"""The planner: every placement of a task with its memory and time, their front, and a choice.

A plan needs no process group, no weights and no data: placements are data, and the hardware is
described (`soframe.planning.hardware`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from soframe import combinations
from soframe.planning.costs import Arithmetic, Costs, Part, parts
from soframe.planning.hardware import Hardware
from soframe.planning.memory import transients
from soframe.planning.schedule import STEP_KINDS, Messages, PricedPart, Schedule, Timing
from soframe.planning.task import Task
from soframe.registry import KINDS
from soframe.step.phases import seconds_of_rows
from soframe.strategies.base import Strategy
from soframe.strategies.kaisa import CommOpt, HybridOpt, MemOpt
from soframe.strategies.placement import Placement, complete
from soframe.strategies.plan import LocalPlan, Message, Step
from soframe.strategies.sharded import OwnerLocal, Sharded
from soframe.text import format_bytes, format_table

CLOSE = 1.05  # the ratio of times below which two options count as equally fast
BACKGROUND = 9  # the steps in the background that `varied` tries, if solves are not more frequent
# The most parts of ranks whose messages are priced: the largest loads, and the most common.
MOST_PRICED = 8

HEADER = ("  option", "ms", "longest", "exposed", "MB", "held", "MB sent", "imbalance", "samples")

LEGEND = """\
* no other, of as many samples, is both faster and smaller. ms of a step with the passes; exposed:
only the network works. MB of the fullest rank, at the peak of a step and held between steps;
imbalance: the longest solve of a rank over the mean."""


@dataclass(frozen=True)
class Option:
    """A strategy with the settings that a plan may vary.

    Attributes:
        strategy: The strategy.
        local: Whether soframe averages gradients, on the ranks that need them.
        background: The steps for which solves run beside training.
        stagger: Whether solves are spread over the steps of an interval.
        statistics_every: The interval of statistics; None for the method's own.
        solve_every: The interval of solves; None for the method's own.
    """

    strategy: Strategy
    local: bool = False
    background: int = 0
    stagger: bool = False
    statistics_every: int | None = None
    solve_every: int | None = None

    def __str__(self) -> str:
        """Return the option in few words."""
        strategy = _strategy_as_code(self.strategy).removeprefix("soframe.strategies.").strip("'")
        return ", ".join([strategy, *self._distribution(), *self._further()])

    def intervals(self, defaults: tuple[int, int]) -> tuple[int, int]:
        """Return the intervals of statistics and solves; the method's ``defaults`` for None."""
        # An interval is at least 1.
        return self.statistics_every or defaults[0], self.solve_every or defaults[1]

    def call(self) -> str:
        """Return the arguments of `soframe.Preconditioner` or `soframe.Optimizer`, to be pasted."""
        arguments = [f"strategy={_strategy_as_code(self.strategy)}"]
        if distribution := ", ".join(self._distribution().values()):
            arguments.append(f"distribution=soframe.Distribution({distribution})")
        arguments += self._further().values()
        return ", ".join(arguments)

    def _distribution(self) -> dict[str, str]:
        """Return the arguments of `soframe.Distribution`, by a word for each."""
        arguments: dict[str, str] = {}
        if self.local:
            arguments["local gradients"] = 'gradients="local"'
        if self.stagger:
            arguments["staggered"] = "stagger=True"
        return arguments

    def _further(self) -> dict[str, str]:
        """Return the other arguments that are not defaults, by a word for each."""
        arguments: dict[str, str] = {}
        if self.background:
            arguments[f"background {self.background}"] = f"background={self.background}"
        for name in ("statistics_every", "solve_every"):
            interval = getattr(self, name)
            if interval is not None:
                arguments[f"{name} {interval}"] = f"{name}={interval}"
        return arguments


@dataclass(frozen=True)
class Row:
    """An option with its costs; all numbers are of the rank that has most.

    Attributes:
        option: The option.
        memory: Bytes by category: ``"factors"``, ``"accumulators"``, ``"second_order"`` and
            ``"state"``, together ``"held"`` between steps; ``"window"``, the sums of a statistics
            step; ``"transient"``, the most that a step needs beside; and ``"total"``, the peak.
            The last three include solves that run in the background meanwhile.
        sent: Bytes of collectives in a mean step.
        timing: Seconds.
        intervals: The intervals of statistics and of solves that were priced.
        exact: Whether every rank's data enter all statistics, so that the number of ranks and the
            placement change nothing but cost.
    """

    option: Option
    memory: Mapping[str, int]
    sent: float
    timing: Timing
    intervals: tuple[int, int]
    exact: bool


@dataclass(frozen=True)
class Plan:
    """Rows of costs, the fastest first, and a choice.

    Attributes:
        rows: The options.
        ranks: The number of ranks.
        hardware: The hardware.
        limit: Bytes that a rank may hold for curvature; None without a limit.
        fixed: Bytes of a rank that no option changes: weights, gradients, activations, and the
            momentum of an optimizer behind a preconditioner. All have their full sizes:
            parameters that are sharded over ranks are not planned.
        plain: Seconds of a step without a preconditioner, whose gradients are averaged.
        notes: Parts without a price, with the reasons.
        recommended: The strategy of `soframe.recommend`; None without one.
    """

    rows: tuple[Row, ...]
    ranks: int
    hardware: Hardware
    limit: int | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    plain: float = 0.0
    notes: tuple[str, ...] = ()
    recommended: Strategy | None = None

    @cached_property
    def front(self) -> list[Row]:
        """The rows that are smaller than every faster row of as many samples."""
        front: list[Row] = []
        least = least_exact = math.inf  # bytes of the faster rows, and of the exact ones
        for row in self.rows:  # the fastest first
            size = row.memory["total"]
            # Rows of fewer samples are no match for a row of all.
            bound = least_exact if row.exact else least
            if size < bound:
                front.append(row)
            least = min(least, size)
            if row.exact:
                least_exact = min(least_exact, size)
        return front

    def peak(self, row: Row) -> int:
        """Return the most bytes of a device, in the passes or in the step."""
        # Activations are freed before the step; it needs more than is held in the passes.
        activations = self.fixed.get("activations", 0)
        always = sum(self.fixed.values()) - activations
        in_passes = activations + row.memory["held"] + row.memory["window"]
        in_step = row.memory["total"]
        return always + max(in_passes, in_step)

    def fits(self, row: Row) -> bool:
        """Return whether a row is within the limit and the memory of the device."""
        if not self._is_within_limit(row):
            return False
        return self.hardware.memory is None or self.peak(row) <= self.hardware.memory

    def _is_within_limit(self, row: Row) -> bool:
        return self.limit is None or row.memory["total"] <= self.limit

    @cached_property
    def fitting(self) -> list[Row]:
        """The rows within the limit and the memory of the device."""
        return [row for row in self.rows if self.fits(row)]

    @property
    def misfit(self) -> str:
        """The reason if no row fits, and a remedy."""
        least = min(self.rows, key=lambda row: row.memory["total"])
        if not self._is_within_limit(least):
            return (
                f"no strategy fits into memory_limit={self.limit} bytes a rank on {self.ranks} "
                f"rank(s): {least.option.call()} holds least, {least.memory['total']} bytes; raise "
                f"the limit, take more ranks, or lower max_size of the method"
            )
        least = min(self.rows, key=self.peak)
        fixed = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.fixed.items())
        return (
            f"no strategy fits into the {format_bytes(self.hardware.memory or 0)} of a device of "
            f"{self.hardware.name!r} on {self.ranks} rank(s): {least.option.call()} needs least, "
            f"{format_bytes(self.peak(least))} with {fixed}; plan a smaller batch, or a larger "
            f"device. Parameters sharded over ranks, as by fully_shard, are not planned"
        )

    @property
    def chosen(self) -> Row:
        """The fastest row that fits and uses all data; else the fastest that fits.

        The recommended strategy is chosen if no other is faster by more than `CLOSE`.

        Raises:
            ValueError: If none fits.
        """
        if not self.fitting:
            raise ValueError(self.misfit)
        fastest, recommended = self._fastest, self._recommended
        # With statistics of fewer samples it is no match for a row of all.
        if recommended is None or recommended.exact < fastest.exact:
            return fastest
        is_slower = recommended.timing.mean > CLOSE * fastest.timing.mean
        return fastest if is_slower else recommended

    @property
    def _fastest(self) -> Row:
        """The fastest row that fits, of those with all ranks' statistics if one has them."""
        return next((row for row in self.fitting if row.exact), self.fitting[0])

    @property
    def _recommended(self) -> Row | None:
        """The fastest fitting row of the recommended strategy."""
        rows = (row for row in self.fitting if row.option.strategy == self.recommended)
        return next(rows, None)

    @property
    def why(self) -> str:
        """The reason of the choice, in a sentence."""
        chosen, recommended = self.chosen, self._recommended
        why = self._why(chosen)
        if recommended is None or chosen.option.strategy == self.recommended:
            return why
        ratio = recommended.timing.mean / chosen.timing.mean
        return (
            f"{why}; the strategy of soframe.recommend, {recommended.option}, takes {ratio:.2f} "
            f"times as long"
        )

    def _why(self, chosen: Row) -> str:
        """Return the reason of a choice, beside the fastest row or the next one."""
        among = ""
        if self.limit is not None:
            among = f" of the ones within {format_bytes(self.limit)}"
        elif len(self.fitting) < len(self.rows):
            among = f" of the ones that fit into {self.hardware.name}"
        shortfall = "" if chosen.exact else "; no option with all ranks' statistics fits"
        other_rows = [row for row in self.fitting if row is not chosen]
        if not other_rows:
            return f"it is the only option{among}{shortfall}"
        fastest = self._fastest
        if chosen is not fastest:  # only the recommended strategy may be slower
            ratio = fastest.timing.mean / chosen.timing.mean
            return (
                f"it is the strategy of soframe.recommend; the fastest{among}, {fastest.option}, "
                f"takes {ratio:.2f} of its time"
            )
        next_row = other_rows[0]
        ratio = next_row.timing.mean / chosen.timing.mean
        if ratio < 1:  # a faster row was passed over, since its statistics are of fewer samples
            return (
                f"it is the fastest{among} whose statistics are of all ranks' data; with fewer "
                f"samples {next_row.option} takes {ratio:.2f} of its time"
            )
        return (
            f"it is the fastest{among}{shortfall}; the next, {next_row.option}, takes "
            f"{ratio:.2f} times as long"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        chosen, why = None, None
        if self.fitting:
            chosen, why = self.chosen.option.call(), self.why
        return {
            "hardware": self.hardware.name,
            "source": self.hardware.source,
            "ranks": self.ranks,
            "limit": self.limit,
            "fixed": dict(self.fixed),
            "plain": self.plain,
            "notes": list(self.notes),
            "rows": [_row_as_dict(row, self.fits(row)) for row in self.rows],
            "front": [row.option.call() for row in self.front],
            "chosen": chosen,
            "why": why,
        }

    def __str__(self) -> str:
        ordered = sorted(self.rows, key=self.fits, reverse=True)
        cells = [(f"{self._mark(row)} {row.option}", *_cells(row)) for row in ordered]
        title = f"planned for {self.ranks} rank(s), {self.hardware.name}"
        lines = [title, format_table(HEADER, cells), LEGEND]
        if len(self.fitting) < len(self.rows):
            lines.append("! does not fit.")
        lines += [f"note: {note}" for note in self.notes]
        if self.fitting:
            chosen = self.chosen
            intervals = "statistics every {} and solves every {} steps".format(*chosen.intervals)
            lines += ["", self.details(chosen), "", chosen.option.call(), intervals, self.why]
        return "\n".join(lines)

    def _mark(self, row: Row) -> str:
        if not self.fits(row):
            return "!"
        return "*" if row in self.front else " "

    def details(self, row: Row) -> str:
        """Return a row's time by phase and its memory by category, as a table."""
        phases = dict(row.timing.phases)
        for name, seconds in row.timing.exposed.items():
            phases[f"{name}, exposed"] = seconds
        times = [(name, f"{1e3 * seconds:.3g} ms") for name, seconds in phases.items() if seconds]
        sizes = {**self.fixed, **row.memory}
        held = [(name, format_bytes(size)) for name, size in sizes.items() if size]
        pairs = itertools.zip_longest(times, held, fillvalue=("", ""))
        return format_table(("time", "", "memory", ""), [time + size for time, size in pairs])


def _cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row behind its option, see `HEADER`."""
    return (
        f"{1e3 * row.timing.mean:.3g}",
        f"{1e3 * row.timing.longest:.3g}",
        f"{1e3 * sum(row.timing.exposed.values()):.3g}",
        _megabytes(row.memory["total"]),
        _megabytes(row.memory["held"]),
        _megabytes(row.sent),
        f"{row.timing.imbalance:.1f}",
        "all" if row.exact else "fewer",
    )


def _megabytes(size: float) -> str:
    """Return a size for a column of MB; with the unit where it is kB."""
    if 0 < size < 1e5:
        return f"{size / 1e3:,.1f} kB"
    return f"{size / 1e6:,.1f}"


def plan(
    task: Task,
    *,
    ranks: int,
    hardware: Hardware,
    memory_limit: int | None = None,
    options: Sequence[Option] | None = None,
    amp: bool = False,
    refused: Callable[[Placement], str | None] = lambda placement: None,
    recommended: Strategy | None = None,
) -> Plan:
    """Price options for a task.

    Args:
        task: The task.
        ranks: The number of ranks.
        hardware: The hardware.
        memory_limit: Bytes that a rank may hold for curvature at any time; None for no limit.
        options: The options; None for `usual`.
        amp: Whether the passes run in bfloat16.
        refused: Returns why the model or the settings exclude a placement, or None.
        recommended: The strategy of `soframe.recommend`, which is kept if it is about as fast.

    Returns:
        The plan, its rows sorted by time, without options that the task's blocks do not take.

    Raises:
        ValueError: If they take none.
    """
    costs = Costs(task, hardware, amp=amp)
    rows: list[Row] = []
    refusals: list[str] = []
    if options is None:
        options = usual(ranks)
    for option in options:
        placement = complete(option.strategy.place(costs.work, ranks))
        _, every = option.intervals(task.intervals)
        why = combinations.refused(task.blocks, placement, solve_every=every) or refused(placement)
        if why is None:
            rows.append(_row(costs, task, option, placement))
        else:
            refusals.append(why)
    if not rows:
        raise ValueError(refusals[0])
    fixed = {"weights": task.size + task.frozen, "gradients": task.size}
    fixed["activations"] = task.activations
    if amp:  # most activations have half of the bytes in bfloat16
        fixed["activations"] //= 2
    if any(block.captured for block in task.blocks):
        fixed["momentum"] = task.size
    rows.sort(key=lambda row: (row.timing.mean, row.memory["total"], row.option.call()))
    return Plan(
        rows=tuple(rows),
        ranks=ranks,
        hardware=hardware,
        limit=memory_limit,
        fixed=fixed,
        plain=_seconds_without_preconditioner(costs, task, ranks),
        notes=task.unpriced(),
        recommended=recommended,
    )


def strategies(ranks: int) -> list[Strategy]:
    """Return every strategy that soframe has, for a number of ranks; one for a single rank."""
    if ranks == 1:
        return [CommOpt()]
    several_workers: list[Strategy] = [CommOpt()]
    workers = 2
    while workers < ranks:
        several_workers.append(HybridOpt(gradient_workers=workers))
        workers *= 2
    one_worker = [MemOpt(), Sharded(group=None), Sharded(group=None, deferred=True), OwnerLocal()]
    if ranks > 4:
        one_worker += [Sharded(), Sharded(deferred=True)]
    return several_workers + one_worker


def usual(
    ranks: int, *, statistics_every: int | None = None, solve_every: int | None = None
) -> list[Option]:
    """Return the options of every strategy that soframe has.

    Args:
        ranks: The number of ranks.
        statistics_every: The interval of statistics; None for the method's own.
        solve_every: The interval of solves; None for the method's own.

    Returns:
        The options; each strategy with one gradient worker also with local gradients.
    """
    options: list[Option] = []
    for strategy in strategies(ranks):
        option = Option(strategy, statistics_every=statistics_every, solve_every=solve_every)
        options.append(option)
        # Where one rank makes the update of a block, it alone needs the averaged gradient.
        if not isinstance(strategy, CommOpt | HybridOpt):
            options.append(replace(option, local=True))
    return options


class Vary(StrEnum):
    """A setting that a plan varies beside the strategy."""

    BACKGROUND = "background"
    STAGGER = "stagger"


def varied(options: Sequence[Option], settings: Collection[Vary]) -> list[Option]:
    """Return options with all combinations of some settings, beside the options without them."""
    variations = list(options)
    if Vary.BACKGROUND in settings:
        for option in options:
            steps = min(BACKGROUND, option.solve_every or BACKGROUND)
            variations.append(replace(option, background=steps))
    if Vary.STAGGER in settings:
        in_step = [option for option in variations if not option.background]
        variations += [replace(option, stagger=True) for option in in_step]
    return variations


def _row(costs: Costs, task: Task, option: Option, placement: Placement) -> Row:
    """Price an option: the arithmetic and messages of its ranks, their time, and their memory."""
    placement.validate()
    intervals = option.intervals(task.intervals)
    statistics_every, solve_every = intervals

    # Ranks with the same work are one part. The rare and idle ones are priced without messages.
    ranks_of = parts(placement)
    arithmetic = {part: costs.arithmetic(placement, part) for part in ranks_of}
    parts_with_messages = _parts_to_price(ranks_of, arithmetic)
    local = _local_plan(task) if option.local else None
    is_fused = costs.hardware.device == "cuda"
    priced: list[PricedPart] = []
    sent = 0.0
    for part, ranks in ranks_of.items():
        messages: dict[str, Messages] = dict.fromkeys(STEP_KINDS, ())
        if part in parts_with_messages:
            for kind in STEP_KINDS:
                messages[kind] = _messages(placement, ranks[0], kind, local, is_fused)
        priced.append(PricedPart(len(ranks), arithmetic[part], messages))
        sent = max(sent, _bytes_sent(messages, statistics_every, solve_every))

    added = seconds_of_rows(costs.work, costs.hardware)
    schedule = _schedule(costs, task, priced, option, added)
    turns = solve_every if option.stagger else 1
    return Row(
        option,
        memory=_memory(costs, placement, ranks_of, background=option.background > 0),
        sent=sent,
        timing=schedule.timing(statistics_every, solve_every, turns),
        intervals=intervals,
        exact=not any(s.place.partial(s.work.factors) for s in placement.stacked),
    )


def _local_plan(task: Task) -> LocalPlan:
    """Return the gradients that soframe averages beside the blocks': of all other parameters."""
    in_blocks: set[int] = set()
    for block in task.blocks:
        in_blocks.update(map(id, block.parameters.values()))
    sizes: list[tuple[int, str]] = []
    for parameter in task.parameters:
        if id(parameter) not in in_blocks:
            sizes.append((parameter.numel(), str(parameter.dtype).removeprefix("torch.")))
    return LocalPlan(rest=tuple(sizes))


def _schedule(
    costs: Costs,
    task: Task,
    parts: Sequence[PricedPart],
    option: Option,
    added: Mapping[str, float],
) -> Schedule:
    """Return the steps of an option, with the seconds of phases that have a price of their own."""
    ranks = sum(part.ranks for part in parts)
    return Schedule(
        costs.hardware,
        parts,
        ranks=ranks,
        passes=costs.passes.seconds,
        # DistributedDataParallel averages, unless soframe does.
        gradients=0 if ranks == 1 or option.local else task.size,
        # Weights, gradients and momentum are read, weights and momentum written.
        optimizer=5 * task.size / costs.hardware.bandwidth,
        background=option.background,
        added=added,
    )


def _seconds_without_preconditioner(costs: Costs, task: Task, ranks: int) -> float:
    """Return the seconds of a step without a preconditioner."""
    part = PricedPart(ranks, Arithmetic(), dict.fromkeys(STEP_KINDS, ()))
    return _schedule(costs, task, [part], Option(CommOpt()), {}).timing(1, 1).mean


def _parts_to_price(
    ranks_of: Mapping[Part, Sequence[int]], arithmetic: Mapping[Part, Arithmetic]
) -> list[Part]:
    """Return the parts with the most arithmetic, and the most common ones."""

    def load(part: Part) -> float:
        return arithmetic[part].solve + arithmetic[part].direct

    by_load = sorted(ranks_of, key=load, reverse=True)
    by_ranks = sorted(ranks_of, key=lambda part: len(ranks_of[part]), reverse=True)
    half = MOST_PRICED // 2
    return list(dict.fromkeys(by_load[:half] + by_ranks[:half]))


def _messages(
    placement: Placement, rank: int, kind: str, local: LocalPlan | None, fused: bool
) -> list[tuple[str, list[Message]]]:
    """Return the collectives of a rank in a step of some kind, by phase."""
    return Step(
        placement.pairs,
        placement.stacks,
        rank,
        statistics=kind != "plain",
        solve=kind == "solve",
        local=local,
        fused=fused,
    ).phases()


def _bytes_sent(messages: Mapping[str, Messages], statistics_every: int, solve_every: int) -> float:
    """Return the bytes of a rank's collectives in a mean step."""
    # The shares of steps with statistics alone, with statistics and a solve, and with neither.
    statistics_alone = max(0.0, 1 / statistics_every - 1 / solve_every)
    shares = {"statistics": statistics_alone, "solve": 1 / solve_every}
    shares["plain"] = 1 - sum(shares.values())
    sent = 0.0
    for kind, share in shares.items():
        for _, collectives in messages[kind]:
            sent += share * sum(message.size for message in collectives)
    return sent


def _memory(
    costs: Costs, placement: Placement, ranks_of: Mapping[Part, Sequence[int]], *, background: bool
) -> dict[str, int]:
    """Return the bytes by category of the rank with most."""
    of_parts: list[dict[str, int]] = []
    for part, ranks in ranks_of.items():
        sizes = placement.memory(ranks[0])
        short = transients(costs, placement, part, ranks[0], background=background)
        held = sizes.pop("total")
        sizes |= {"held": held, "window": short.window, "transient": short.solving}
        of_parts.append({**sizes, "total": held + short.most})
    return max(of_parts, key=lambda sizes: sizes["total"])


def _strategy_as_code(strategy: Strategy) -> str:
    """Return a strategy as a user would write it."""
    kind = type(strategy)
    changed: list[str] = []
    for name, option in getattr(strategy, "__dataclass_fields__", {}).items():
        value = getattr(strategy, name)
        if value != option.default:
            changed.append(f"{name}={value!r}")
    registry = KINDS["strategy"]
    if not changed and kind in registry.available().values():
        return repr(registry.name_of(kind))
    return f"soframe.strategies.{kind.__name__}({', '.join(changed)})"


def _row_as_dict(row: Row, fits: bool) -> dict[str, Any]:
    option = {**vars(row.option), "strategy": _strategy_as_code(row.option.strategy)}
    timing = dataclasses.asdict(row.timing)
    added = {"option": option, "timing": timing, "call": row.option.call(), "fits": fits}
    return {**vars(row), **added}
