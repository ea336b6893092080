"""The preconditioner: its settings, construction and inspection; `Engine` has the step.

Two lines add it to a training script::

    preconditioner = soframe.Preconditioner(model, optimizer=optimizer)
    ...
    loss.backward()
    preconditioner.step()
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from soframe import combinations
from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome, PlainGrad
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.registration import Choice, Choices, unwrap
from soframe.blocks.report import Report, warn_of_lost_blocks
from soframe.blocks.stack import Solved
from soframe.blocks.watch import Watch
from soframe.capture.counting import Samples, declare
from soframe.capture.fisher import Fisher
from soframe.capture.hooks import Capture
from soframe.capture.loss_scale import LossScale
from soframe.capture.sampling import Sampler
from soframe.capture.untraced import untraced
from soframe.checks import arguments
from soframe.comm.stages import PHASE
from soframe.damping.policies import DampingChoice
from soframe.diagnostics.metrics import Measuring, Spectra, Taken
from soframe.diagnostics.norms import measure
from soframe.kernels.devices import keep_memory
from soframe.kernels.precision import within
from soframe.layers.base import LayerHelper
from soframe.losses.base import Loss
from soframe.methods.scaling import Scale
from soframe.registry import KINDS
from soframe.schedules import Interval, Schedule, Scheduled
from soframe.settings import Clips, Distribution, Statistics, defaults, flat, group_of
from soframe.setup import building, describing
from soframe.state import saving as state
from soframe.state.stateful import Stateful
from soframe.state.transfer import hand_over
from soframe.step import gradients as averaging
from soframe.step.clip import Bounds, Clipped
from soframe.step.effect import Effect
from soframe.step.gradients import Gradients
from soframe.step.moving import grouping
from soframe.step.outcome import Outcome
from soframe.step.refresh import Refresh
from soframe.step.solves import Solves
from soframe.step.statistics import Accumulator
from soframe.step.status import Settings
from soframe.step.updates import Update, exchange, precondition, write
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement


class Preconditioner(Stateful):
    """Rewrites the gradients of a model, in place, with second-order information.

    Call `step` between ``loss.backward()`` and ``optimizer.step()``, on every rank. Under
    ``torch.amp.GradScaler`` call ``scaler.unscale_(optimizer)`` first.

    Args:
        model: The model; DistributedDataParallel and compiled wrappers are looked through. On the
            meta device it is planned: `report` and ``placement`` work, and steps need weights.
        method: The curvature method: a name, class, instance, or a mapping from patterns on module
            names to one of these (first match wins).
        solver: The solver, specified in the same way; None for ``"inverse"``, or ``"eigen"`` if a
            method needs eigenvectors, which `report` says.
        strategy: The distribution strategy: a name, class or instance.
        optimizer: The optimizer behind the preconditioner, which must have the parameters of every
            block.
        lr: The learning rate of the steps that the clips bound, for a clipped step of the bound's
            length at any rate, as in kfac-pytorch. None, the default, for clips that bound updates:
            the optimizer's rate scales a clipped step like any other.
        damping: Added to the curvature's eigenvalues: a number, a callable of the step, or the
            name, class or instance of a damping policy that needs no reduction ratio.
        decay: The EMA decay of the running factors, per statistics step.
        kl_clip: Bound on ``sum <update, gradient>``, about twice the KL divergence of a step of
            rate one; None turns it off.
        statistics_every: Interval of statistics steps, in steps; None for 10 where statistics come
            from calls (K-FAC), and 1 where they come from the averaged gradient (SOAP, Shampoo).
        solve_every: Interval of solves, in steps; None for 10, which becomes 100 after 100 steps
            if all methods read calls.
        background: The number of steps between the start of a solve and the use of its results;
            meanwhile it runs in a thread of its own (on CUDA, on a stream of its own). A number
            gives the same results in every run; ``"ready"`` uses them at the first step that finds
            them done; 0 solves in the step.
        layers: Helper classes by patterns on module names, which take precedence over the registry;
            ``"all"`` in place of a class, or of the mapping, for every helper that soframe has
            instead of the ones for linear layers and convolutions.
        skip: Patterns (``re.search``) on qualified module names or class names to leave alone.
        auxiliary: The method of all trainable parameters that ``method`` leaves out, such as
            ``"adamw"``: a name, class or instance; None to leave their gradients alone.
        grad_scaler: The ``GradScaler`` in use; or a callable that returns it, if it does not exist
            yet, or returns the factor by which the loss is multiplied.
        statistics: The choice of Fisher, rows and scaling: a `soframe.Statistics`.
        distribution: How ranks communicate, and where gradients are stored: a
            `soframe.Distribution`.
        clips: The other clips: a `soframe.Clips`.

    Attributes:
        backend: The communication backend.
        home: Where gradients are stored.
        placement: The owners, gradient workers and receivers of each block.
        counters: The numbers of updates and of statistics that were skipped because values were not
            finite, and of factorisations that were retried in float64 or failed.
        updated: Whether the last step rewrote gradients; False if it zeroed them.

    Raises:
        ValueError: If a setting is out of range, a component does not exist, the model has nothing
            to precondition, or the ranks do not agree.
        TypeError: If a setting has the wrong type.
    """

    placement: Placement
    counters: dict[str, int]
    _placed: PlacedBlocks
    _statistics: Accumulator
    _effect: Effect

    _beside = False  # whether another preconditioner may hook the same modules

    def __init__(
        self,
        model: nn.Module,
        method: Choice = "kfac",
        solver: Choice = None,
        strategy: str | type[Strategy] | Strategy = "comm-opt",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr: Schedule | None = None,
        damping: DampingChoice = 0.05,
        decay: Schedule = 0.95,
        kl_clip: Schedule | None = 0.1,
        statistics_every: Interval | None = None,
        solve_every: Interval | None = None,
        background: int | Literal["ready"] = 0,
        layers: Mapping[str, type[LayerHelper] | Literal["all"]] | Literal["all"] | None = None,
        skip: Sequence[str] = (),
        auxiliary: Choice = None,
        grad_scaler: torch.amp.GradScaler | Callable[[], float] | None = None,
        statistics: Statistics | None = None,
        distribution: Distribution | None = None,
        clips: Clips | None = None,
    ) -> None:
        given = dict(locals())
        ranks: Distribution = group_of("distribution", given)
        self.backend, self._stages = building.choose_backends(ranks.backend, ranks.pipeline)
        # An error in here is sent to the other ranks, which wait in `building.build`.
        with building.starting(lambda: self.backend, self._stages):
            self._settings = flat(given)
            # These two come from `locals()` and are no settings.
            del self._settings["self"], self._settings["model"]
            chosen: Statistics = group_of("statistics", given)
            limits: Clips = group_of("clips", given)
            scaled = grad_scaler is not None
            building.check_settings(self._settings)
            layers = {"": "all"} if layers == "all" else {} if layers is None else layers
            cut = {} if chosen.cut is None else chosen.cut
            building.check_cut(cut)
            mappings = {"layers": layers, "method": method, "solver": solver, "cut": cut}
            arguments.check(
                model=model,
                optimizer=optimizer,
                grad_scaler=grad_scaler,
                dtype=chosen.dtype,
                state_dtype=chosen.state_dtype,
                skip=skip,
                mappings=mappings,
            )
            building.check_home(ranks.home)
            own = ranks.home
            self.home: GradientHome = PlainGrad(model, optimizer) if own is None else own
            self._model = unwrap(model)
            self._damping = building.choose_damping(damping)
            self._decay = Scheduled("decay", decay, high=1.0)
            self._bounds = Bounds.of(kl_clip, limits.norm_clip, lr)
            self._refresh = Refresh.of(
                statistics_every,
                solve_every,
                ranks.stagger,
                reads_calls=all(one.captures for one in building.methods(method)),
            )
            # A stage of a pipeline sees inputs or outputs of the model, and not both.
            counted: Samples = "batch" if self._stages.backend is not None else None
            self._scaling, self._samples = chosen.scaling, chosen.samples or counted
            self._precision = chosen.precision
            self._loss_average = chosen.loss_average
            self._loss_scale, self._optimizer = LossScale(grad_scaler), optimizer
            self._grouping = grouping(optimizer)
            self._strategy: Strategy = KINDS["strategy"].build(strategy, Strategy)
            self._solves = Solves(background, overlap=self.backend.overlap)
            self._gradients = ranks.gradients
            self._sampler = Sampler(chosen.rows, self.backend.rank)
            modelled = None if chosen.loss is None else KINDS["loss"].build(chosen.loss, Loss)
            # None leaves the choice to a trust region; without one it is the empirical Fisher.
            fisher = "empirical" if chosen.fisher is None else chosen.fisher
            self._fisher = Fisher(fisher, modelled)  # type: ignore[arg-type]  # checked there
            self._settings["fisher"] = fisher
            self._stages.require_settings(probed=self._fisher.probed, scaled=scaled)
            self._choices = Choices(
                method=method,
                solver=solver,
                home=self.home,
                layers=dict(layers),
                skip=tuple(skip),
                dtype=chosen.dtype,
                state_dtype=chosen.state_dtype,
                offload=chosen.offload,
                forward_only=self._fisher.kind == "forward-only",
                damping=self._damping,
                scaling=self._scaling,
                auxiliary=auxiliary,
                observed=self._fisher.probed,
                draws=self._fisher.kind == "monte-carlo",
                ranks=self.backend.global_ranks,
                cut=dict(cut),
                staged=self._stages.backend is not None,
            )
            self._capture = Capture(
                probing=self._fisher.probed,
                model=self._model,
                alone=self.backend.alone,
                precision=self._precision,
            )
            self._steps, self.outcome = 0, Outcome(self.backend.rank)
            self._measuring = Measuring(self.backend.phases)
            self._blocks: list[Block] = []
            self._dampings: dict[str, float | None] = {}  # of blocks that may be gone for a while
            self._built, self._closed = False, False
        self._start()
        self._refresh.warn_of_settings(self._blocks, stacklevel=3)

    def _start(self) -> None:
        """Compare pipeline stages, build this rank's part, and check that all settings are read."""
        keep_memory()
        if self._stages.backend is not None:
            self._meet_stages()
        with self.home.shaped(self._model.parameters()), self._stages.together():
            self._build()
        usual = {**defaults(Preconditioner), "fisher": "empirical"}
        kinds = [self._blocks[first] for first, *_ in self.placement.kinds]
        try:
            # A setting that no block reads would be ignored silently.
            combinations.require_read(self._settings, usual, kinds, self._stages.totals)
        except ValueError:
            self.close()  # no caller gets this object, and its hooks would stay
            raise
        self._stages.look_over(self._registration)

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
            TypeError: If the outputs are no tensors, or several without such a loss.
            RuntimeError: If no registered layer ran with gradients.
        """
        self._require_open()
        if self._fisher.kind == "empirical":
            return
        self._statistics.weigh(weight)
        self._fisher.observe(outputs, self._capture, self._samples, self._steps)

    def count(self, terms: int | Tensor | None = None, *, rows: Tensor | None = None) -> None:
        """Declare the loss terms and the padding of the forward passes that follow.

        Call it before the model's forward pass, once for each backward pass: if the loss ignores
        some of its terms, if inputs are padded, or if the loss is no mean over the batch. After
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
        self._stages.require_uncounted()
        building.check_count(terms is not None, self._samples, self._scaling)
        if self._capture.enabled:
            self._capture.say(declare(terms, rows))

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
        self._require_open()
        if self._planned:
            building.require_materialised(self._model.named_parameters())
        with self.home.shaped(self._model.parameters()), within(self._precision):
            self._take_step()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this preconditioner is closed")
        if self._capture.closed:
            raise RuntimeError("this preconditioner was replaced by a newer one on the same model")

    def _note(
        self,
        gradients: Gradients,
        updates: Sequence[Update],
        settings: Settings,
        clipped: Clipped,
    ) -> None:
        # The norms of updates that are discarded are not measured.
        norms = None
        if self._measuring.norms and clipped.finite:
            norms = measure(self._blocks, gradients, updates)
        taken = Taken(
            step=self._steps,
            damping=settings.damping,
            decay=settings.decay,
            kl_clip=settings.limits.kl,
            norm_clip=settings.limits.norm,
            clipped=clipped,
            norms=norms,
        )
        self._measuring.note(taken)

    # -- for an optimizer that tries several dampings between step() and its update ----------------

    def damp(self, dampings: Mapping[str, float]) -> None:
        """Set dampings of single blocks from now on, in place of ``damping=``.

        Args:
            dampings: Block name -> damping, the same on every rank; see `blocks`. They are part of
                the state, and outlast a freeze of their layers.
        """
        self._dampings.update(dampings)
        for block in self._blocks:
            if block.name in dampings:
                block.damp(dampings[block.name])

    @torch.no_grad()
    def propose(self) -> None:
        """After `step`, precondition the present ``.grad`` with the present dampings; see `damp`.

        Factors are solved anew if their solver damps them. Blocks whose updates depend on earlier
        gradients keep their present ``.grad``; no state of a method changes. Every rank must call.
        """
        self.outcome.settle()
        able = [block for block in self._blocks if not block.remembers]
        # Other solvers apply the damping to the update, and need no new solve.
        due = [b for b in able if b.mass > 0 and b.solver.damps_factors]
        damping = self.damping
        with self.home.shaped(self._model.parameters()):
            self._solves.update(self._placed, due, damping=damping, counters=self.counters)
            gradients = {
                stack: gradient
                for stack, gradient in self._raw.now().items()
                if not stack.like.remembers
            }
            with within(self._precision):
                updates = precondition(self._placed, gradients, damping)
            exchange(self._placed, updates)
            write(updates, self.home)
        self._measuring.redamped(damping)

    def snapshot(self) -> dict[str, Solved]:
        """Return the second-order data and the damping of each block, by name, for `restore`.

        ``failed`` of an entry is True if a factor could not be solved since the last snapshot.
        """
        return {block.name: block.snapshot() for block in self._blocks}

    def restore(self, snapshot: Mapping[str, Solved]) -> None:
        """Precondition with the second-order data and dampings of a snapshot, or of parts of some.

        Args:
            snapshot: Block name -> its entry of a `snapshot`; other blocks are unchanged.
        """
        for block in self._blocks:
            if block.name in snapshot:
                block.restore(snapshot[block.name])

    def _rebuild(self, *, changed: bool) -> None:
        """Register the model anew if it has changed, before any stage continues."""
        with self._stages.together():
            if changed:
                self._build()
        self._stages.look_over(self._registration)
        # All stages take statistics at the same steps: the most that any of them needs.
        self._refresh.owe(int(self._stages.largest(self._refresh.owed)))

    def forget(self) -> None:
        """Drop all statistics, second-order data and states at the next step, on all ranks.

        :meta private:
        """
        self._watch.forget()

    @property
    def changed(self) -> bool:
        """Whether parameters were frozen, thawed or replaced since the last step."""
        return self._watch.changed()

    @property
    def takes_statistics(self) -> bool:
        """Whether the backward passes before the next `step` give statistics, of any layer."""
        return bool(self._statistics.due)

    # -- building -----------------------------------------------------------------------------

    def _common(self) -> tuple[object, ...]:
        """Return the settings that all copies of all stages must have in common."""
        return (
            self._damping,
            self._decay,
            self._bounds,
            self._scaling,
            self._loss_average,
            self._fisher.kind,
            building.describe_samples(self._samples),
            f"precision={self._precision!r}",
            self._sampler,
        )

    def _meet_stages(self) -> None:
        """Compare the settings of a model's stages before they are registered."""
        settings = (
            *self._common(),
            self._gradients,
            self._solves,
            self._refresh,
        )
        head = building.meet_stages(self._model, self._stages, self.backend, settings)
        self._choices = replace(self._choices, head_in=head)

    def _build(self) -> None:
        """Register the model, place the work and hook the layers."""
        settings = (
            *self._common(),
            f"optimizer={type(self._optimizer).__name__}",
            building.averaged_tensors(self._model, self._gradients),
            type(self.home),  # the instance may differ by rank
            self.backend.fused,
        )
        # Moments of gradients outlast a freeze, as in torch's optimizers.
        of_gradients = [block for block in self._blocks if not block.captured]
        kept = frozenset(id(p) for block in of_gradients for p in block.parameters.values())
        registration, placement, self._strategy = building.build(
            self._model,
            choices=replace(self._choices, kept=kept),
            optimizer=self._optimizer,
            strategy=self._strategy,
            backend=self.backend,
            background=self._solves,
            refresh=self._refresh,
            settings=settings,
            capture=self._capture,
            beside=self._beside,
            gradients=self._gradients,
            stages=self._stages,
        )
        again, self._built = self._built, True
        # A choice by size stays when the model changes, with the data that it made.
        self._choices = replace(self._choices, solver=registration.solver)
        if again:
            # Install background solves in the old blocks, whose state moves below.
            self._land("Preconditioner.step()")
            self._dampings.update((block.name, block.record.damping) for block in self._blocks)
        former = {block.name for block in self._blocks}
        self._blocks = registration.blocks
        self._planned = any(block.device.type == "meta" for block in self._blocks)
        self._relatively_damped = any(block.relatively_damped for block in self._blocks)
        placed = PlacedBlocks(registration.blocks, placement, self.backend)
        if again and hand_over(self._placed, placed, forgets=self._watch.forgets):
            # Blocks without statistics take them now, not at the next interval; and in the next
            # window too, since the hooks may have missed the calls of this one.
            self._refresh.owe(2)
        for block in registration.blocks if self._dampings else ():
            if block.name not in former and block.record.damping is None:
                block.damp(self._dampings.get(block.name))
        if again:
            placed.errors.extend(self._placed.errors)
            warn_of_lost_blocks(self._report, registration.report, stacklevel=9)
        self._placed, self.placement = placed, placement
        report = registration.report
        if again:
            report = replace(report, solver=self._report.solver or report.solver)
        self._report: Report = report
        self._registration = registration
        self._watch = Watch(self._model)
        self._listen(again=again)
        if not again:
            self._begin()

    def _listen(self, *, again: bool) -> None:
        """Hook gradients and layer calls; ``again`` if the window of older blocks continues."""
        self._effect = Effect(
            self._model,
            self._blocks,
            self._registration.others,
            self._capture,
            home=self.home,
            rebuilt=again,
        )
        scale = Scale(
            scaling=self._scaling,
            loss_average=self._loss_average,
            world_size=self.backend.world_size,
            own_gradients=self._fisher.probed,
        )
        statistics = Accumulator(
            self._placed,
            scale=scale,
            samples=self._samples,
            grad_scale=self._stages.scaled(self._loss_scale.now),
            capture=self._capture,
            sampler=self._sampler,
            voided=self._loss_scale.begin,
            part_of=self._stages.part_of,
        )
        if again:
            statistics.resume(self._statistics)
        self._statistics = statistics
        self._raw = averaging.source_of(self._gradients, self._model, self._placed, self.home)
        statistics.listen(self._stages.roots(self._model))

    # -- inspection ---------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.backend.world_size

    @property
    def measures_norms(self) -> bool:
        """Whether the coming step measures norms, see `measure`.

        :meta private:
        """
        return self._measuring.norms

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
        components = {"strategy": self._strategy, "home": self.home, "backend": self.backend}
        where = {"steps": self._steps, "rank": self.backend.rank, "world_size": self.world_size}
        return describing.text(
            type(self).__name__,
            model=self._model,
            blocks=self._blocks,
            settings={**self._settings, **components},
            now={name: getattr(self, name) for name in names} | where,
        )

    def report(self) -> Report:
        """Return the planned bytes, and every parameter with its block or why it has none.

        Returns:
            The report; print it, or iterate over its rows.
        """
        # Before the first step every block is without statistics.
        idle = {block.name for block in self._blocks if self._steps > 0 and block.mass == 0}
        report = replace(self._report, memory=self.placement.fullest).with_note(
            "no statistics so far: its modules were not called in training, gradients are raw", idle
        )
        for block in self._blocks:
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
        return state.memory_usage(self._placed, self._solves.held())

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes and calls of this rank's collectives so far.

        Returns:
            Phase -> ``{"bytes", "calls"}``, and ``"total"``; bytes are of the buffers that this
            rank passes to collectives. Communication with other stages of a pipeline is the phase
            ``"stages"``.
        """
        found, pipe = self.backend.traffic(), self._stages.backend
        if pipe is None:
            return found
        total, between = found.pop("total"), pipe.traffic()["total"]
        both = {key: total[key] + between[key] for key in total}
        return {**found, PHASE: between, "total": both}

    def measure(self, *, norms: bool | None = None, times: bool | None = None) -> None:
        """Choose the measurements of all steps from the next one on; by default none, at no cost.

        Ranks may choose different ones: measurements are not sent.

        Args:
            norms: Whether to measure the norms of gradients, updates and weights: a pass over each
                of them, in every step, without a wait for the device. None to leave it unchanged.
            times: Whether to time the phases, on the host's clock and, for blocks on a CUDA device,
                between events of its stream. True begins at zero. None to leave it unchanged.
        """
        self._measuring.choose(norms=norms, times=times, placed=self._placed, steps=self._steps)

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
            self._measuring.skipped()
        return self._measuring.collect(
            self._placed,
            steps=self._steps,
            counters=self.counters,
            spectra=spectra,
            all_ranks=all_ranks,
        )

    def covered(self) -> set[nn.Parameter]:
        """Return the parameters whose gradients `step` rewrites."""
        return {p for block in self._blocks for p in block.parameters.values()}

    @property
    def loss(self) -> Loss | None:
        """The loss that defines the Fisher; None for the empirical one."""
        return self._fisher.loss

    def close(self) -> None:
        """Remove every hook; the preconditioner cannot be used afterwards.

        Background solves are cancelled; one that has begun is waited for.
        """
        self._capture.close()
        self._solves.close()
        # Wait for collectives that are still under way.
        for stack in self._placed.stacks:
            stack.arrive()
        self._closed = True
