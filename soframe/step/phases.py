"""The phases of a step after the agreement: one table, for the step, for metrics and for plans.

A new phase is its file and one row::

    def average_weights(step: Step) -> None:
        ...

    add(Phase("weights", average_weights, when="counts", seconds=price), after="write")

The step calls the function at its place, on all ranks. Profilers see its range, metrics have its
time and the traffic under its name, and plans add its seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

from soframe.blocks.block import Block
from soframe.curvature import Curvature
from soframe.diagnostics.metrics import Measuring
from soframe.estimate import averages, updates
from soframe.estimate.gradients import Gradients
from soframe.estimate.plan import UNDAMPED, Plan
from soframe.estimate.updates import Update
from soframe.kernels.precision import within
from soframe.schedules import NEVER
from soframe.setup.grouping import Grouping
from soframe.step.clip import Clipping, clip_updates
from soframe.step.verdict import Verdict
from soframe.strategies.work import BlockWork

When = Literal["always", "statistics", "finite", "unread", "counts", "discarded", "apart"]
"""The steps in which a phase runs, the same on every rank:

- ``"always"``: all;
- ``"statistics"``: those with statistics in the window that are finite on all ranks;
- ``"finite"``: all but those whose gradients are known not to be finite;
- ``"unread"``: those whose flags of gradients are still on the device;
- ``"counts"``: those whose updates count;
- ``"discarded"``: those whose updates do not;
- ``"apart"``: all, with several ranks or sharded parameters.
"""


@dataclass(eq=False)
class Step:
    """A step under way, with the results of its phases."""

    curvature: Curvature
    plan: Plan  # that ranks have agreed on
    verdict: Verdict  # whether the updates count
    clipping: Clipping
    measuring: Measuring  # keeps the numbers of the step
    moving_optimizer: Grouping | None  # moves the weights; None where updates replace gradients
    gradients: Gradients = field(default_factory=dict)  # averaged, from phase *average* on
    updates: list[Update] = field(default_factory=list)  # from phase *direct* on
    # Whether the updates count, as far as the host knows: they are finite. False before phase
    # *clip*, which does not run if gradients are known not to be finite.
    counts: bool = False
    clip_factors: Mapping[str, Tensor] = field(default_factory=dict)  # from phase *clip* on


class Machine(Protocol):
    """The hardware of a plan, for `Phase.seconds`."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""

    @property
    def launch(self) -> float:
        """Seconds of an operator at least."""


@dataclass(frozen=True)
class Phase:
    """A phase: a row of the table.

    Attributes:
        name: The name of its range, times and traffic.
        run: Its function.
        when: The steps in which it runs.
        is_range: Whether all of it is one range; False if the function opens ranges of this name
            around its work.
        within: The names of phases that begin within it.
        seconds: Returns its seconds on a rank, for the planner, given the shapes of all blocks; the
            planner prices the phases of soframe by the code that they call.
    """

    name: str
    run: Callable[[Step], None]
    when: When = "always"
    is_range: bool = True
    within: tuple[str, ...] = ()
    seconds: Callable[[Sequence[BlockWork], Machine], float] | None = None

    def runs_in(self, step: Step) -> bool:
        """Return whether it runs in a step, after the phases before it."""
        match self.when:
            case "always":
                return True
            case "statistics":
                return step.plan.weights is not None
            case "finite":
                return step.plan.finite is not False
            case "unread":
                return step.plan.finite is None
            case "counts":
                return step.counts
            case "discarded":
                return not step.counts
            case "apart":
                return step.curvature.placed.is_apart


# -- the phases of soframe ------------------------------------------------------------------------


def reduce(step: Step) -> None:
    """Reduce the sums of the window, and average them into the running factors."""
    plan = step.plan
    assert plan.weights is not None
    step.curvature.statistics.fold(plan.weights, plan.decay, plan.step)


def average(step: Step) -> None:
    """Read the averaged gradients, and note the blocks that missed their turn for statistics."""
    curvature, plan = step.curvature, step.plan
    step.gradients = curvature.averaged_gradients.collect(plan.present)
    due = curvature.statistics.window.due
    # A turn whose statistics are not finite is missed by no block.
    is_dropped = plan.weights is None and bool(due)
    if curvature.placed.captured and not is_dropped:
        refresh = curvature.parts.refresh
        refresh.note_missed_turns(curvature.placed, due, step.gradients, plan.step)


def observe(step: Step, *, after: bool = False) -> None:
    """Average statistics of the gradients, before updates are made or ``after``."""
    placed = step.curvature.placed
    for stack in placed.observing:
        if stack.like.method.refreshes_after == after:
            averages.observe(placed, stack, step.gradients.get(stack), step.plan)


def solve(step: Step, *, after: bool = False) -> None:
    """Solve the blocks that are due, before updates are made or ``after`` they are written."""
    curvature, plan = step.curvature, step.plan
    parts, placed = curvature.parts, curvature.placed
    # Blocks whose factors have changed: second-order data may be refreshed without a solve.
    changed: Collection[Block] = ()
    if plan.weights is not None and not after:
        changed = curvature.statistics.window.due
    due: Sequence[Block] = ()
    if plan.solve_every != NEVER:  # else `Curvature.solve` is called for it
        due = parts.refresh.due(placed, plan, after=after)
    with within("full"):
        parts.solves.advance(
            placed,
            due,
            damping=plan.damping,
            counters=curvature.counts,
            step=plan.step,
            changed=changed,
        )


def direct(step: Step) -> None:
    """Compute the updates."""
    step.updates = step.curvature.direct(step.gradients, step.plan.damping)


def send(step: Step) -> None:
    """Send the updates from gradient workers to their receivers."""
    updates.exchange(step.curvature.placed, step.updates)


def judge(step: Step) -> None:
    """Read the flags of the gradients, or leave them on the device if it can choose by them."""
    blocks: list[Block] = []
    for update in step.updates:
        blocks += update.blocks
    for stack in step.curvature.averaged_gradients.left_to_optimizer:
        blocks += stack.blocks
    if _can_select(step, blocks):
        step.verdict.leave(blocks)
    else:
        always_large = step.curvature.relatively_damped
        step.plan = step.verdict.read(step.plan, always_large=always_large)


def _can_select(step: Step, blocks: Sequence[Block]) -> bool:
    """Return whether the device can choose between former and new states and updates by a flag.

    All ranks return the same, as reading the flags may be a collective.
    """
    plan, curvature = step.plan, step.curvature
    # Large updates are checked and clipped in float64, if the host knows of them.
    if not step.verdict.moderate or plan.damping < UNDAMPED or curvature.relatively_damped:
        return False
    # The optimizer has to keep the weights by the flag, too.
    if step.moving_optimizer is not None and not step.moving_optimizer.selects():
        return False
    # The flag is on one device.
    if len({stack.like.device for stack in curvature.placed.stacks}) != 1:
        return False
    # The host decides whether averaged gradients enter running factors.
    if curvature.placed.observing:
        return False
    # The host decides on first updates, too.
    return all(block.record.updates > 0 for block in blocks)


def clip(step: Step) -> None:
    """Scale the updates to the bounds of the clips, and find whether they are finite."""
    curvature = step.curvature
    factors = clip_updates(
        step.updates,
        curvature.averaged_gradients,
        step.clipping.clips,
        step.plan,
        curvature.parts.stages,
    )
    if factors is not None:
        step.counts, step.clip_factors = True, factors


def measure(step: Step) -> None:
    """Keep the numbers of the step."""
    step.measuring.note(
        step.curvature.placed.blocks,
        step.gradients,
        step.updates,
        step.plan,
        finite=step.counts,
        factors=step.clip_factors,
    )


def write(step: Step) -> None:
    """Overwrite the gradients, unless an optimizer moves the weights, and store new states."""
    parts, verdict = step.curvature.parts, step.verdict
    if step.moving_optimizer is None:
        if verdict.good is not None:
            verdict.zero_if_bad(step.updates, parts.model.parameters(), parts.home)
        updates.write(step.updates, parts.home)
    verdict.commit(step.updates)


def skip(step: Step) -> None:
    """Count the skipped step, and zero the gradients unless an optimizer moves the weights."""
    parts = step.curvature.parts
    step.verdict.skip(step.plan)
    if step.moving_optimizer is None:  # a bad batch costs one update, and not the weights
        for gradient in parts.home.of(parts.model.parameters()):
            gradient.zero_()


PHASES = [
    Phase("reduce", reduce, when="statistics"),
    Phase("average", average),
    # A gradient that is not finite would stay in the averages for ever.
    Phase("observe", observe, when="finite", is_range=False),
    Phase("solve", solve, is_range=False, within=("share",)),
    Phase("direct", direct, is_range=False),
    Phase("exchange", send, when="apart", is_range=False),
    # Late: the device has computed the flags while the host queued the work before.
    Phase("agree", judge, when="unread", is_range=False),
    Phase("clip", clip, when="finite", is_range=False),
    # Before `write`: gradient matrices may be views of the memory that it overwrites.
    Phase("measure", measure, is_range=False),
    Phase("observe", partial(observe, after=True), when="counts", is_range=False),
    Phase("write", write, when="counts"),
    Phase("write", skip, when="discarded", is_range=False),
    Phase("solve", partial(solve, after=True), when="counts", is_range=False),
]
"""The phases after the agreement, in order."""


def add(phase: Phase, *, after: str) -> None:
    """Add a phase behind the last row of a name, in this process; all ranks must add the same.

    Raises:
        ValueError: If no phase has the name ``after``, or one has the new name.
    """
    named = [row.name for row in PHASES]
    if after not in named or phase.name in names():
        raise ValueError(
            f"phase {phase.name!r} after {after!r}: phases are {', '.join(names())}, and a new one "
            f"has another name"
        )
    last = max(row for row, name in enumerate(named) if name == after)
    PHASES.insert(last + 1, phase)


def names() -> list[str]:
    """Return the names of all phases, in the order in which they first begin."""
    ordered = ["accumulate", "agree"]
    for row in PHASES:
        ordered += [row.name, *row.within]
    return list(dict.fromkeys([*ordered, "move"]))


def seconds_of_rows(work: Sequence[BlockWork], machine: Machine) -> Mapping[str, float]:
    """Return the seconds of the phases that have a price of their own."""
    return {row.name: row.seconds(work, machine) for row in PHASES if row.seconds is not None}
