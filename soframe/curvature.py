"""The curvature of a model: its blocks, their statistics, running factors and second-order data.

A window is everything since the last step. The passes of a window add statistics to it; a step then
folds them into running factors, solves the blocks that are due, and computes updates::

    curvature.begin()                     # a window
    ...                                   # forward and backward passes
    curvature.fold(plan)                  # sums of all ranks into running factors
    curvature.observe(gradients, plan)    # statistics of averaged gradients
    curvature.solve(plan)                 # second-order data of blocks that are due
    updates = curvature.direct(gradients, plan)

`soframe.step.engine` has the order, and agrees on the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Self

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.registration import Registration
from soframe.blocks.report import Report, warn_of_lost_blocks
from soframe.blocks.stack import Solved
from soframe.blocks.watch import Watch
from soframe.capture.hooks import Capture
from soframe.estimate import averages
from soframe.estimate.gradients import Gradients
from soframe.estimate.plan import Plan
from soframe.estimate.statistics import Accumulator
from soframe.estimate.updates import Update, precondition
from soframe.kernels.devices import keep_memory
from soframe.kernels.precision import within
from soframe.methods.scaling import Scale
from soframe.setup import building, choosing
from soframe.setup.parts import Parts
from soframe.state.bound import OfModel
from soframe.state.transfer import hand_over
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement


class Curvature(OfModel):
    """The curvature of a model.

    Attributes:
        parts: The parts that its settings describe.
        strategy: The distribution strategy that it has settled on.
        steps: The number of completed steps.
        capture: Records calls of layers.
        registration: The blocks of the model, with its other parameters.
        placement: The owners, gradient workers and receivers of each block.
        placed: The blocks with their places and stacks.
        statistics: The sums of the window under way.
        watch: Sees whether parameters are frozen, thawed or replaced.
        report: Every parameter, with its block or why it has none.
        dampings: Dampings of single blocks, which may be gone for a while.
        counts: The numbers of factorisations that were retried in float64, and that failed.
        relatively_damped: Whether the damping of any block is relative to its curvature.
        on_paper: Whether the model is on the meta device, and can only be planned.
    """

    parts: Parts
    strategy: Strategy
    steps: int
    capture: Capture
    registration: Registration
    placement: Placement
    placed: PlacedBlocks
    statistics: Accumulator
    watch: Watch
    report: Report
    dampings: dict[str, float | None]
    counts: dict[str, int]
    relatively_damped: bool
    on_paper: bool

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """Register the model of the parts, place its blocks and hook its layers."""
        curvature = cls.__new__(cls)
        curvature._open(parts)
        return curvature

    def _open(self, parts: Parts) -> None:
        self.parts, self.steps, self.dampings = parts, 0, {}
        self._choices, self.strategy = parts.choices, parts.strategy
        self.counts = {"retried_solves": 0, "failed_solves": 0}
        self.capture = Capture(
            probing=parts.fisher.probed,
            model=parts.model,
            alone=parts.backend.alone,
            precision=parts.precision,
        )
        keep_memory()
        if parts.stages.backend is not None:
            self._meet_stages()
        with parts.home.shaped(parts.model.parameters()), parts.stages.together():
            self._build()
            self._listen()
            self.begin()

    # -- building -----------------------------------------------------------------------------

    def _common(self) -> tuple[object, ...]:
        """Return the settings that all copies of all stages must have in common."""
        parts = self.parts
        return (
            parts.damping,
            parts.decay,
            parts.scaling,
            parts.loss_average,
            parts.fisher.kind,
            choosing.describe_samples(parts.samples),
            f"precision={parts.precision!r}",
            parts.sampler,
            *parts.common,
        )

    def _meet_stages(self) -> None:
        """Compare the settings of a model's stages before they are registered."""
        parts = self.parts
        settings = (*self._common(), parts.gradients, parts.solves, parts.refresh)
        head = building.meet_stages(parts.model, parts.stages, parts.backend, settings)
        self._choices = replace(self._choices, head_in=head)

    def rebuild(self) -> None:
        """Register the model anew, after it has changed; statistics of blocks that stay are kept.

        Every rank of the copies of this stage must call.
        """
        former, statistics, report = self.placed, self.statistics, self.report
        # Install background solves in the old blocks, whose state moves below.
        self.land("Preconditioner.step()")
        self.dampings.update((block.name, block.record.damping) for block in former.blocks)
        forgets = self.watch.forgets
        self._build(former)
        if hand_over(former, self.placed, forgets=forgets):
            # Blocks without statistics take them now, not at the next interval; and in the next
            # window too, since the hooks may have missed the calls of this one.
            self.parts.refresh.owe(2)
        names = {block.name for block in former.blocks}
        for block in self.blocks:
            if block.name not in names and block.record.damping is None:
                block.damp(self.dampings.get(block.name))
        self.placed.errors.extend(former.errors)
        warn_of_lost_blocks(report, self.report, stacklevel=9)
        if report.solver:
            self.report = replace(self.report, solver=report.solver)
        self.statistics.resume(statistics)
        self._listen()

    def _build(self, former: PlacedBlocks | None = None) -> None:
        """Register the model, place the work and prepare the statistics."""
        parts = self.parts
        settings = (
            *self._common(),
            f"optimizer={type(parts.optimizer).__name__}",
            building.averaged_tensors(parts.model, parts.gradients),
            type(parts.home),  # the instance may differ by rank
            parts.backend.fused,
        )
        # Moments of gradients outlast a freeze, as in torch's optimizers.
        kept: set[int] = set()
        for block in former.blocks if former is not None else ():
            if not block.captured:
                kept.update(id(parameter) for parameter in block.parameters.values())
        choices = replace(self._choices, kept=frozenset(kept))
        registration, placement, self.strategy = building.build(
            parts, choices, self.strategy, self.capture, settings
        )
        # A choice by size stays when the model changes, with the data that it made.
        self._choices = replace(choices, solver=registration.solver)
        self.registration, self.placement = registration, placement
        self.report = registration.report
        self.placed = PlacedBlocks(registration.blocks, placement, parts.backend)
        self.watch = Watch(parts.model)
        self.relatively_damped = any(block.relatively_damped for block in self.blocks)
        self.on_paper = any(block.device.type == "meta" for block in self.blocks)
        scale = Scale(
            scaling=parts.scaling,
            loss_average=parts.loss_average,
            world_size=parts.backend.world_size,
            own_gradients=parts.fisher.probed,
        )
        self.statistics = Accumulator(
            self.placed,
            scale=scale,
            samples=parts.samples,
            grad_scale=parts.stages.scaled(parts.loss_scale.now),
            capture=self.capture,
            sampler=parts.sampler,
            voided=parts.loss_scale.begin,
            part_of=parts.stages.part_of,
        )

    def _listen(self) -> None:
        """Take the calls that the capture records from now on."""
        self.statistics.listen(self.parts.stages.roots(self.parts.model))

    # -- blocks -------------------------------------------------------------------------------

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks, in the order of their first modules in the model."""
        return self.placed.blocks

    @property
    def curved(self) -> bool:
        """Whether any block has statistics of calls, or none needs them."""
        captured = self.placed.captured
        return not captured or any(block.mass > 0 for block in captured)

    def damp(self, dampings: Mapping[str, float]) -> None:
        """Set dampings of single blocks from now on; they outlast a freeze of their layers."""
        self.dampings.update(dampings)
        for block in self.blocks:
            if block.name in dampings:
                block.damp(dampings[block.name])

    def snapshot(self) -> dict[str, Solved]:
        """Return the second-order data and the damping of each block, by name."""
        return {block.name: block.snapshot() for block in self.blocks}

    def restore(self, snapshot: Mapping[str, Solved]) -> None:
        """Restore the second-order data and dampings of the blocks in a snapshot."""
        for block in self.blocks:
            if block.name in snapshot:
                block.restore(snapshot[block.name])

    # -- windows ------------------------------------------------------------------------------

    def begin(self, late: Collection[str] = ()) -> None:
        """Begin an empty window; for ``late`` see `Accumulator.late`. Every rank must call."""
        parts = self.parts
        due = parts.refresh.observed(self.placed, self.steps)
        self.statistics.begin(due, self.steps)
        parts.loss_scale.begin()
        self.capture.reset()
        if late:
            due = parts.refresh.observed(self.placed, self.steps, late)
            self.statistics.postpone(due, late)

    def continue_from(
        self, steps: int, counts: Mapping[str, int], dampings: Mapping[str, float | None] | None
    ) -> None:
        """Continue after a number of steps, with loaded factors."""
        self.steps = steps
        self.counts = {name: counts.get(name, 0) for name in self.counts}
        if dampings is not None:  # states of earlier versions lack them
            self.dampings = dict(dampings)
            for block in self.blocks:
                block.damp(self.dampings.get(block.name))
        self.placed.errors.clear()

    # -- in a step ----------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for the reductions of statistics that are under way."""
        for stack in self.placed.stacks:
            stack.arrive()

    def fold(self, plan: Plan) -> None:
        """Reduce the sums of the window, and average them into the running factors."""
        assert plan.weights is not None
        self.statistics.fold(plan.weights, plan.decay, plan.step)

    def end_window(self, gradients: Gradients, plan: Plan) -> None:
        """Note which blocks have missed their turn of statistics, see `Refresh.end_window`."""
        due = self.statistics.due
        not_finite = plan.weights is None and bool(due)
        if self.placed.captured and not not_finite:
            self.parts.refresh.end_window(self.placed, due, gradients, plan.step)

    def observe(self, gradients: Gradients, plan: Plan, *, after: bool = False) -> None:
        """Average statistics of the gradients, before updates are made or ``after``."""
        averages.observe(
            self.placed,
            gradients,
            due=plan.observes,
            decay=plan.decay,
            step=plan.step,
            after=after,
        )

    def solve(self, plan: Plan, *, after: bool = False) -> None:
        """Solve the blocks that are due, before updates are made or ``after`` they are written."""
        # Blocks whose factors have changed: second-order data may be refreshed without a solve.
        changed: Collection[Block] = ()
        if plan.weights is not None and not after:
            changed = self.statistics.due
        due = self.parts.refresh.due(self.placed, plan, after=after)
        with within("full"):
            self.parts.solves.update(
                self.placed,
                due,
                damping=plan.damping,
                counters=self.counts,
                step=plan.step,
                changed=changed,
            )

    def direct(self, gradients: Gradients, plan: Plan) -> list[Update]:
        """Return the updates of the blocks that are solved, on their gradient workers."""
        return precondition(self.placed, gradients, plan.damping)

    def end_step(self, plan: Plan) -> None:
        """Count the step."""
        self.steps += 1
        if not self.curved:
            self.parts.refresh.owe(2)  # the backward pass ran before the hooks were there
        self.parts.refresh.end_step(plan)

    # -- between steps ------------------------------------------------------------------------

    def solve_again(self, blocks: Sequence[Block], damping: float) -> None:
        """Solve blocks at once, with a damping."""
        self.parts.solves.update(self.placed, blocks, damping=damping, counters=self.counts)

    def land(self, call: str) -> None:
        """Install all background solves; every rank must call. ``call`` names it in errors."""
        self.parts.solves.land(self.placed, self.counts, call)

    def close(self) -> None:
        """Remove every hook; background solves are cancelled, and one that runs is waited for."""
        self.capture.close()
        self.parts.solves.close()
        self.arrive()
