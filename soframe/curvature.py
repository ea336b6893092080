"""The curvature of a model: its blocks, their statistics, running factors and second-order data.

Fitted to data, or followed in training, it is a matrix over the parameters, for products::

    curvature = soframe.Curvature(model, method="ekfac")
    curvature.fit(loader, lambda model, batch: loss_of(model, batch))
    direction = curvature.inverse(damping=1e-3) @ gradients

A training step uses it by windows: a window is everything since the last step. Passes add
statistics to it. The phases of the step (`soframe.step.phases`) fold them into running factors,
solve the blocks that are due, and compute updates.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block, PlacedBlocks, Solved
from soframe.blocks.registration import Choice, Registration
from soframe.blocks.report import Report, warn_of_lost_blocks
from soframe.blocks.survey import plain_name
from soframe.blocks.watch import Watch
from soframe.capture.counting import declare
from soframe.capture.hooks import Capture
from soframe.checks.values import require_integer, require_numbers
from soframe.checks.warning import warn
from soframe.comm.agreement import add_over_ranks, fingerprint, require_common
from soframe.comm.base import Backend
from soframe.comm.stages import STAGES
from soframe.damping.policies import check_damping, damping_at
from soframe.estimate import averages
from soframe.estimate.gradients import AveragedGradients, Gradients, source_of
from soframe.estimate.plan import Plan
from soframe.estimate.statistics import Accumulator
from soframe.estimate.updates import Update
from soframe.kernels.devices import keep_memory
from soframe.kernels.precision import within
from soframe.layers.base import LayerHelper
from soframe.methods.base import Method
from soframe.methods.scaling import OfMeans, Scale
from soframe.products.fitting import Fit, LossOf
from soframe.products.operator import Operator, Spectra, spectra_of
from soframe.products.samples import Routing, SampleGradients, sample_gradients
from soframe.products.vectors import Coordinates, Vector
from soframe.registry import describe
from soframe.settings import Distribution, Statistics, flat, group_of
from soframe.setup import building, choosing, describing
from soframe.setup.parts import Parts, parts_of
from soframe.state import saving as state
from soframe.state.bound import OfModel
from soframe.state.entries import same_solvers
from soframe.state.transfer import hand_over
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement

_MOST = 5
"""The blocks that an error lists."""

FOLDER = "curvature"  # has the last saved curvature, and no checkpoint of training

COUNTERS = ("skipped_updates", "skipped_statistics", "retried_solves", "failed_solves")


class Curvature(OfModel):
    """The curvature of a loss in the parameters of a model, as a method approximates it.

    By block it is the method's own matrix, ``A ⊗ G`` for K-FAC, with zeros between blocks. It is
    symmetric and positive semi-definite. A damping is added to its eigenvalues, so that
    ``inverse(damping)`` is ``(A ⊗ G + damping I)^-1`` exactly, for any solver.

    Vectors are dicts: the name of each parameter that has a block, as in ``named_parameters``, and
    a tensor ``[..., *shape]``; leading dimensions are several vectors.

    `Preconditioner.curvature` is the curvature of training, at its last step. Layers that were
    frozen in that step, unless all were, keep their blocks and have no part in products. If the
    solver does not decompose factors, as ``"inverse"``, their present averages are decomposed.

    Args:
        model: The model; DistributedDataParallel and compiled wrappers are looked through.
        method: As for `soframe.Preconditioner`: ``"kfac"``, ``"kfac-reduce"``, ``"ekfac"``,
            ``"foof"``, ``"diagonal"``, or a method of your own with `Method.spectrum`.
        solver: The solver of its factors.
        strategy: The ranks that solve and hold the blocks. Under ``"comm-opt"`` each rank has all
            data, and may multiply vectors of its own.
        statistics: The choice of Fisher, loss, rows and dtype. Losses are means over each batch.
        distribution: How ranks communicate.
        layers: As for `soframe.Preconditioner`; all layers by default.
        skip: Patterns on names of modules to leave out.
        auxiliary: The method of all trained parameters that ``method`` leaves out, such as the ones
            of modules without a layer helper: ``"diagonal"`` for the diagonal of the Fisher, or
            ``"kfac"`` for all of it within a small parameter. They are exact, from the gradient of
            each sample, which takes one backward pass for each sample, and each column of a
            ``"type-2"`` Fisher; reentrant checkpoints hide uses of a parameter. None for no block.

    Raises:
        ValueError: If a setting is out of range, the method defines no products, the model has
            nothing that has a curvature, or some ranks take no statistics under the strategy.
        TypeError: If a setting has the wrong type.
    """

    _remedy = "save() it into a folder, build another one for the other model, and load() it there"

    parts: Parts  # the parts that its settings describe
    strategy: Strategy  # that it has settled on
    steps: int  # completed ones
    capture: Capture  # records calls of layers
    registration: Registration  # the blocks of the model, with its other parameters
    placement: Placement  # the owners, gradient workers and receivers of each block
    placed: PlacedBlocks  # the blocks with their places and stacks
    watch: Watch  # sees whether parameters are frozen, thawed or replaced
    dampings: dict[str, float | None]  # of single blocks, which may be gone for a while
    counts: dict[str, int]  # of skipped updates and statistics, retried and failed solves
    _report: Report
    _fit: Fit | None = None  # None in training
    _closed = False  # whether `close` was called
    relatively_damped: bool  # whether the damping of any block is relative to its curvature
    on_paper: bool  # whether the model is on the meta device, and can only be planned

    def __init__(
        self,
        model: nn.Module,
        method: Choice = "kfac",
        solver: Choice = "eigen",
        strategy: str | type[Strategy] | Strategy = "comm-opt",
        *,
        statistics: Statistics | None = None,
        distribution: Distribution | None = None,
        layers: Mapping[str, type[LayerHelper] | Literal["all"]] | Literal["all"] | None = "all",
        skip: Sequence[str] = (),
        auxiliary: Choice = None,
    ) -> None:
        groups = {"statistics": statistics, "distribution": distribution}
        ranks: Distribution = group_of("distribution", groups)
        _require_served((method, auxiliary), group_of("statistics", groups), ranks)
        backend = choosing.choose_backend(ranks.backend, model)
        with choosing.starting(lambda: backend):
            settings = {
                "method": method,
                "solver": solver,
                "strategy": strategy,
                "optimizer": None,
                "damping": 1.0,  # of solves, which products do not use
                "decay": 0.0,
                "statistics_every": 1,
                "solve_every": 2,
                "background": 0,
                "layers": layers,
                "skip": skip,
                "auxiliary": auxiliary,
                "grad_scaler": None,
                **groups,
            }
            # A preconditioner may train the same model.
            parts = parts_of(model, flat(settings), backend, keeps_hooks=True, means=True)
        self._open(parts)
        _require_all_data(self.placed, self.strategy)
        self._fit = Fit(
            parts.model,
            self.placed,
            self.capture,
            parts.fisher,
            self.statistics,
            parts.solves,
            samples=parts.samples,
        )
        if lost := self._coordinates.lost:
            reasons = "; ".join(f"{name}: {why}" for name, why in lost.items())
            warn(
                f"the curvature leaves parameters out. {reasons}. With auxiliary='diagonal' they "
                f"have a block each"
            )

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """Return a curvature of parts that were made for training, with its layers hooked."""
        curvature = cls.__new__(cls)
        curvature._open(parts)
        return curvature

    def _open(self, parts: Parts) -> None:
        self.parts, self.steps, self.dampings = parts, 0, {}
        self._choices, self.strategy = parts.choices, parts.strategy
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._spectra: Spectra | None = None
        self._spectra_of = -1  # the number of steps at which they were taken
        self.capture = Capture(
            probing=parts.fisher.probed,
            model=parts.model,
            alone=parts.backend.alone,
            backend=parts.backend,
            precision=parts.precision,
        )
        keep_memory()
        if parts.stages.backend is not None:
            self._meet_stages()
        with parts.home.shaped(parts.model.parameters()), parts.stages.together():
            with building.uncollected():
                self._build()
            self.begin()

    # -- building -----------------------------------------------------------------------------

    def _common(self) -> tuple[object, ...]:
        """Return the settings that all copies of all stages must have in common."""
        parts = self.parts
        # Each rank counts its own samples.
        samples = "a callable" if callable(parts.samples) else repr(parts.samples)
        return (
            parts.damping,
            parts.decay,
            parts.scaling,
            parts.loss_average,
            parts.fisher.kind,
            f"samples={samples}",
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
        former, window, report = self.placed, self.statistics.window, self._report
        # Install background solves in the old blocks, whose state moves below.
        self.land("Preconditioner.step()")
        self.dampings.update((block.name, block.record.damping) for block in former.blocks)
        forgets = self.watch.forgets
        with building.uncollected():
            self._build(former)
        self.statistics.resume(window)
        windows = (window, self.statistics.window)
        if hand_over(former, self.placed, windows, forgets=forgets):
            # Blocks without statistics take them now, not at the next interval; and in the next
            # window too, since the hooks may have missed the calls of this one.
            self.parts.refresh.owe(2)
        names = {block.name for block in former.blocks}
        for block in self.blocks:
            if block.name not in names and block.record.damping is None:
                block.damp(self.dampings.get(block.name))
        self.placed.errors.extend(former.errors)
        warn_of_lost_blocks(report, self._report)
        if report.solver:
            self._report = replace(self._report, solver=report.solver)

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
        # Moments outlast a freeze, as in torch's optimizers; statistics one of the whole block.
        kept: set[int] = set()
        if former is not None:
            for block in former.blocks:
                if block.frozen or not block.captured:
                    kept.update(map(id, block.parameters.values()))
        choices = replace(self._choices, kept=frozenset(kept))
        registration, placement, self.strategy = building.build(
            parts, choices, self.strategy, self.capture, settings
        )
        # A choice by size stays when the model changes, with the data that it made.
        self._choices = replace(choices, solver=registration.solver)
        self.registration, self.placement = registration, placement
        self._report = registration.report
        self._known: Coordinates | None = None
        self._routing: Routing | None = None
        self.placed = PlacedBlocks(registration.blocks, placement, parts.backend)
        # The blocks of products: a frozen layer has a block if it was trained before.
        self._covered = self.placed
        if former is not None:
            self._covered = self.placed.trained()
        self.averaged_gradients: AveragedGradients = source_of(
            parts.gradients, parts.model, self.placed, parts.home
        )
        self.watch = Watch(parts.model)
        self.relatively_damped = any(block.relatively_damped for block in self.blocks)
        self.on_paper = any(block.device.type == "meta" for block in self.blocks)
        size, probed = parts.backend.world_size, parts.fisher.probed
        scale = Scale(parts.scaling, parts.loss_average, size, probed)
        if parts.means:
            scale = OfMeans(
                loss_average="sum",
                world_size=size,
                own_gradients=probed,
                copies=sharding.copies(parts.model),
            )
        has_scale = parts.loss_scale.is_given or parts.stages.backend is not None
        self.statistics = Accumulator(  # the sums of the window under way
            self.placed,
            scale=scale,
            samples=parts.samples,
            scale_reader=self._scale_reader if has_scale else None,
            capture=self.capture,
            sampler=parts.sampler,
            stage_of=parts.stages.stage_of,
        )
        self.statistics.listen(parts.stages.roots(parts.model))

    def _scale_reader(self) -> Callable[[], float]:
        """Return a function for the factor by which the loss of a backward pass is multiplied."""
        return self.parts.stages.scaled(self.parts.loss_scale.reader())

    # -- fit ----------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        loss: LossOf,
        *,
        folder: str | os.PathLike[str] | None = None,
        every: int = 1000,
    ) -> Self:
        """Fit it to data: factors become means over all samples of all batches and ranks.

        Call it on every rank, with the rank's own share of the data; the numbers of batches may
        differ, except under ``fully_shard``, whose passes gather weights from every rank. EKFAC
        takes two passes over the data: its scale belongs to the bases of the first.
        Weights, gradients and buffers of the model stay unchanged; put it in eval mode if dropout
        and batch statistics should be off. A fit begins anew, unless an interrupted
        one was loaded (`load`): then it skips the batches that are counted already, so that the
        loader has to give the same batches in the same order.

        Args:
            loader: The batches. Methods with several passes need a DataLoader or a list.
            loss: ``loss(model, batch)`` runs the forward pass of the model that it is given, and
                returns the outputs and the mean loss over the batch.
            folder: Where to save it (`save`), every so many batches and at the end; None for no
                saves.
            every: The number of batches between two sums over ranks, and saves.

        Returns:
            The curvature.

        Raises:
            ValueError: If ``every`` is no positive integer, it or saving differs between ranks, a
                loss or statistics are not finite (which batch), the loader is empty or has fewer
                batches than were counted, or the data do not reach a block; on every rank.
            RuntimeError: If factors could not be solved, another rank has failed, or it is closed.
        """
        self.require_open()
        fitting, backend = self.fitting, self.backend
        common = {"every": every, "saves": folder is not None}
        require_common(backend, common, add_over_ranks(backend, fingerprint(common)))
        require_integer("fit: every", every, 1)
        self._spectra = None
        with building.silent(self.parts.model.modules()):
            fitting.run(loader, loss, every, lambda: folder is None or self.save(folder))
        with torch.no_grad():
            self._spectra = spectra_of(self.placed)
        if folder is not None:
            self.save(folder)
        return self

    def count(self, terms: int | Tensor | None = None, *, rows: Tensor | None = None) -> None:
        """Declare loss terms and padding, before the model is called.

        See `Preconditioner.count`.
        """
        parts, capture = self.parts, self.capture
        parts.stages.require_uncounted()
        choosing.check_count(terms is not None, parts.samples, parts.scaling)
        if capture.enabled:
            capture.set_batch(declare(terms, rows))

    # -- products -----------------------------------------------------------------------------

    def __matmul__(self, vector: Vector) -> dict[str, Tensor]:
        """Multiply vectors by the curvature; see `inverse` for its inverse.

        Every rank must call.

        Args:
            vector: Name -> ``[..., *shape]``.

        Returns:
            Name -> ``[..., *shape]``.

        Raises:
            ValueError: If names or shapes do not fit.
            RuntimeError: If it is not fitted.
        """
        return self._operator() @ vector

    def inverse(self, damping: float) -> Operator:
        """Return ``(C + damping I)^-1``, for products, traces, and samples by its `Operator.sqrt`.

        An eigenvalue of a factor is zero within rounding if it is at most ``n eps`` times the
        largest one of the n, as for `torch.linalg.matrix_rank`; a square in EKFAC's basis, if it is
        at most the square of that; an entry of a diagonal, if it is zero. Any is zero below the
        smallest normal number. With a damping far below the eigenvalues that count and far above
        rounding ``curvature @ (inverse @ (inverse @ v))`` is about the pseudo-inverse times v.

        Args:
            damping: At least zero. With zero every rank must call.

        Raises:
            ValueError: If the damping is negative, or zero and the curvature singular; on every
                rank.
            RuntimeError: If it is not fitted.
        """
        operator = self._operator(damping, -1.0)
        if singular := operator.singular():
            shown = ", ".join(singular[:_MOST])
            if len(singular) > _MOST:
                shown += f" and {len(singular) - _MOST} more"
            raise ValueError(
                f"with a damping of {damping:g} the curvature has no inverse: eigenvalues are zero "
                f"within rounding in {shown}. Pass a damping, such as 0.1 * curvature.trace() / "
                f"len(curvature.eigenvalues()), or leave these layers out (skip=[...])"
            )
        return operator

    def trace(self, block: str | None = None) -> float:
        """Return the trace of one block, or of all; every rank must call."""
        return self._operator().trace(block)

    def logdet(self, damping: float = 0.0, block: str | None = None) -> float:
        """Return ``log det (C + damping I)`` of one block, or of all; every rank must call."""
        return self._operator(damping).logdet(block)

    def eigenvalues(self, block: str | None = None) -> Tensor:
        """Return the eigenvalues of one block, or of all, ascending; every rank must call."""
        return self._operator().eigenvalues(block)

    def to_scipy(self) -> Any:
        """Return it as a ``LinearOperator`` of scipy; see `Operator.to_scipy`."""
        return self._operator().to_scipy()

    def __repr__(self) -> str:
        now: dict[str, object] = {"steps": self.steps}
        if self._fit is not None:
            now = {"fitted": self._spectra is not None}
        return describing.text(
            "Curvature",
            model=self.parts.model,
            blocks=self.blocks,
            settings={"strategy": self.strategy, "fisher": self.parts.fisher.kind},
            now=now,
        )

    @property
    def left_out(self) -> Mapping[str, str]:
        """The parameters that vectors do not have, by name, and why."""
        return self._coordinates.left_out

    @property
    def names(self) -> Mapping[Block, Mapping[str, str]]:
        """For each block, the names in the model by the names in the block."""
        return self._coordinates.names

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that vectors have, by name, in the order of the model."""
        return self._coordinates.parameters(self.parts.model)

    @property
    def _coordinates(self) -> Coordinates:
        if self._known is None:
            trained = self._covered.blocks
            self._known = Coordinates(self.parts.model, self.blocks, trained, self._report)
        return self._known

    def _operator(self, damping: float = 0.0, power: float = 1.0) -> Operator:
        require_numbers("Curvature", damping=damping)
        damping = float(damping)
        if not 0 <= damping < math.inf:
            raise ValueError(f"damping must be at least 0 and finite, not {damping!r}")
        if self._fit is None and self._spectra_of != self.steps:
            _require_products(block.method for block in self.blocks)
            with torch.no_grad():
                averages.settle(self.placed, self.placed.members(self.placed.captured))
                self._spectra = spectra_of(self._covered)
            self._spectra_of = self.steps
        if self._spectra is None:
            raise RuntimeError("this curvature is not fitted: call fit() or load() before")
        return Operator(self._covered, self._coordinates, self._spectra, damping, power)

    # -- samples ------------------------------------------------------------------------------

    def gradients(self, batch: Any, loss: LossOf) -> SampleGradients:
        """Return the gradient of each sample of a batch, by one backward pass.

        The mean of the gradients is the gradient of ``loss``, a mean over the batch. Gradients and
        buffers of the model are as before afterwards. Rows that are not in the order of the batch,
        such as rows of experts, take a further pass for up to 32 samples, and two up to 1,024. The
        first batch of several samples takes one, to look at the order of all rows. A warning names
        blocks of which the loss has other gradients, such as a penalty on weights.

        Args:
            batch: The batch.
            loss: As for `fit`.

        Raises:
            ValueError: If a module mixes samples, a row is of several, parameters were replaced
                since it was built, a method of training reads no calls, or ``loss`` returns no
                outputs ``[samples, ...]`` where rows are not in the order of the batch, or the
                model is called several times.
        """
        model, precision = self.parts.model, self.parts.precision
        if self._routing is None:
            self._routing = Routing.of(self.blocks)
        with building.silent(model.modules()):
            return sample_gradients(
                model, self._covered, self._coordinates, loss, batch, precision, self._routing
            )

    # -- files --------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Save factors and second-order data by layer, with their meaning; every rank must call.

        Within a fit it has the batches so far; in training the averages and solves of the last
        step, which a `Curvature` with the same method, solver and layers loads. It is a sharded
        checkpoint (`soframe.checkpoint.save`): ``curvature`` has the tensors, named such as
        ``fc/factors/A``, and ``meaning`` a JSON text with the Fisher and, by block, its parameters,
        and side, kind, degree and number of samples or rows of each factor.

        Returns:
            The folder of the checkpoint, within ``folder``.

        Raises:
            RuntimeError: If it is not fitted, also after a fit that failed.
        """
        from soframe import checkpoint  # imports DCP
        from soframe.state import durable

        if self._fit is not None and not self._fit.progress.gathering:
            self._operator()  # raises where it is not fitted
        blocks = {block.name: self.meaning_of(block) for block in self.blocks}
        meaning = json.dumps({"fisher": self.parts.fisher.kind, "blocks": blocks})
        contents = {"curvature": checkpoint.part(self), "meaning": {"text": meaning}}
        ranks = durable.Ranks.of_backend(self.backend)
        return durable.save_on(ranks, Path(folder, FOLDER), contents, sharded=True, keep=1)

    def meaning_of(self, block: Block) -> dict[str, Any]:
        """Return the meaning of the tensors of a block, as in JSON; without a fit of training."""
        meaning: dict[str, Any] = {
            "parameters": dict(self.names[block]),
            "matrix": list(block.shape),
            "bias_column": {"weight", "bias"} <= block.parameters.keys(),
            "method": describe(block.method),
        }
        for factor in block.factors:
            meaning[factor.name] = {
                "side": factor.side,
                "kind": str(factor.kind),
                "shape": list(factor.shape),
                "degree": factor.degree,
                "mean_over": factor.mean_over,
                "number": None if self._fit is None else self._fit.numbers(block, factor),
            }
        return meaning

    def load(self, folder: str | os.PathLike[str]) -> Self:
        """Load the last file of `save`; every rank must call.

        A finished curvature may come from other ranks, and under another strategy or solver; `fit`
        goes on from an unfinished one on as many ranks, under the same strategy.

        Returns:
            The curvature.

        Raises:
            ValueError: If the folder has none, or it is damaged, or of another model or method.
        """
        from soframe import checkpoint  # imports DCP
        from soframe.state import durable

        fitting = self.fitting
        path = durable.latest_on(durable.Ranks.of_backend(self.backend), Path(folder, FOLDER))
        if path is None:
            raise ValueError(f"{folder} has no curvature that this object could load")
        checkpoint.load(self, path, key="curvature")
        self._spectra = None
        if not fitting.progress.gathering:
            fitting.solve()  # blocks that another solver had solved
            self._spectra = spectra_of(self.placed)
        return self

    @property
    def fitting(self) -> Fit:
        """The fit under way.

        Raises:
            RuntimeError: If it is the curvature of a preconditioner.
        """
        if self._fit is None:
            raise RuntimeError(
                "this is the curvature of a preconditioner, which has its own statistics: build a "
                "soframe.Curvature(model, ...) to fit"
            )
        return self._fit

    # -- state ------------------------------------------------------------------------------------

    @property
    def curvature(self) -> Self:
        """Itself, as a preconditioner has one: both have checkpoints."""
        return self

    @property
    def backend(self) -> Backend:
        """The communication backend."""
        return self.parts.backend

    @property
    def stage(self) -> str:
        """The stages of a pipeline on this rank; empty without one."""
        return self.parts.stages.name

    def header(self) -> dict[str, Any]:
        """Return the state without its tensors: numbers and strings, the same on every rank."""
        parts, blocks = self.parts, self.blocks
        numbers: dict[str, Any] = {
            "format": state.FORMAT,
            "version": state.VERSION,
            "step": self.steps,
            "owed_statistics": parts.refresh.owed,
            "scaling": parts.scaling,
            "counters": dict(self.counts),
            "blocks": {block.name: state.of_block(block) for block in blocks},
            "history": state.history(blocks),
            "dampings": state.dampings(blocks, self.dampings),
        }
        if self._fit is not None:
            saved = {"places": self._places, "fisher": parts.fisher.kind}
            numbers["fit"] = asdict(self._fit.progress) | {"outputs": self._fit.outputs} | saved
        if policy := parts.damping.state():  # most policies have nothing to keep
            numbers["damping"] = policy
        if late := self.statistics.late():
            numbers["late"] = late
        if parts.stages.name:
            numbers[STAGES] = parts.stages.name
        return numbers

    @property
    def _places(self) -> str:
        return f"{describe(self.strategy)} on {self.backend.world_size} rank(s)"

    def check_header(self, saved: Any) -> None:
        """Raise ValueError unless a state, perhaps without its tensors, can be loaded."""
        parts = self.parts
        parts.stages.own_part(saved)  # raises for a state of other stages
        state.check_header(saved, self.blocks, parts.scaling, _frozen(parts.model))
        if parts.damping.state() and "damping" in saved:
            check_damping(saved["damping"], parts.damping, saved["step"])
        if self._fit is not None:
            self._compare_fit(saved.get("fit", {}))
            self._compare_bases(saved["blocks"])

    def _compare_fit(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError unless a fit, if the state is of any, is of this Fisher, and goes on."""
        fisher = self.parts.fisher.kind
        if saved.get("fisher", fisher) != fisher:
            raise ValueError(
                f"the curvature is of the Fisher {saved['fisher']!r}, and this one of "
                f"{fisher!r}: choose the same (Statistics(fisher=...))"
            )
        if any(saved.get("batches", ())) and saved["places"] != self._places:
            raise ValueError(
                f"the curvature is from an unfinished fit on {len(saved['batches'])} rank(s) under "
                f"{saved['places']}, and here are {self._places}: resume it with the same"
            )

    def _compare_bases(self, blocks: Mapping[str, Any]) -> None:
        """Raise ValueError if factors of a state are in other bases than this object's solves."""
        for block in self.blocks:
            saved = blocks.get(block.name, {})
            if block.needing_data and saved.get("solved") and not same_solvers(saved, block):
                raise ValueError(
                    f"block {block.name!r} was solved by {saved['solver']}, and is now by "
                    f"{describe(block.solver)}, which has other bases: pass the solver= that it "
                    f"was solved by"
                )

    def agree_on_state(self, check: Callable[[], object], common: Callable[[], str]) -> None:
        """Raise on all copies of all stages if one rank cannot load its state: none does then."""
        state.agree(self.parts.backend, check, common, self.parts.stages)

    def load_checked(
        self, check: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
    ) -> Mapping[str, Any]:
        """Continue from a state that ``check`` returns, or raises; every rank must call.

        Returns:
            The header.
        """
        parts = self.parts
        saved = state.load(check, self.placed, parts.stages)
        self._warn_of_frozen(saved["blocks"])
        # Solves under way are of factors that are replaced now.
        parts.solves.drop()
        parts.refresh.continue_from(saved["step"], saved["owed_statistics"])
        if parts.damping.state():
            if "damping" in saved:
                parts.damping.load(saved["damping"])
            else:
                warn(f"the state lacks {describe(parts.damping)}, which begins anew")
        state.load_history(saved["history"], self.blocks)
        self.steps = saved["step"]
        self.counts.update({name: saved["counters"].get(name, 0) for name in self.counts})
        if "dampings" in saved:  # states of earlier versions lack them
            self.dampings = dict(saved["dampings"])
            for block in self.blocks:
                block.damp(self.dampings.get(block.name))
        if self._fit is not None:
            self._fit.go_on(saved.get("fit"))
        self.placed.errors.clear()
        return saved

    def _warn_of_frozen(self, saved: Mapping[str, Any]) -> None:
        """Warn of blocks in a state that have no block here."""
        frozen = saved.keys() - {block.name for block in self.blocks}
        has = ("updates", "masses")
        if lost := [name for name in frozen if any(map(saved[name].get, has))]:
            warn(
                f"moments and statistics of {', '.join(sorted(lost))} are not loaded, "
                f"which were frozen before this was built: they begin anew if they are thawed. To "
                f"load them, build while they are trained, and freeze them afterwards"
            )

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
        """Begin a window; for ``late`` see `Accumulator.late`. Every rank must call."""
        gathered: dict[Block, frozenset[str]] = {}
        for block in self.parts.refresh.observed(self.placed, self.steps, late):
            gathered[block] = block.gatherable(late=block.name in late)
        self.statistics.begin(gathered, self.steps)

    def report(self) -> Report:
        """Return the planned bytes, and every parameter with its block, or why it has none."""
        return replace(self._report, memory=self.placement.fullest)

    # -- in a step ----------------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Return the context of a step; raise an error if the hooks or the weights are gone."""
        self.require_open()
        parts = self.parts
        if self.on_paper:
            building.require_materialised(parts.model.named_parameters())
        with parts.home.shaped(parts.model.parameters()), within(parts.precision):
            yield
        # Weights move now, and torch keeps casts of them until its outermost context ends.
        torch.clear_autocast_cache()

    def direct(self, gradients: Gradients, damping: float) -> list[Update]:
        """Return the updates of the blocks that are solved, on their gradient workers."""
        placed, updates = self.placed, list[Update]()
        with placed.backend.phases("direct"):
            for stack, gradient in gradients.items():
                # A batched call needs equal counters and dampings.
                for members in stack.alike(gradient.members):
                    if not stack.blocks[members[0]].active:
                        continue
                    matrix = gradient.of(stack, members)
                    update = Update(stack, members, stack.blocks_of(members), matrix)
                    updates.append(update)
                    if matrix is None or placed.rank not in stack.place.gradient_workers:
                        continue
                    try:
                        update.compute(matrix, damping)
                    except Exception as error:  # of any kind: all ranks raise together
                        placed.keep(error, stack)
                        update.leave_zero(matrix)
        return updates

    def end_step(self, plan: Plan) -> None:
        """Count the step."""
        self.steps += 1
        self.parts.refresh.end_step(plan.statistics_every)
        if not self.curved:
            self.parts.refresh.owe(1)  # the backward pass ran before the hooks were there

    # -- between steps ------------------------------------------------------------------------

    @torch.no_grad()
    def solve(self) -> None:
        """Solve all blocks that have statistics, from their present averages; all ranks must call.

        For ``solve_every="demand"``, and between the solves of an interval. Statistics that are
        taken in a basis, as EKFAC's scale is, begin anew with the new one. A block whose factors
        cannot be solved keeps its data, as in a step.

        Raises:
            RuntimeError: If no block has statistics, or it is fitted to data, which solves it.
        """
        if self._fit is not None:
            raise RuntimeError("fit() solves a curvature of data: only one of training has solve()")
        blocks = [block for block in self.placed.solvable if block.mass > 0]
        if not blocks:
            raise RuntimeError(
                "solve() found no statistics: call it after a step that has taken some"
            )
        self.placed.backend.meet("Curvature.solve()")
        damping = damping_at(self.parts.damping, self.steps)
        with within("full"):
            solved = self.solve_again(blocks, damping)
        for block in solved:
            block.record.solved_at.update(dict.fromkeys(block.tensors, self.steps - 1))
        self._spectra_of = -1  # they are of the former data

    def solve_again(self, blocks: Sequence[Block], damping: float) -> Sequence[Block]:
        """Solve blocks at once, with a damping; return the ones that could be solved."""
        solves = self.parts.solves
        solved = solves.advance(self.placed, blocks, damping=damping, counters=self.counts)
        self.statistics.window.drop_dependent(solved)
        return solved

    def land(self, call: str) -> None:
        """Install all background solves; every rank must call. ``call`` names it in errors."""
        landed = self.parts.solves.land(self.placed, self.counts, call)
        self.statistics.window.drop_dependent(landed)

    def require_open(self) -> None:
        """Raise a RuntimeError if the hooks of training are gone."""
        if self._closed:
            name = "preconditioner" if self._fit is None else "curvature"
            raise RuntimeError(f"this {name} is closed")
        if self.capture.closed:
            raise RuntimeError("this preconditioner was replaced by a newer one on the same model")

    def close(self) -> None:
        """Remove every hook; background solves are cancelled, and one that runs is waited for."""
        self._closed = True
        self.capture.close()
        self.parts.solves.close()
        for stack in self.placed.stacks:
            stack.arrive()


def _frozen(model: nn.Module) -> set[str]:
    """Return the names of frozen parameters, and of modules that have no others."""
    names: set[str] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            names.add(plain_name(name))
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            names.add(plain_name(name))
    return names


def _require_products(methods: Iterable[Method]) -> None:
    """Raise a ValueError if a method defines no products."""
    for method in methods:
        if type(method).spectrum is Method.spectrum:
            raise ValueError(
                f"{method!r} defines no products with a curvature: choose method='kfac', "
                f"'kfac-reduce', 'ekfac', 'foof' or 'diagonal', or implement spectrum()"
            )


def _require_all_data(placed: PlacedBlocks, strategy: Strategy) -> None:
    """Raise a ValueError if some ranks take no statistics of a block."""
    for block, place in placed:
        for index in place.partial(block.factors):
            raise ValueError(
                f"a Curvature is a mean over the data of all ranks, and under {strategy!r} "
                f"only the ranks {list(place.contributing(index))} take statistics of "
                f"{block.name}: pass strategy='comm-opt', 'mem-opt' or Sharded(group=None)"
            )


def _require_served(
    methods: Iterable[Choice], statistics: Statistics, distribution: Distribution
) -> None:
    """Raise a ValueError for methods and settings without products."""
    method, auxiliary = methods
    _require_products(choosing.methods(method))
    if auxiliary is not None:
        _require_products(choosing.methods(auxiliary))
        if statistics.fisher == "forward-only":
            raise ValueError(
                "auxiliary= takes gradients of samples, and fisher='forward-only' has none: pass "
                "another Fisher, or leave auxiliary= out"
            )
    if statistics.scaling != "fisher" or statistics.loss_average != "local":
        raise ValueError(
            "a Curvature is the mean over samples of data whose losses are means over each batch: "
            "leave scaling= and loss_average= of Statistics out"
        )
    if distribution.pipeline is not None:
        raise ValueError(
            "a Curvature is of a whole model, and Distribution(pipeline=...) splits it into "
            "stages: fit it to a model on each rank, or take preconditioner.curvature"
        )
