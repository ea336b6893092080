"""The curvature of a model: its fit to data, products with it and its inverse, and its spectrum.

::

    curvature = soframe.Curvature(model, method="ekfac")
    curvature.fit(loader, lambda model, batch: loss_of(model, batch))
    direction = curvature.inverse(damping=1e-3) @ gradients
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from soframe.blocks.registration import Choice
from soframe.blocks.report import Report
from soframe.comm.agreement import gather_texts
from soframe.layers.base import LayerHelper
from soframe.methods.base import Method
from soframe.preconditioner import Preconditioner
from soframe.products.fitting import Fit, LossOf, OfMeans, Progress
from soframe.products.operator import Operator, Spectra, spectra_of
from soframe.products.samples import SampleGradients, sample_gradients
from soframe.products.vectors import Coordinates, Vector
from soframe.registry import describe
from soframe.settings import Distribution, Statistics
from soframe.setup import building
from soframe.step.averages import settle
from soframe.step.statistics import Accumulator
from soframe.strategies.base import Strategy


class _Parts(Preconditioner):
    """The blocks, their places, the capture and the solves of a curvature, without a step."""

    _beside = True  # a preconditioner may train the same model


class Curvature:
    """The curvature of a loss in the parameters of a model, as a method approximates it.

    By block it is the method's own matrix, ``A ⊗ G`` for K-FAC, with zeros between blocks. It is
    symmetric and positive semi-definite. A damping is added to its eigenvalues, so that
    ``inverse(damping)`` is ``(A ⊗ G + damping I)^-1`` exactly, for any solver.

    Vectors are dicts: the name of each parameter that has a block, as in ``named_parameters``, and
    a tensor ``[..., *shape]``; leading dimensions are several vectors.

    Args:
        model: The model; DistributedDataParallel and compiled wrappers are looked through.
        method: The curvature method, as for `soframe.Preconditioner`: ``"kfac"``,
            ``"kfac-reduce"``, ``"ekfac"``, ``"foof"``, or a method with `Method.spectrum`.
        solver: The solver of its factors.
        strategy: The ranks that solve and hold the blocks. Under ``"comm-opt"`` each rank has all
            data, and may multiply vectors of its own.
        statistics: The choice of Fisher, loss, rows and dtype. Losses are means over each batch.
        distribution: How ranks communicate.
        layers: As for `soframe.Preconditioner`; all layers by default.
        skip: Patterns on names of modules to leave out.

    Attributes:
        left_out: Why parameters have no block, by name; one warning names those that are trained
            and not skipped.

    Raises:
        ValueError: If a setting is out of range, the method defines no products, or the model has
            nothing that has a curvature.
    """

    left_out: Mapping[str, str]

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
    ) -> None:
        chosen = Statistics() if statistics is None else statistics
        _require_served(method, chosen, distribution)
        parts = _Parts(
            model,
            method,
            solver,
            strategy,
            kl_clip=None,
            statistics_every=1,
            solve_every=2,
            layers=layers,
            skip=skip,
            statistics=chosen,
            distribution=distribution,
        )
        self._hold(parts)
        placed, capture, fisher = parts._placed, parts._capture, parts._fisher
        scale = OfMeans(
            loss_average="sum", world_size=placed.backend.world_size, own_gradients=fisher.probed
        )
        sums = Accumulator(
            placed,
            scale=scale,
            samples=parts._samples,
            grad_scale=lambda: 1.0,
            capture=capture,
            sampler=parts._sampler,
            voided=lambda: None,
            part_of=lambda block: 0,
        )
        sums.listen([parts._model])
        self._fit: Fit | None = Fit(
            parts._model, placed, capture, fisher, sums, parts._solves, samples=parts._samples
        )
        if lost := self._coordinates.lost:
            reasons = "; ".join(f"{name}: {why}" for name, why in lost.items())
            warnings.warn(f"soframe: the curvature leaves parameters out. {reasons}", stacklevel=2)

    @classmethod
    def of(cls, preconditioner: Preconditioner) -> Self:
        """Return the curvature of a preconditioner's last solve, which later steps do not change.

        Of factors that its solver does not decompose, such as ``"inverse"``, the present averages
        are decomposed here. Every rank must call.

        Raises:
            RuntimeError: If it has not been solved yet.
            ValueError: If its method defines no products, or this rank lacks a factor.
        """
        curvature = cls.__new__(cls)
        curvature._hold(preconditioner)
        curvature._fit = None
        placed = preconditioner._placed
        with torch.no_grad():
            settle(placed, placed.members(placed.captured))
            curvature._spectra = spectra_of(placed)
        return curvature

    def _hold(self, parts: Preconditioner) -> None:
        self._parts = parts
        self._spectra: Spectra | None = None
        self._coordinates = Coordinates(parts._model, parts._blocks, parts.report())
        self.left_out = self._coordinates.left_out

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
        differ. EKFAC takes two passes over the data: its scale belongs to the bases of the first.
        Weights, gradients and buffers of the model are as before afterwards; put it in eval mode
        where dropout and batch statistics are to be off. A fit begins anew, unless an interrupted
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
            ValueError: If a loss or statistics are not finite (which batch), the loader is empty,
                or the data do not reach a block; on every rank.
            RuntimeError: If factors could not be solved, or another rank has failed.
        """
        if self._fit is None:
            raise RuntimeError(
                "this is the curvature of a preconditioner, which has its own statistics: build a "
                "soframe.Curvature(model, ...) to fit"
            )
        self._spectra = None
        with building.silent(self._parts._model.modules()):
            self._fit.run(loader, loss, every, lambda: folder is None or self.save(folder))
        with torch.no_grad():
            self._spectra = spectra_of(self._parts._placed)
        if folder is not None:
            self.save(folder)
        return self

    def count(self, terms: int | Tensor | None = None, *, rows: Tensor | None = None) -> None:
        """Declare loss terms and padding within ``loss``, before the model is called.

        See `Preconditioner.count`.
        """
        self._parts.count(terms, rows=rows)

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

        Args:
            damping: At least zero; with zero, directions without curvature give zero.
        """
        return self._operator(damping, -1.0)

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

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks."""
        return tuple(block.name for block in self._parts._blocks)

    def report(self) -> Report:
        """Return every parameter with its block, or why it has none."""
        return self._parts.report()

    def _operator(self, damping: float = 0.0, power: float = 1.0) -> Operator:
        if not damping >= 0:
            raise ValueError(f"damping must be at least 0, not {damping!r}")
        if self._spectra is None:
            raise RuntimeError("this curvature is not fitted: call fit() or load() before")
        return Operator(self._parts._placed, self._coordinates, self._spectra, damping, power)

    # -- samples ------------------------------------------------------------------------------

    def gradients(self, batch: Any, loss: LossOf) -> SampleGradients:
        """Return the gradient of each sample of a batch, by one backward pass.

        The mean of the gradients is the gradient of ``loss``, a mean over the batch. Gradients and
        buffers of the model are as before afterwards.

        Args:
            batch: The batch.
            loss: As for `fit`.

        Raises:
            ValueError: If a module mixes samples, or its calls do not show whose rows are whose.
        """
        parts = self._parts
        with building.silent(parts._model.modules()):
            return sample_gradients(
                parts._model, parts._placed, self._coordinates, loss, batch, parts._precision
            )

    # -- files --------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Save factors and second-order data by layer, with their meaning; every rank must call.

        Within a fit it has the batches so far. It is a sharded checkpoint
        (`soframe.checkpoint.save`): ``curvature`` has the tensors, named such as
        ``fc/factors/A``, and ``meaning`` a JSON text with the parameters of each block, and side,
        kind, degree and weight of each factor.

        Returns:
            The folder of the checkpoint, within ``folder``.
        """
        from soframe import checkpoint

        state = {KEY: checkpoint.part(self._parts), MEANING: {"text": self._meaning()}}
        return checkpoint.save(folder, state, sharded=True, keep=1)

    def load(self, folder: str | os.PathLike[str]) -> Self:
        """Load the last file of `save`; every rank must call.

        A finished curvature may come from other ranks, and under another strategy; `fit` goes on
        from an unfinished one on as many ranks, under the same strategy.

        Returns:
            The curvature.

        Raises:
            ValueError: If the folder has none, or it is damaged, or of another model or method.
        """
        from soframe import checkpoint

        path = checkpoint.latest(folder)
        if path is None or self._fit is None:
            raise ValueError(f"{folder} has no curvature that this object could load")
        meaning = json.loads(_read_text(path))
        progress, places = meaning["progress"], meaning["places"]
        batches = progress.pop("batches")
        if any(batches) and places != self._places():
            raise ValueError(
                f"the curvature in {folder} is of a fit that goes on, on {len(batches)} rank(s) "
                f"under {places}, and here are {self._places()}: resume it with the same"
            )
        checkpoint.load(self._parts, path, key=KEY)
        unfinished = bool(progress["gathering"])
        counted = batches[self._parts.backend.rank] if unfinished else 0
        self._fit.go_on(Progress(counted, **progress), meaning["weights"])
        self._spectra = None if unfinished else spectra_of(self._parts._placed)
        return self

    def _places(self) -> str:
        """Return the strategy and ranks, with which alone an unfinished fit goes on."""
        return f"{self._parts._strategy!r} on {self._parts.world_size} rank(s)"

    def _meaning(self) -> str:
        """Return the meaning of the tensors, as JSON; every rank must call."""
        fit, parts = self._fit, self._parts
        progress = Progress() if fit is None else fit.progress
        weights = {} if fit is None else fit.weights
        every = [int(text) for text in gather_texts(parts.backend, str(progress.batches))]
        blocks = {
            block.name: {
                "parameters": self._coordinates.names[block],
                "shape": list(block.shape),
                "method": describe(block.method),
                "factors": {
                    factor.name: {
                        "side": factor.side,
                        "kind": factor.kind,
                        "degree": factor.degree,
                        "mean over": factor.mean_over,
                        "weight": weights.get(block.name, {}).get(factor.name),
                    }
                    for factor in block.factors
                },
            }
            for block in parts._blocks
        }
        meaning = {
            "fisher": parts._fisher.kind,
            "blocks": blocks,
            "weights": weights,
            "progress": {**asdict(progress), "batches": every},
            "places": self._places(),
        }
        return json.dumps(meaning)


KEY, MEANING = "curvature", "meaning"
"""The keys of a saved curvature."""


def _read_text(path: Path) -> str:
    """Return the meaning of a saved curvature."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from soframe import checkpoint

    read = {MEANING: {"text": ""}}
    alone = not torch.distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to load in a single process")
        load(
            read,
            storage_reader=checkpoint.PlainReader(path),
            planner=checkpoint.PlainPlanner(),
            no_dist=alone,
        )
    return read[MEANING]["text"]


def _has_products(method: Method) -> bool:
    return type(method).spectrum is not Method.spectrum


def _require_served(
    method: Choice, statistics: Statistics, distribution: Distribution | None
) -> None:
    """Raise a ValueError for methods and settings without products."""
    for chosen in building.methods(method):
        if not _has_products(chosen):
            raise ValueError(
                f"{chosen!r} defines no products with a curvature: choose method='kfac', "
                f"'kfac-reduce', 'ekfac' or 'foof', or let the method implement spectrum()"
            )
    if statistics.scaling != "fisher" or statistics.loss_average != "local":
        raise ValueError(
            "a Curvature is the mean over samples of data whose losses are means over each batch: "
            "leave scaling= and loss_average= of Statistics out"
        )
    if distribution is not None and distribution.pipeline is not None:
        raise ValueError(
            "a Curvature is of a whole model, and Distribution(pipeline=...) splits it into "
            "stages: fit it to a model on each rank, or by Curvature.of(preconditioner)"
        )
