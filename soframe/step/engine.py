"""A step: ranks agree, and the phases of a table run (`soframe.step.phases`).

Ranks agree first (`Engine._agree`): one all-reduce sums their reports, with flags for gradients and
statistics that are not finite, the weights of the statistics, and flags for a changed model and for
an error on a rank. From there on all ranks enter the same collectives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch

from soframe.blocks.block import Stack
from soframe.comm.agreement import (
    fingerprint,
    require_all_ranks,
    require_common,
    require_no_failure,
)
from soframe.comm.report import Report
from soframe.curvature import Curvature
from soframe.damping.policies import damping_at
from soframe.diagnostics.metrics import Measuring
from soframe.estimate.plan import Plan
from soframe.estimate.updates import Update, exchange, write
from soframe.kernels.precision import within
from soframe.setup.grouping import Grouping
from soframe.step.clip import Clipping
from soframe.step.effect import Effect
from soframe.step.phases import PHASES, Step
from soframe.step.verdict import SKIPPED_STATISTICS, Magnitude, Verdict

P = ParamSpec("P")
R = TypeVar("R")

OF_ALL_STAGES = ("step", "statistics_every of the next step", "solve_every")
"""The names of values that must be equal on all stages of a pipeline, too."""


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from ``torch.compile``; it raises a RuntimeError under graph capture.

    A step is collectives, solves and tests for finite values, which one graph cannot contain. A
    compiled caller has one graph before the call and one after it. Plain `torch.compiler.disable`
    would import the compiler with the library, which takes seconds. The RuntimeError is raised
    before anything has changed.
    """

    @functools.cache
    def disabled() -> Callable[P, R]:
        excluded: Callable[P, R] = torch.compiler.disable(function)
        return excluded

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return disabled()(*args, **kwargs)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{function.__qualname__} cannot be captured in a CUDA graph: it asks whether "
                f"gradients are finite, and what is due differs from step to step. Capture the "
                f"forward and backward pass alone, as torch.compile(mode='reduce-overhead') does, "
                f"and call it after their replay"
            )
        return function(*args, **kwargs)

    return call


class Engine:
    """Takes the steps of a model with its curvature."""

    def __init__(
        self,
        curvature: Curvature,
        *,
        clipping: Clipping,
        moving_optimizer: Grouping | None,
        measuring: Measuring,
    ) -> None:
        self._curvature, self._parts = curvature, curvature.parts
        self._clipping, self.measuring = clipping, measuring
        # Moves the weights along the updates; None where updates replace gradients.
        self._moving_optimizer = moving_optimizer
        self.verdict = Verdict(self._parts.backend, curvature.counts)  # on the last step
        self.updates: Sequence[Update] = ()  # of the last step, for the moving optimizer
        self._effect = Effect(curvature)
        self._present: Sequence[float] = ()  # see `Plan`, of the last step

    # -- the step -----------------------------------------------------------------------------

    def step(self) -> None:
        """Take a step: overwrite the gradients by updates, or keep these for the optimizer."""
        self.updates = ()
        curvature, ranges = self._curvature, self._parts.backend.phases
        self.verdict.settle()  # reads the flags of the last step, if they are still on the device
        for stack in curvature.placed.stacks:
            if stack.pending:  # sums of earlier steps that are still under way
                stack.arrive()
        with ranges("agree"):
            plan = self._agree()
        self._present = plan.present
        step = Step(
            curvature, plan, self.verdict, self._clipping, self.measuring, self._moving_optimizer
        )
        try:
            for phase in PHASES:
                if phase.runs_in(step):
                    with ranges(phase.name) if phase.is_range else nullcontext():
                        phase.run(step)
            if self._moving_optimizer is not None and step.counts:
                self.updates = step.updates
        except BaseException:
            curvature.begin()  # the sums of this window may be used up already
            raise
        if curvature.statistics.window.due:
            self._effect.end(curvature.statistics.window)
        curvature.end_step(step.plan)
        curvature.begin()  # the next window

    def take_updates(self) -> Sequence[Update]:
        """Return the updates of the last step, and keep them no longer."""
        updates, self.updates = self.updates, ()
        return updates

    def propose(self, damping: float) -> None:
        """Precondition the present gradients, for a damping that is tried.

        ``damping`` is for blocks without a damping of their own. Blocks whose updates depend on
        earlier gradients keep their gradients; no state changes.
        """
        curvature, parts = self._curvature, self._parts
        self.verdict.settle()
        damped_blocks = [
            block
            for block in curvature.blocks
            # Other solvers apply the damping to the update, and need no new solve.
            if not block.remembers and block.mass > 0 and block.solver.damps_factors
        ]
        with parts.home.shaped(parts.model.parameters()):
            if self._present:
                curvature.averaged_gradients.fill(self._present)
            curvature.solve_again(damped_blocks, damping)
            gradients = {
                stack: gradient
                for stack, gradient in curvature.averaged_gradients.now().items()
                if not stack.like.remembers
            }
            with within(parts.precision):
                updates = curvature.direct(gradients, damping)
            exchange(curvature.placed, updates)
            write(updates, parts.home)
        self.measuring.redamped(damping)

    # -- agreement ----------------------------------------------------------------------------

    def _agree(self) -> Plan:
        """Agree with all ranks on the plan of the step; rebuild if the model has changed."""
        curvature, parts = self._curvature, self._parts
        plan, common, error = self._prepare()
        report, unread, error = self._report(plan, common, error)
        if parts.stages.backend is not None:
            # Reports are reduced over the stages of a model first.
            of_stages = {name: common.get(name) for name in OF_ALL_STAGES}
            report, error = parts.stages.put_together(report, of_stages, error)
        # Then over the copies of each stage.
        total = self._total(report, error)
        # An error of one rank is raised on all, before anything is written.
        if total.failed > 0:
            require_no_failure(parts.backend, parts.stages.spread(error), total.failed)
        with parts.stages.together():  # all stages raise together
            self._compare(total, common)
        parts.solves.land_if_finished(total.waits)
        # A changed model is registered anew, and the ranks agree once more.
        if total.changed + sum(total.changed_anywhere) > 0:
            self._rebuild(changed=total.changed > 0)
            return self._agree()
        if total.present:
            plan = replace(plan, present=total.present)
        # Statistics that are not finite on some rank are dropped on all.
        if total.bad_statistics > 0:
            curvature.counts[SKIPPED_STATISTICS] += 1
            if report.curved == 0:
                # No block has curvature: take statistics in the next window (2: this step counts).
                parts.refresh.owe(2)
        elif curvature.statistics.window.due:
            plan = replace(plan, weights=total.weights)
        if unread is not None:
            self.verdict.queue(unread)  # its flags stay None until phase *agree*
            return plan
        return self.verdict.with_flags(
            plan, bad=total.bad_gradient, large=total.large, local=report.bad_gradient > 0
        )

    def _total(self, report: Report, error: Exception | None) -> Report:
        """Return the report of all ranks, with the weights of statistics."""
        failed = error is not None or report.failed > 0
        # Statistics of any stage are dropped for a bad gradient of any stage.
        bad_statistics = report.bad_statistics > 0 or (report.due > 0 and report.bad_gradient > 0)
        # Of the whole model: passes that did not reach a stage count there, too.
        weights = self._curvature.statistics.weights((int(report.passes), int(report.samples)))
        report = replace(
            report, failed=float(failed), bad_statistics=float(bad_statistics), weights=weights
        )
        backend = self._parts.backend
        if backend.world_size > 1:
            report = report.over_ranks(backend)
        return report

    def _prepare(self) -> tuple[Plan, dict[str, object], Exception | None]:
        """Check settings and gradients, choose the stacks without an update, and make the plan.

        Returns the plan, the values that must be equal on all ranks, and an error or None.
        """
        curvature, parts, step = self._curvature, self._parts, self._curvature.steps
        refresh, window = parts.refresh, curvature.statistics.window
        gradients = curvature.averaged_gradients
        try:
            if window.due:
                self._effect.begin(window)  # its error names a framework that sharded parameters
            if curvature.placed.errors:
                raise curvature.placed.errors[0]  # of the step before, see `PlacedBlocks.keep`
            gradients.check()
            curvature.statistics.require_counted()
            if parts.loss_scale.is_given or window.calls.half:
                probed = curvature.capture.probing
                parts.loss_scale.check(parts.optimizer, half=window.calls.half, probed=probed)
            plan = Plan(
                step=step,
                damping=damping_at(parts.damping, step),
                decay=parts.decay.at(step),
                bounds=self._clipping.at(step),
                lr=self._clipping.lr.at(step),
                statistics_every=refresh.statistics_every.at(step + 1),
                solve_every=refresh.solve_every.at(step),
                observes=refresh.gradients_every.due(step),
            )
            stacks: Sequence[Stack] = ()
            if self._moving_optimizer is not None:
                self._moving_optimizer.check_settings()
                # Gradients can stay if they are averaged where they are. If norms are measured,
                # every stack has an update: its norm is measured, too.
                if not (gradients.divided or self.measuring.norms):
                    stacks = self._moving_optimizer.moves(curvature.placed.stacks)
            gradients.leave(stacks)
            # The values that decide which collectives are entered. The interval is the next step's:
            # it decides which blocks have weights in the next report.
            common: dict[str, object] = {
                "step": step,
                "statistics_every of the next step": plan.statistics_every,
                "solve_every": plan.solve_every,
                "blocks with gradients": gradients.alike(),
            }
        except Exception as error:  # of any kind: all ranks raise together
            return Plan(step, damping=math.nan, decay=math.nan), {}, error  # never used
        return plan, common, None

    def _report(
        self, plan: Plan, common: Mapping[str, object], error: Exception | None
    ) -> tuple[Report, Magnitude | None, Exception | None]:
        """Return this rank's report, without its weights, the magnitudes to be read, and its error.

        The magnitudes are read behind the work of the step; None if they are in the report.
        """
        curvature, parts = self._curvature, self._parts
        window, gradients = curvature.statistics.window, curvature.averaged_gradients
        # NaN is a bad gradient: it stays if an error comes before the gradients are read.
        magnitude, statistics_finite = math.nan, True
        parameters = curvature.watch.parameters()
        unread: Magnitude | None = None
        try:
            statistics = window.magnitudes(parts.precision)
            # With statistics, gradients are gathered in phase *average*, when sums are freed.
            tensors = parts.home.of(parameters) if window.due else gradients.tensors()
            sizes = Magnitude(parameters, tensors, statistics, gradients.remembers)
            if sizes.queues and self._reads_later(plan):
                magnitude = 0.0  # until phase *agree* reads it
                unread = sizes
            else:
                magnitude, statistics_finite = sizes.read()
            present = gradients.present()
            reached = self._effect.flags(window) if window.due else []
        except Exception as raised:  # of any kind: all ranks raise together
            error = error or raised
            # All ranks must reduce equally many numbers.
            present = [0.0] * len(gradients.flagged)
            reached = self._effect.no_flags(window)
        is_large = magnitude > 0  # zero for moderate gradients, see `Magnitude.read`
        passes, most, fewest = window.largest_counts()
        if parts.scaling != "fisher":  # other scalings count no samples
            most = fewest = 0
        changed = float(curvature.watch.changed(parameters))
        report = Report(
            failed=float(error is not None),
            bad_gradient=float(not math.isfinite(magnitude)),
            # Damping relative to a small curvature is small: updates may be large.
            large=float(is_large or curvature.relatively_damped),
            bad_statistics=float(not statistics_finite),
            changed=changed,
            changed_stages=changed,
            due=float(bool(window.due)),
            curved=float(curvature.curved),
            passes=float(passes),
            samples=float(most),
            fewest=float(fewest),
            common=fingerprint(common) if parts.backend.world_size > 1 else (),
            present=present,
            waits=parts.solves.waits(),
            reached=reached,
        )
        return report, unread, error

    def _compare(self, report: Report, common: Mapping[str, object]) -> None:
        """Compare what ranks have in common; the copies of this stage raise the same error."""
        backend = self._parts.backend
        if report.common:
            require_common(backend, common, report.common)
        # In such a step hooks and gradients are not compared.
        unusual = [*report.changed_anywhere, report.bad_gradient, report.bad_statistics]
        if report.changed:
            require_all_ranks(backend, report.changed)
        elif report.reached and not any(unusual):
            self._effect.require(report.reached)

    def _rebuild(self, *, changed: bool) -> None:
        """Register the model anew if it has changed, before any stage continues."""
        curvature, stages = self._curvature, self._parts.stages
        with stages.together():
            if changed:
                curvature.rebuild()
                self._effect = Effect(curvature, partial=curvature.statistics.window)
        stages.look_over(curvature.registration)
        # All stages take statistics at the same steps: the most that any of them needs.
        refresh = self._parts.refresh
        refresh.owe(int(stages.largest(refresh.owed)))

    # -- flags that are read later ------------------------------------------------------------

    def _reads_later(self, plan: Plan) -> bool:
        """Return whether the flags of gradients may be read behind the work of this step on a GPU.

        That is in steps without statistics: nothing that lasts is changed before then.
        """
        curvature, parts = self._curvature, self._parts
        is_pipeline = parts.stages.backend is not None
        if curvature.statistics.window.due or is_pipeline:
            return False
        # Where numbers of the host travel by the GPU, the agreement waits for its work anyway.
        if parts.backend.wire_device(torch.device("cpu")).type != "cpu":
            return False
        # Blocks without statistics take their first ones in any step.
        for stack in curvature.placed.observing:
            if stack.like.method.refreshes_after:
                continue
            if plan.observes or any(block.is_overdue for block in stack.blocks):
                return False
        return True
