"""The phases of a step after the agreement: one table, for the step, for metrics and for plans.

A new phase is its file and one row::

    def average_weights(step: Step) -> None:
        ...

    add(Phase("weights", average_weights, when="counts", seconds=price), after="write")

The step calls the function at its place, on all ranks. Profilers see its range, metrics have its
time and the traffic under its name, and plans add its seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from soframe.blocks.block import Block
from soframe.curvature import Curvature
from soframe.diagnostics.metrics import Measuring
from soframe.estimate.gradients import Gradients
from soframe.estimate.plan import UNDAMPED, Plan
from soframe.estimate.updates import Update, exchange
from soframe.setup.grouping import Grouping
from soframe.step import clip as clips
from soframe.step.clip import Clipped, Clipping
from soframe.step.magnitude import discard
from soframe.step.verdict import Verdict
from soframe.strategies.work import BlockWork

When = Literal["always", "statistics", "finite", "unread", "counts", "discarded"]
"""The steps in which a phase runs, the same on every rank: all; those with statistics in the
window; unless gradients are known not to be finite; with flags of gradients that are still on the
device; if the updates count; or if they do not."""


@dataclass(eq=False)
class Step:
    """A step under way, with the results of its phases.

    Attributes:
        curvature: The curvature.
        plan: The plan that ranks have agreed on.
        verdict: Whether the updates count.
        clipping: The clips.
        measuring: Keeps the numbers of the step.
        grouping: The optimizer, if it groups parameters by method.
        gradients: The averaged gradients, from phase *average* on.
        updates: The updates, from phase *direct* on.
        clipped: Whether updates are finite, and the factors of clips, from phase *clip* on.
    """

    curvature: Curvature
    plan: Plan
    verdict: Verdict
    clipping: Clipping
    measuring: Measuring
    grouping: Grouping | None
    gradients: Gradients = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    clipped: Clipped = field(default_factory=lambda: Clipped(finite=False))

    def is_in(self, when: When) -> bool:
        """Return whether phases of this kind run now."""
        match when:
            case "always":
                return True
            case "statistics":
                return self.plan.weights is not None
            case "finite":
                return self.plan.finite is not False
            case "unread":
                return self.plan.finite is None
            case "counts":
                return self.clipped.finite
            case "discarded":
                return not self.clipped.finite


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


# -- the phases of soframe ------------------------------------------------------------------------


def average(step: Step) -> None:
    """Read the gradients, averaged over ranks, and note which blocks were used."""
    step.gradients = step.curvature.averaged.raw()
    step.curvature.end_window(step.gradients, step.plan)


def direct(step: Step) -> None:
    """Compute the updates."""
    step.updates = step.curvature.direct(step.gradients, step.plan)


def judge(step: Step) -> None:
    """Read the flags of the gradients, or leave them on the device if it can select."""
    blocks: list[Block] = []
    for update in step.updates:
        blocks += update.blocks
    for stack in step.curvature.averaged.apart:
        blocks += stack.blocks
    if _can_select(step, blocks):
        step.verdict.leave(blocks)
    else:
        always_large = step.curvature.relatively_damped
        step.plan = step.verdict.read(step.plan, always_large=always_large)


def _can_select(step: Step, blocks: Sequence[Block]) -> bool:
    """Return whether the device can select the new states of blocks and their updates.

    It cannot where the host decides by the flags: on statistics of gradients, on first updates, and
    on float64 for large gradients. After a step that was not moderate the host reads again. All
    ranks find the same, as reading may be a collective.
    """
    plan, curvature = step.plan, step.curvature
    if not step.verdict.moderate or plan.damping < UNDAMPED or curvature.relatively_damped:
        return False
    if step.grouping is not None and not step.grouping.selects():
        return False
    stacks = curvature.placed.stacks
    if len({stack.like.device for stack in stacks}) != 1:
        return False
    if any(stack.like.observes for stack in stacks):
        return False
    return all(block.record.updates > 0 for block in blocks)


def clip(step: Step) -> None:
    """Scale the updates to the bounds of the clips, and find whether they are finite."""
    curvature = step.curvature
    step.clipped = clips.clip(
        step.updates,
        curvature.averaged,
        step.clipping.clips,
        step.plan,
        stages=curvature.parts.stages,
    )


def measure(step: Step) -> None:
    """Keep the numbers of the step."""
    step.measuring.note(
        step.curvature.placed.blocks,
        step.gradients,
        step.updates,
        step.plan,
        finite=step.clipped.finite,
        factors=step.clipped.factors,
    )


def write(step: Step) -> None:
    """Commit the states of methods; without an optimizer that moves, updates replace gradients."""
    curvature = step.curvature
    if step.grouping is None:
        parts = curvature.parts
        step.verdict.write(step.updates, parts.model.parameters(), parts.home)
    step.verdict.commit(step.updates)


def skip(step: Step) -> None:
    """Zero the gradients, unless an optimizer moves the weights by the updates."""
    parts = step.curvature.parts
    step.verdict.skip(step.plan)
    if step.grouping is None:
        discard(parts.model.parameters(), parts.home)


TABLE = [
    Phase("reduce", lambda step: step.curvature.fold(step.plan), "statistics"),
    Phase("average", average),
    # A gradient that is not finite would stay in the averages for ever.
    Phase(
        "observe",
        lambda step: step.curvature.observe(step.gradients, step.plan),
        "finite",
        is_range=False,
    ),
    Phase("solve", lambda step: step.curvature.solve(step.plan), is_range=False, within=("share",)),
    Phase("direct", direct, is_range=False),
    Phase(
        "exchange",
        lambda step: exchange(step.curvature.placed, step.updates),
        is_range=False,
    ),
    # Behind the work so far, which the device has to do meanwhile.
    Phase("agree", judge, "unread", is_range=False),
    Phase("clip", clip, "finite", is_range=False),
    # Before `write`: gradient matrices may be views of the memory that it overwrites.
    Phase("measure", measure, is_range=False),
    Phase(
        "observe",
        lambda step: step.curvature.observe(step.gradients, step.plan, after=True),
        "counts",
        is_range=False,
    ),
    Phase("write", write, "counts"),
    Phase("write", skip, "discarded", is_range=False),
    Phase(
        "solve",
        lambda step: step.curvature.solve(step.plan, after=True),
        "counts",
        is_range=False,
    ),
]
"""The phases after the agreement, in order."""


def add(phase: Phase, *, after: str) -> None:
    """Add a phase behind the last row of a name, in this process; all ranks must add the same.

    Raises:
        ValueError: If no phase has the name ``after``, or one has the new name.
    """
    named = [row.name for row in TABLE]
    if after not in named or phase.name in names():
        raise ValueError(
            f"phase {phase.name!r} after {after!r}: phases are {', '.join(names())}, and a new one "
            f"has another name"
        )
    TABLE.insert(len(named) - named[::-1].index(after), phase)


def names() -> list[str]:
    """Return the names of all phases, in the order in which they first begin."""
    ordered = ["accumulate", "agree"]
    for row in TABLE:
        ordered += [row.name, *row.within]
    return list(dict.fromkeys([*ordered, "move"]))


def seconds_of_rows(work: Sequence[BlockWork], machine: Machine) -> Mapping[str, float]:
    """Return the seconds of the phases that have a price of their own."""
    return {row.name: row.seconds(work, machine) for row in TABLE if row.seconds is not None}
