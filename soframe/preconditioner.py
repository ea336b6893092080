"""The preconditioner: its settings, construction and inspection; `Engine` has the step.

Two lines add it to a training script::

    preconditioner = soframe.Preconditioner(model, optimizer=optimizer)
    ...
    loss.backward()
    preconditioner.step()
    optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn

from soframe import combinations
from soframe.blocks.block import Block, Solved
from soframe.blocks.home import GradientHome
from soframe.blocks.registration import Choice
from soframe.blocks.report import Report
from soframe.checks.values import require_numbers
from soframe.comm.stages import PHASE
from soframe.curvature import Curvature
from soframe.damping.policies import DampingChoice
from soframe.diagnostics.explain import Explanation, explain
from soframe.diagnostics.metrics import Measuring, Spectra
from soframe.layers.base import LayerHelper
from soframe.losses.base import Loss
from soframe.schedules import NEVER, Interval, Schedule, SolveInterval
from soframe.settings import (
    DAMPING,
    KL_CLIP,
    USUAL_CLIPS,
    Clips,
    Distribution,
    Statistics,
    defaults,
    flat,
    group_of,
    require_known,
)
from soframe.setup import choosing, describing
from soframe.setup.grouping import grouping
from soframe.setup.parts import parts_of
from soframe.state import checksums
from soframe.state import saving as state
from soframe.state.bound import OfModel
from soframe.step import phases
from soframe.step.clip import Clipping
from soframe.step.engine import Engine, untraced
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement


class Preconditioner(OfModel):
    """Rewrites the gradients of a model, in place, with second-order information.

    Call `step` between ``loss.backward()`` and ``optimizer.step()``, on every rank. Under
    ``torch.amp.GradScaler`` call ``scaler.unscale_(optimizer)`` first.

    Args:
        model: The model; DistributedDataParallel and compiled wrappers are looked through. If it is
            on the meta device, `report` and ``placement`` work as a plan; steps need weights.
        method: The curvature method: a name, class, instance, or a mapping from patterns on module
            names to one of these (first match wins).
        solver: The solver, specified in the same way; None for ``"inverse"``, or ``"eigen"`` if a
            method needs eigenvectors, which `report` says.
        strategy: The distribution strategy: a name, class or instance.
        optimizer: The optimizer behind the preconditioner, which must have the parameters of every
            block.
        lr: Lets the clips bound steps at this learning rate, as in kfac-pytorch: a clipped step has
            the length of the bound at any rate. By default (None) the clips bound updates, and the
            optimizer's rate scales a clipped step like any other.
        damping: Added to the curvature's eigenvalues: a number, a callable of the step, or the
            name, class or instance of a damping policy that needs no reduction ratio. By default it
            falls from 0.05 by 1 % a step to 0.01.
        decay: The EMA decay of the running factors, per statistics step; ``"mean"`` for their mean.
        kl_clip: Bound on ``sum <update, gradient>``, about twice the KL divergence of a step of
            rate one; None turns it off. With another value than the default, the norm clip is off
            unless ``clips`` has it.
        statistics_every: Interval of statistics steps, in steps; None for 10 where statistics come
            from calls (K-FAC), and 1 where they come from the averaged gradient (SOAP, Shampoo).
        solve_every: Interval of solves, in steps; None for 10, which becomes 100 after 100 steps
            if all methods read calls; ``"demand"`` for solves by `Curvature.solve` alone: until
            the first one, gradients of methods that need a solve stay as they are.
        background: The number of steps between the start of a solve and the use of its results;
            meanwhile the solve runs in a separate thread (on CUDA, in a separate stream). A number
            gives the same results in every run; ``"ready"`` uses them at the first step that finds
            them done; 0 solves within the step.
        layers: Helper classes by patterns on module names, which take precedence over the registry;
            ``"all"``, in place of a class or of the mapping, selects every helper of soframe,
            rather than only the ones for linear layers and convolutions.
        skip: Patterns (``re.search``) on qualified module names or class names to leave alone.
        auxiliary: The method of all trainable parameters that ``method`` leaves out, such as
            ``"adamw"``: a name, class or instance; None to leave their gradients alone.
        grad_scaler: The ``GradScaler`` in use; or a callable that returns it, if it does not exist
            yet, or returns the factor by which the loss is multiplied.
        statistics: The choice of Fisher, rows and scaling: a `soframe.Statistics`.
        distribution: How ranks communicate, and where gradients are stored: a
            `soframe.Distribution`.
        clips: The other clips: a `soframe.Clips`.
        **unknown: Empty; a setting that does not exist raises an error with the nearest name.

    Attributes:
        curvature: The curvature: blocks, statistics, factors and second-order data.
        backend: The communication backend.
        engine: Takes the steps, for an optimizer that moves the weights by its updates.

    Raises:
        ValueError: If a setting is out of range, a component does not exist, the model has nothing
            to precondition, or the ranks do not agree.
        TypeError: If a setting has the wrong type or does not exist.
    """

    curvature: Curvature

    _keeps_hooks = False  # whether another preconditioner may hook the same modules

    def __init__(
        self,
        model: nn.Module,
        method: Choice = "kfac",
        solver: Choice = None,
        strategy: str | type[Strategy] | Strategy = "comm-opt",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr: Schedule | None = None,
        damping: DampingChoice = DAMPING,
        decay: Schedule | Literal["mean"] = 0.95,
        kl_clip: Schedule | None = KL_CLIP,
        statistics_every: Interval | None = None,
        solve_every: SolveInterval | None = None,
        background: int | Literal["ready"] = 0,
        layers: Mapping[str, type[LayerHelper] | Literal["all"]] | Literal["all"] | None = None,
        skip: Sequence[str] = (),
        auxiliary: Choice = None,
        grad_scaler: torch.amp.GradScaler | Callable[[], float] | None = None,
        statistics: Statistics | None = None,
        distribution: Distribution | None = None,
        clips: Clips | None = None,
        **unknown: Never,
    ) -> None:
        settings = dict(locals())
        # These come from `locals()` and are no settings.
        del settings["self"], settings["model"], settings["unknown"]
        require_known("soframe.Preconditioner", unknown, settings)
        ranks: Distribution = group_of("distribution", settings)
        stages = choosing.choose_stages(ranks.pipeline)
        self.backend = choosing.choose_backend(ranks.backend, model, stages)
        # An error in here is sent to the other ranks, which wait in `building.build`.
        with choosing.starting(lambda: self.backend, stages):
            if clips is None and kl_clip == KL_CLIP:
                settings["clips"] = USUAL_CLIPS
            limits: Clips = group_of("clips", settings)
            self._settings = flat(settings)
            bounds = {"kl": kl_clip, "norm": limits.norm_clip, **limits.further}
            self._clipping = Clipping.of(bounds, lr)
            self._parts = parts = parts_of(
                model,
                self._settings,
                self.backend,
                stages,
                keeps_hooks=self._keeps_hooks,
                common=(self._clipping,),
            )
            self._settings["fisher"] = parts.fisher.kind
        measuring = Measuring(self.backend.phases, phases.names)
        self.curvature = Curvature.of(parts)
        try:
            self._require_read()
        except ValueError:
            self.close()  # no caller gets this object, and its hooks would stay
            raise
        stages.look_over(self.curvature.registration)
        self.engine = Engine(
            self.curvature,
            clipping=self._clipping,
            moving_optimizer=grouping(optimizer),
            measuring=measuring,
        )
        parts.refresh.warn_of_settings(self.curvature.blocks)

    def _require_read(self) -> None:
        """Raise a ValueError if no block reads a setting, which would be ignored silently."""
        clips = {"norm_clip": USUAL_CLIPS.norm_clip}
        usual = {**defaults(Preconditioner), "fisher": "empirical", **clips}
        blocks = self.curvature.blocks
        kinds = [blocks[first] for first, *_ in self.placement.kinds]
        combinations.require_read(self._settings, usual, kinds, self._parts.stages.totals)

    def observe(self, outputs: Tensor | Sequence[Tensor], *, weight: float = 1.0) -> None:
        """Compute the statistics of the Monte-Carlo or type-2 Fisher, if this step takes any.

        Call it between the model's forward pass and ``loss.backward()``, once per forward pass. It
        sends vectors backward to the layers' outputs; no gradient of a parameter changes. The
        forward-only Fisher does not need it, and uses only the number of samples from it; with the
        empirical one it does nothing.

        Args:
            outputs: The model's output, ``[N, ...]``, with its graph; or several, for a loss that
                is a `soframe.losses.SumLoss` over them.
            weight: Weight of this forward pass in the statistics, relative to its share of the
                samples.

        Raises:
            TypeError: If the outputs are not tensors, or are several without such a loss.
            RuntimeError: If no registered layer ran with gradients.
        """
        self.curvature.require_open()
        fisher, curvature = self._parts.fisher, self.curvature
        if fisher.kind == "empirical":
            return
        if curvature.capture.is_idle and self.changed:
            return  # layers that have just thawed have hooks from the next step on
        curvature.statistics.window.weigh(weight)
        fisher.observe(outputs, curvature.capture, self._parts.samples, curvature.steps)

    def count(self, terms: int | Tensor | None = None, *, rows: Tensor | None = None) -> None:
        """Declare the loss terms and the padding of the forward passes that follow.

        Call it before the model's forward pass, once for each backward pass: if the loss ignores
        some of its terms, if inputs are padded, or if the loss is not a batch mean. After
        the first call, every forward pass that gives statistics needs one. Between statistics steps
        it does nothing.

        Args:
            terms: The number of terms that the loss of this rank's backward pass is a mean over; or
                their mask, ``[N, ...]``, bool, such as ``labels != -100``. The Fishers with
                `observe` need the mask if some terms are ignored. None to count by ``samples``.
            rows: The mask of the positions that are data rather than padding, ``[N, ...]``, bool or
                of 0 and 1, such as an attention mask. The others are left out of the factors of
                layers that are called with as many samples and positions; no input of the loss may
                depend on them. None for all.

        Raises:
            TypeError: If ``terms`` is neither a number nor a mask, or ``rows`` no mask.
            ValueError: If ``terms`` is given and the ``samples`` of the constructor is a callable,
                or the scaling is ``"kaisa"``, which does not count; or a schedule runs the forward
                passes; or see `soframe.capture.counting.declare`.
        """
        self.curvature.count(terms, rows=rows)

    # -- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    @untraced
    def step(self) -> None:
        """Rewrite the gradient of every registered parameter, in place.

        Raises:
            RuntimeError: If the preconditioner is closed; if a ``GradScaler`` still scales the
                gradients, or was not given; or if a block has a gradient and no statistics in its
                first windows, or the reverse (`soframe.step.effect`).
            ValueError: If a setting that may change, such as a schedule, is out of range.
        """
        with self.curvature.stepping():
            self.engine.step()

    def reset_batch(self) -> None:
        """Discard the statistics of the backward passes since the last step.

        If gradients are zeroed without a ``step``, their statistics are dropped without this call,
        except for an `observe` whose backward pass has not run. Every rank must call.
        """
        self.curvature.begin()

    # -- for an optimizer that tries several dampings between step() and its update ----------------

    def damp(self, dampings: Mapping[str, float]) -> None:
        """Set dampings of single blocks from now on, in place of ``damping=``.

        Args:
            dampings: Block name -> damping, the same on every rank; see `blocks`. They are part of
                the state, and outlast a freeze of their layers.

        Raises:
            ValueError: If there is no such block, or a damping is negative or not finite.
        """
        known = self.curvature.dampings.keys() | {block.name for block in self.blocks}
        for name, damping in dampings.items():
            if name not in known:
                raise ValueError(f"damp: there is no block {name!r}, see preconditioner.blocks")
            require_numbers(f"damp: {name}", damping=damping)
            if not 0 <= damping < math.inf:
                raise ValueError(f"damp: {name}: {damping!r} is not at least 0 and finite")
        self.curvature.damp(dampings)

    @torch.no_grad()
    def propose(self) -> None:
        """After `step`, precondition the present ``.grad`` with the present dampings; see `damp`.

        Factors are solved anew if their solver damps them. Blocks whose updates depend on earlier
        gradients keep their present ``.grad``; no state of a method changes. Every rank must call.
        """
        self.engine.propose(self.damping)

    def snapshot(self) -> dict[str, Solved]:
        """Return the second-order data and the damping of each block, by name, for `restore`.

        ``failed`` of an entry is True if a factor could not be solved since the last snapshot.
        """
        return self.curvature.snapshot()

    def restore(self, snapshot: Mapping[str, Solved]) -> None:
        """Precondition with the second-order data and dampings of one snapshot or of parts of more.

        Args:
            snapshot: Block name -> its entry of a `snapshot`; other blocks are unchanged.

        Raises:
            ValueError: If there is no such block.
        """
        known = {block.name for block in self.blocks}
        for name in snapshot:
            if name not in known:
                raise ValueError(f"restore: there is no block {name!r}, see preconditioner.blocks")
        self.curvature.restore(snapshot)

    def forget(self) -> None:
        """Drop all statistics, second-order data and states at the next step, on all ranks."""
        self.curvature.watch.forget()

    @property
    def changed(self) -> bool:
        """Whether parameters were frozen, unfrozen or replaced since the last step."""
        return self.curvature.watch.changed()

    @property
    def takes_statistics(self) -> bool:
        """Whether the backward passes before the next `step` give statistics, of any layer."""
        return bool(self.curvature.statistics.window.due)

    # -- the coming step ----------------------------------------------------------------------

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of the curvature, in the order of their first modules in the model."""
        self.engine.verdict.settle()
        return self.curvature.blocks

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return self.curvature.steps

    @property
    def damping(self) -> float:
        """The damping of the coming step, for blocks without one of their own."""
        return self._parts.damping.at(self.steps)

    @property
    def decay(self) -> float:
        """The EMA decay of running factors at the coming step."""
        return self._parts.decay.at(self.steps)

    @property
    def kl_clip(self) -> float | None:
        """The bound of the KL clip at the coming step; None if it is off."""
        return self._clipping.at(self.steps).get("kl")

    @property
    def norm_clip(self) -> float | None:
        """The bound of the norm clip at the coming step; None if it is off."""
        return self._clipping.at(self.steps).get("norm")

    @property
    def lr(self) -> float:
        """The learning rate of the clips at the coming step; one unless ``lr=`` is given."""
        return self._clipping.lr.at(self.steps)

    @property
    def statistics_every(self) -> int:
        """The interval of statistics at the coming step, in steps."""
        return self._parts.refresh.interval(self.curvature.placed, self.steps)

    @property
    def solve_every(self) -> int | Literal["demand"]:
        """The interval of solves at the coming step, in steps."""
        interval = self._parts.refresh.solve_every.at(self.steps)
        return "demand" if interval == NEVER else interval

    @property
    def updated(self) -> bool:
        """Whether the updates of the last step count; False if it was skipped."""
        return self.engine.verdict.taken

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of skipped updates and statistics, and of retried and failed solves."""
        self.engine.verdict.settle()
        return self.curvature.counts

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, independent of world size and strategy.

        If the strategy stores factors or second-order data on some ranks only (all but
        ``comm-opt``), call it on every rank. The statistics of the window under way are not part of
        the state. With ``background=``, solves under way are installed first: then every rank must
        call it, with any strategy.

        Returns:
            Tensors, numbers and strings in dicts, for ``torch.save``.
        """
        self.land("Preconditioner.state_dict()")
        placed = self.curvature.placed
        return checksums.seal(state.save(placed, self.curvature.header()))

    def land(self, call: str) -> None:
        """Install all background solves; every rank must call. ``call`` names it in errors."""
        self.engine.verdict.settle()
        self.curvature.land(call)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue, on every rank, from a state, perhaps of another world size or strategy.

        A window begins, so zero the gradients of backward passes since the last step.

        Args:
            saved: A result of `state_dict`; on stages of a pipeline this rank's own, or the result
                of `soframe.checkpoint.merge` for the states of all.

        Raises:
            ValueError: If the state of any rank is foreign, truncated, damaged or of another model,
                or the ranks' states differ; then nothing changes on any rank.
        """

        @checksums.reading()
        def check() -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
            part = self._parts.stages.own_part(saved)
            # A part of a merged state: its checksums were made for the whole.
            if part is not saved:
                checksums.verify(saved)
                part = checksums.seal(part)
            self.curvature.check_header(part)
            tensors = dict(checksums.tensors_of(part["blocks"]))  # such as "head/factors/A"
            state.check(part, tensors, self.curvature.placed, everywhere=True)
            return part, tensors

        self.load_checked(check)

    def load_checked(
        self, check: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
    ) -> None:
        """Continue from the header and the tensors of a state that ``check`` returns, or raises."""
        saved = self.curvature.load_checked(check)
        self.engine.verdict.forget()
        # The metrics of the last step are of another run.
        self.engine.measuring.forget()
        self.curvature.begin(saved.get("late", ()))

    @property
    def stage(self) -> str:
        """The stages of a pipeline on this rank, such as ``"0, 2 of 4"``; empty without one."""
        return self._parts.stages.name

    # -- inspection ---------------------------------------------------------------------------

    @property
    def home(self) -> GradientHome:
        """Where gradients are stored."""
        return self._parts.home

    @property
    def placement(self) -> Placement:
        """The owners, gradient workers and receivers of each block."""
        return self.curvature.placement

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.backend.world_size

    def __repr__(self) -> str:
        names = (
            "damping",
            "decay",
            "kl_clip",
            "norm_clip",
            "lr",
            "statistics_every",
            "solve_every",
        )
        strategy = self.curvature.strategy
        components = {"strategy": strategy, "home": self.home, "backend": self.backend}
        where = {"steps": self.steps, "rank": self.backend.rank, "world_size": self.world_size}
        return describing.text(
            type(self).__name__,
            model=self._parts.model,
            blocks=self.curvature.blocks,
            settings={**self._settings, **components},
            now={name: getattr(self, name) for name in names} | where,
        )

    def report(self) -> Report:
        """Return the planned bytes, and every parameter with its block or why it has none.

        Returns:
            The report; print it, or iterate over its rows.
        """
        # Before the first step every block is without statistics.
        blocks = self.curvature.blocks
        idle = {block.name for block in blocks if self.steps > 0 and block.mass == 0}
        report = self.curvature.report().with_note(
            "no statistics so far: its modules were not called in training, gradients are raw", idle
        )
        for block in blocks:
            if failures := block.record.failures:
                times = ", ".join(f"{name} {count}x" for name, count in failures.items())
                report = report.with_note(f"failed solves: {times}", {block.name})
        return report

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank holds.

        Returns:
            ``"factors"``, ``"accumulators"`` (of statistics whose reduction is deferred),
            ``"second_order"``, ``"statistics"`` (of the window under way), with ``background=``
            ``"under_way"`` (copies of factors, results not in use yet), ``"in_flight"`` if there
            are any (buffers of reductions under way; the call waits for these and frees them), and
            their ``"total"``.
        """
        curvature = self.curvature
        return state.memory_usage(
            curvature.placed, curvature.statistics.window, self._parts.solves.held()
        )

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes and calls of this rank's collectives so far.

        Returns:
            Phase -> ``{"bytes", "calls"}``, and ``"total"``; bytes count the buffers that this
            rank passes to collectives. Communication with other stages of a pipeline is the phase
            ``"stages"``.
        """
        traffic, pipe = self.backend.traffic(), self._parts.stages.backend
        if pipe is None:
            return traffic
        total, between = traffic.pop("total"), pipe.traffic()["total"]
        both = {key: total[key] + between[key] for key in total}
        return {**traffic, PHASE: between, "total": both}

    def measure(self, *, norms: bool | None = None, times: bool | None = None) -> None:
        """Choose the measurements of all steps from the next one on; by default none, at no cost.

        Ranks may choose different ones: measurements are not sent.

        Args:
            norms: Whether to measure the norms of gradients, updates and weights: a pass over each
                of them, in every step, without a wait for the device. None to leave it unchanged.
            times: Whether to time the phases, on the host's clock and, for blocks on a CUDA device,
                between events of its stream. True begins at zero. None to leave it unchanged.
        """
        placed, steps = self.curvature.placed, self.steps
        self.engine.measuring.choose(norms=norms, times=times, placed=placed, steps=steps)

    def metrics(self, *, spectra: Spectra = False, all_ranks: bool = False) -> dict[str, Any]:
        """Return the settings in force and the outcome of the last step, by block and overall.

        By default the call is local to this rank, and None stands for values that this rank does
        not have. With ``all_ranks`` every rank must call, and receives the values of all ranks. The
        guide "Measure, log and profile" describes each entry.

        Args:
            spectra: Whether to decompose the factors: their extreme eigenvalues, condition,
                effective rank. It takes about as long as a solve of every factor, on the device, in
                float64, each time. ``"full"`` adds all eigenvalues.
            all_ranks: Whether ranks exchange their values. Factors are then decomposed by their
                owners.

        Returns:
            Numbers, strings, lists and dicts, as in JSON. Norms are present for a step for which
            `measure` had turned them on, times for the steps since it turned them on.

        Raises:
            ValueError: If ``spectra`` is not one of these values.
            RuntimeError: If ``all_ranks``, and a rank does not call (under Gloo).
        """
        if not self.updated:
            self.engine.measuring.skipped()
        return self.engine.measuring.collect(
            self.curvature.placed,
            steps=self.steps,
            counters=self.counters,
            spectra=spectra,
            all_ranks=all_ranks,
        )

    def explain(self, name: str, *, all_ranks: bool = False) -> Explanation:
        """Explain the update of a block: each rank's part of the last window, factors, update.

        Use it if a factor or an update looks wrong. It decomposes all factors, see `metrics`.

        Args:
            name: The name of the block, as in `report`.
            all_ranks: Whether ranks exchange their values; every rank must call then.

        Returns:
            The explanation; print it.

        Raises:
            ValueError: If no block has this name.
            RuntimeError: If ``all_ranks``, and a rank does not call (under Gloo).
        """
        metrics = self.metrics(spectra=True, all_ranks=all_ranks)
        placed, statistics = self.curvature.placed, self.curvature.statistics
        return explain(name, placed, statistics, metrics, all_ranks=all_ranks)

    def covered(self) -> set[nn.Parameter]:
        """Return the parameters whose gradients `step` rewrites."""
        parameters: set[nn.Parameter] = set()
        for block in self.curvature.blocks:
            parameters.update(block.parameters.values())
        return parameters

    @property
    def loss(self) -> Loss | None:
        """The loss that defines the Fisher; None for the empirical one."""
        return self._parts.fisher.loss

    def close(self) -> None:
        """Remove every hook; the preconditioner cannot be used afterwards.

        Background solves are cancelled; one that has begun is waited for.
        """
        self.curvature.close()
