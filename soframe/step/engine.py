"""The step, from top to bottom: `Engine._take_step`.

Ranks agree first (`Engine._agree`): one all-reduce sums flags for gradients and statistics that are
not finite, the weights of the statistics, and flags for a changed model and for an error on a rank.
From there on all ranks enter the same collectives.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.watch import Watch
from soframe.capture.hooks import Capture
from soframe.capture.loss_scale import LossScale
from soframe.comm.agreement import (
    add_over_ranks,
    fingerprint,
    require_all_ranks,
    require_common,
    require_no_failure,
)
from soframe.comm.base import Backend
from soframe.comm.stages import Seen, Stages
from soframe.damping.policies import DampingPolicy, damping_at
from soframe.kernels.precision import within
from soframe.schedules import Scheduled
from soframe.step.averages import observe
from soframe.step.clip import UNDAMPED, Bounds, Clipped, Limits, clip
from soframe.step.effect import Effect
from soframe.step.gradients import AveragedGradients, Gradients
from soframe.step.magnitude import Magnitude, discard
from soframe.step.moving import Grouping
from soframe.step.outcome import Outcome
from soframe.step.refresh import Refresh
from soframe.step.solves import Solves
from soframe.step.statistics import Accumulator
from soframe.step.status import Poll, Settings, Status
from soframe.step.updates import Update, commit, exchange, precondition, select, write

OF_ALL_STAGES = ("step", "statistics_every of the next step", "solve_every")
"""The common settings of the copies of a stage that all stages of a pipeline share."""


class Engine:
    """Takes the steps of one model; `soframe.Preconditioner` builds it and its parts.

    Attributes:
        backend: The backend.
        home: Where gradients live.
        outcome: Whether updates are taken.
    """

    backend: Backend
    home: GradientHome
    outcome: Outcome
    _model: nn.Module
    _optimizer: Optimizer | None
    _grouping: Grouping | None
    _placed: PlacedBlocks
    _blocks: list[Block]
    _steps: int
    _relatively_damped: bool
    _scaling: Literal["fisher", "kaisa"]
    _stages: Stages
    _capture: Capture
    _statistics: Accumulator
    _effect: Effect
    _watch: Watch
    _raw: AveragedGradients
    _refresh: Refresh
    _solves: Solves
    _queued: Magnitude | None = None
    _loss_scale: LossScale
    _damping: DampingPolicy
    _decay: Scheduled
    _bounds: Bounds

    def _take_step(self) -> None:
        self.outcome.settle()
        placed, phase, step = self._placed, self.backend.phases, self._steps
        for stack in placed.stacks:
            stack.arrive()  # sums of earlier steps that are still under way
        with phase("agree"):
            status = self._agree()
        # The model may have been rebuilt by `_agree`.
        placed, settings = self._placed, status.settings
        try:
            if status.weights is not None:
                with phase("reduce"):
                    self._statistics.fold(status.weights, settings.decay, step)
            with phase("average"):
                gradients = self._raw.raw()
            unread = status.weights is None and self._statistics.due  # they were not finite
            if placed.captured and not unread:
                self._refresh.end_window(placed, self._statistics.due, gradients, step)
            due, decay = self._refresh.gradients_every.due(step), settings.decay
            # A gradient that is not finite would stay in the averages for ever.
            if status.finite is not False:
                observe(placed, gradients, due=due, decay=decay, step=step, after=False)
            # Blocks whose factors have changed: second-order data may be refreshed without a solve.
            changed = frozenset() if status.weights is None else self._statistics.due
            self._solve(settings, after=False, changed=changed)
            updates = precondition(placed, gradients, settings.damping)
            exchange(placed, updates)
            if status.finite is None and not self._leaves(updates, settings):
                # Behind the work of this step, which the device has to do meanwhile.
                status = self._read(status)
                settings = status.settings
            skipped = status.finite is False
            clipped = Clipped(finite=False) if skipped else self._clip(updates, settings)
            self.outcome.begin(clipped.finite)
            self._note(gradients, updates, settings, clipped)
            if clipped.finite:
                # Before `write`: gradient matrices may be views of the memory that it overwrites.
                observe(placed, gradients, due=due, decay=decay, step=step, after=True)
                with phase("write"):
                    if self.outcome.good is not None:
                        select(self.outcome.good, updates, self._watch.parameters(), self.home)
                    write(updates, self.home)
                commit(updates, self.outcome.good)
                self._solve(settings, after=True)
            else:
                # Bad gradients were counted by `_agree`; these are updates that are not finite.
                self.outcome.counts["skipped_updates"] += not skipped
                discard(self._model.parameters(), self.home)
        except BaseException:
            self.reset_batch()  # the sums of this window may be used up already
            raise
        self._steps += 1
        if not self._curved():
            self._refresh.owe(2)  # the backward pass ran before the hooks were there
        self._refresh.end_step()
        self._begin()

    def _curved(self) -> bool:
        """Return whether any block has statistics of calls, or none needs them."""
        captured = self._placed.captured
        return not captured or any(block.mass > 0 for block in captured)

    def _solve(self, settings: Settings, *, after: bool, changed: Collection[Block] = ()) -> None:
        """Solve the blocks that are due before updates are made, or after they are written."""
        due = self._refresh.due(self._placed, self._steps, after=after)
        with within("full"):
            self._solves.update(
                self._placed,
                due,
                damping=settings.damping,
                counters=self.outcome.counts,
                step=self._steps,
                changed=changed,
            )

    def _clip(self, updates: Sequence[Update], settings: Settings) -> Clipped:
        return clip(
            updates,
            self._raw,
            limits=settings.limits,
            stages=self._stages,
        )

    @abstractmethod
    def _note(
        self,
        gradients: Gradients,
        updates: Sequence[Update],
        settings: Settings,
        clipped: Clipped,
    ) -> None:
        """Store the numbers of this step for `metrics`, before gradients are overwritten."""

    # -- agreement ----------------------------------------------------------------------------

    def _agree(self) -> Status:
        """Agree with all ranks on the status of the step; rebuild if the model has changed."""
        settings, common, error = self._evaluate()
        seen, present, reached, error = self._see(error)
        changed = seen.changed
        of_stages = {name: common[name] for name in OF_ALL_STAGES if name in common}
        # Over the stages of a model first, then over the copies of each stage.
        seen, error = self._stages.put_together(seen, of_stages, error)
        error = error or self._stages.miscounted(seen.passes)
        self._statistics.complete(int(seen.passes), int(seen.samples))
        status = Poll(
            failed=float(error is not None or seen.failed > 0),
            changed=changed,
            rebuilt=[] if self._stages.backend is None else [seen.changed],
            bad_gradient=seen.bad_gradient,
            large=seen.large,
            bad_statistics=max(seen.bad_statistics, min(seen.due, seen.bad_gradient)),
            common=fingerprint(common),
            weights=self._statistics.weights(),
            present=present,
            waits=self._solves.waits(),
            reached=reached,
        ).over_ranks(self.backend)
        if status.failed > 0:
            error = self._stages.spread(error)
        require_no_failure(self.backend, error, status.failed)
        self._stages.require_none(self._problem(status, common))
        self._raw.agree(status.present)
        self._solves.agree(status.waits)
        if status.changed or any(status.rebuilt):
            self._rebuild(changed=status.changed > 0)
            # The new blocks have other weights and flags.
            return self._agree()
        self.outcome.counts["skipped_statistics"] += status.bad_statistics > 0
        if status.bad_statistics and seen.curved == 0:
            self._refresh.owe(2)  # without the statistics of this step no block has curvature
        used = bool(self._statistics.due) and not status.bad_statistics
        agreed = Status(None, weights=status.weights if used else None, settings=settings)
        if self._queued is not None:
            self._queued.queue(self.backend)
            return agreed
        return self._with_flags(agreed, status.bad_gradient, status.large, own=seen.bad_gradient)

    def _reads_later(self, sizes: Magnitude) -> bool:
        """Return whether the flags of gradients may be read behind the work of this step.

        That is in steps without statistics, on a GPU: nothing that lasts is changed before then.
        """
        sends = self.backend.wire_device(torch.device("cpu")).type == "cpu"
        plain = not self._statistics.due and self._stages.backend is None
        if not plain or not sends or not sizes.queues:
            return False
        due = self._refresh.gradients_every.due(self._steps)
        # Blocks without statistics take their first ones in any step.
        return not any(
            len(stack.like.captured) < len(stack.like.factors)
            and not stack.like.method.refreshes_after
            and (due or any(block.waits for block in stack.blocks))
            for stack in self._placed.stacks
        )

    def _read(self, status: Status) -> Status:
        """Return the status with the flags of the gradients of all ranks."""
        assert self._queued is not None
        # Not kept, as it refers to the gradients.
        queued, self._queued = self._queued, None
        size, moderate = queued.read_queued()
        flags = [float(not math.isfinite(size)), self._is_large(size)]
        bad, large = flags if moderate else add_over_ranks(self.backend, flags)
        return self._with_flags(status, bad, large, own=flags[0])

    def _leaves(self, updates: Sequence[Update], settings: Settings) -> bool:
        """Leave the flags for later if the device can select the new tensors; return whether.

        It cannot where the host decides by them: on statistics of gradients, on first updates, and
        on float64 for large gradients. After a step that was not moderate the host reads again.
        All ranks find the same, as reading may be a collective.
        """
        queued, stacks = self._queued, self._placed.stacks
        assert queued is not None
        selects = (
            self.outcome.moderate
            and not (self._relatively_damped or settings.damping < UNDAMPED)
            and (self._grouping is None or self._grouping.selects())
            and len({stack.like.device for stack in stacks}) == 1
            and all(len(stack.like.captured) == len(stack.like.factors) for stack in stacks)
            and all(update.blocks[0].record.updates > 0 for update in updates)
        )
        if selects:
            self._queued = None
            self.outcome.leave(queued.flags, [block for one in updates for block in one.blocks])
        return selects

    @property
    def updated(self) -> bool:
        """Whether the last step rewrote gradients; False if it zeroed them."""
        return self.outcome.taken

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of skipped updates and statistics, and of retried and failed solves."""
        return self.outcome.counters

    def _is_large(self, size: float) -> float:
        # Damping relative to a small curvature is small: updates may be large for any gradient.
        return float(size > 0 or self._relatively_damped)

    def _with_flags(self, status: Status, bad: float, large: float, *, own: float) -> Status:
        """Return the status, given the sums over ranks of the flags of gradients."""
        self.outcome.judge(skipped=bad > 0, moderate=not (bad > 0 or large > 0), own=own > 0)
        # From reduced flags, so that all ranks compute in the same dtype.
        careful = large > 0 or status.settings.damping < UNDAMPED
        limits = replace(status.settings.limits, careful=careful)
        settings = replace(status.settings, limits=limits)
        return replace(status, finite=not bad, settings=settings)

    def _evaluate(self) -> tuple[Settings, dict[str, object], Exception | None]:
        """Return the step's settings, the values that ranks must share, and an error or None."""
        step = self._steps
        try:
            if self._placed.errors:
                raise self._placed.errors[0]
            self._raw.check()
            seen = self._capture
            self._loss_scale.check(self._optimizer, half=seen.half, probed=seen.probing)
            self._statistics.require_counted()
            self._effect.check(self._statistics.due)
            damping = damping_at(self._damping, step)
            settings = Settings(damping, self._decay.at(step), self._bounds.at(step))
            if self._grouping is not None:
                self._grouping.check_settings()
            # The values that decide which collectives are entered. The interval is the next step's:
            # it decides which blocks have weights in the next status.
            refresh = self._refresh
            common: dict[str, object] = {
                "step": step,
                "statistics_every of the next step": refresh.statistics_every.at(step + 1),
                "solve_every": refresh.solve_every.at(step),
                "blocks with gradients": self._raw.alike(),
            }
        except Exception as error:  # of any kind: all ranks raise together
            return Settings(math.nan, math.nan, Limits(None, None)), {}, error
        return settings, common, None

    def _see(
        self, error: Exception | None
    ) -> tuple[Seen, list[float], list[float], Exception | None]:
        """Return this rank's status, its flags of gradients and of blocks, and its error."""
        due, self._queued = self._statistics.due, None
        size, finite = math.nan, True
        try:
            largest = self._statistics.largest() if due else ()
            parameters = self._watch.parameters()
            # Gathered only now if sums of statistics still have to be reduced, for their memory.
            gradients = self.home.of(parameters) if due else self._raw.own()
            sizes = Magnitude(parameters, gradients, largest, self._raw.remembers)
            if self._reads_later(sizes):
                size, self._queued = 0.0, sizes
            else:
                size, finite = sizes.read()
            present, reached = self._raw.present(), self._effect.said(due)
        except Exception as raised:  # of any kind: all ranks raise together
            error = error or raised
            # All ranks must reduce equally many numbers.
            present, reached = self._raw.none_present(), self._effect.nothing_said(due)
        bad_gradient = not math.isfinite(size)
        passes, *samples = self._statistics.seen()
        counted, fewest = samples if self._scaling == "fisher" else (0, 0)
        seen = Seen(
            failed=float(error is not None),
            changed=float(self._watch.changed()),
            bad_gradient=float(bad_gradient),
            large=self._is_large(size),
            bad_statistics=float(not finite or (bool(due) and bad_gradient)),
            due=float(bool(due)),
            curved=float(self._curved()),
            passes=float(passes),
            samples=float(counted),
            fewest=float(fewest),
        )
        return seen, present, reached, error

    def _problem(self, status: Poll, common: Mapping[str, object]) -> Exception | None:
        """Return the error that stops the copies of this stage, the same on all, or None."""
        try:
            require_common(self.backend, common, status.common)
            if status.changed:
                require_all_ranks(self.backend, status.changed)
            elif not (any(status.rebuilt) or status.bad_gradient or status.bad_statistics):
                self._effect.require(self._statistics.due, status.reached)
        except Exception as error:  # of any kind: all stages raise together
            return error
        return None

    @abstractmethod
    def _rebuild(self, *, changed: bool) -> None:
        """Register the model anew if it has changed, before any stage continues."""

    # -- the coming step ----------------------------------------------------------------------

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of the curvature, in the order of their first modules in the model.

        :meta private:
        """
        self.outcome.settle()
        return tuple(self._blocks)

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return self._steps

    @property
    def damping(self) -> float:
        """The damping of the coming step, for blocks without one of their own."""
        return self._damping.at(self._steps)

    @property
    def decay(self) -> float:
        """The EMA decay of running factors at the coming step."""
        return self._decay.at(self._steps)

    @property
    def kl_clip(self) -> float | None:
        """The bound of the KL clip at the coming step; None if it is off."""
        return self._bounds.at(self._steps).kl

    @property
    def norm_clip(self) -> float | None:
        """The bound of the norm clip at the coming step; None if it is off."""
        return self._bounds.at(self._steps).norm

    @property
    def lr(self) -> float:
        """The learning rate of the clips at the coming step; one unless ``lr=`` is given."""
        return self._bounds.at(self._steps).lr

    @property
    def statistics_every(self) -> int:
        """The interval of statistics at the coming step, in steps."""
        return self._refresh.interval(self._placed, self._steps)

    @property
    def solve_every(self) -> int:
        """The interval of solves at the coming step, in steps."""
        return self._refresh.solve_every.at(self._steps)

    # -- windows ------------------------------------------------------------------------------

    def _begin(self, late: Collection[str] = ()) -> None:
        """Begin an empty window; for ``late`` see `Accumulator.late`."""
        self.reset_batch()
        if late:
            due = self._refresh.observed(self._placed, self._steps, late)
            self._statistics.postpone(due, late)
        self._effect.begin(self._statistics.due)

    def reset_batch(self) -> None:
        """Discard the statistics of the backward passes since the last step.

        Where gradients are zeroed without a ``step``, their statistics are dropped without this
        call, but for ones of `observe` whose backward pass has not come. Every rank must call.
        """
        due = self._refresh.observed(self._placed, self._steps)
        self._statistics.begin(due, self._steps)
        self._loss_scale.begin()
        self._capture.reset()
