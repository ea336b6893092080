"""The factors of a curvature as plain means over data.

Statistics are sums until they are used (`soframe.methods.scaling`), so that a mean over all data is
one window of the statistics, however many batches and ranks it has. It is reduced every so many
batches, into factors that are the means so far, and can be saved (`soframe.estimate.averages`).
Ranks may have different numbers of batches, as nothing is sent for a batch.

Factors whose statistics need second-order data, such as EKFAC's scale, take another pass.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block, PlacedBlocks
from soframe.capture.counting import Samples
from soframe.capture.fisher import Fisher, heads_of
from soframe.capture.hooks import Capture
from soframe.comm.agreement import add_over_ranks, require_no_failure
from soframe.comm.base import Backend
from soframe.estimate.solves import Solves
from soframe.estimate.statistics import Accumulator
from soframe.kernels.precision import within
from soframe.specs import FactorSpec

LossOf = Callable[[nn.Module, Any], tuple[Any, Tensor]]
"""``(model, batch) -> (outputs, loss)``: the forward pass, and the mean loss of the batch."""

Gathering = Mapping[str, Sequence[str]]
"""The factors that take statistics in a pass, by the name of their block."""


@dataclass
class Progress:
    """How far the pass under way has come; empty before and after a fit, the same on every rank."""

    batches: Sequence[int]  # of each rank that are in the factors
    gathering: Gathering = field(default_factory=dict)  # the factors of the pass
    # The sums of `Accumulator.weights` over its windows: samples of a window without a call of some
    # layer are zeros in that layer's means.
    weights: Sequence[float] = field(default_factory=list)


class Fit:
    """Fits the factors of blocks to data."""

    def __init__(
        self,
        model: nn.Module,
        placed: PlacedBlocks,
        capture: Capture,
        fisher: Fisher,
        statistics: Accumulator,
        solves: Solves,
        *,
        samples: Samples,
    ) -> None:
        self._model, self._placed, self._capture = model, placed, capture
        self._fisher, self._statistics, self._solves = fisher, statistics, solves
        self._samples = samples
        self.is_of_data = False  # whether the factors were fitted to data
        # The number of all outputs that a probed loss had, on all ranks; zero if unknown.
        self.outputs = 0.0
        self._rest()

    def run(
        self, loader: Iterable[Any], loss: LossOf, every: int, reduced: Callable[[], object]
    ) -> None:
        """Take as many passes as the factors need; call ``reduced`` after each window of them."""
        trained: list[nn.Parameter] = []
        for block in self._placed.blocks:
            trained.extend(block.parameters.values())
        try:
            with kept(self._model, trained):
                if not self.progress.gathering:
                    self._begin_anew()
                while gathering := self.progress.gathering or self._wanted():
                    self.progress.gathering = gathering
                    self._pass(loader, loss, every, reduced)
                    self._require_statistics(gathering)
                    self.solve()
                    self._rest()
        finally:
            # After an error the next fit begins anew, unless a saved one is loaded before.
            self._rest()

    def go_on(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from loaded factors and a saved `Progress`; None if they are of training."""
        self._rest()
        self.is_of_data = saved is not None
        if saved is not None:
            self.progress.gathering = saved["gathering"]
            self.progress.weights = saved["weights"]
            self.outputs = saved.get("outputs", 0.0)  # states of earlier versions lack it
            if any(saved["batches"]):  # else it is of any number of ranks
                self.progress.batches = saved["batches"]

    def numbers(self, block: Block, factor: FactorSpec) -> list[float] | None:
        """Return the number of samples or rows that a factor is a mean over, perhaps by group."""
        if not self.is_of_data or factor.name not in block.record.masses:
            return None
        return list(block.record.masses[factor.name])

    @property
    def samples(self) -> float:
        """The number of samples of all data, on all ranks."""
        number = 0.0
        for block in self._placed.blocks:
            for factor in block.factors:
                if factor.mean_over == "samples":
                    number = max(number, *self.numbers(block, factor) or [0.0])
        if not number:
            raise RuntimeError(
                "this curvature is not fitted to data: call fit(), or load() one that was"
            )
        return number

    def _rest(self) -> None:
        """Let the layers' hooks do nothing, and the next pass begin with the first batch."""
        self.progress = Progress([0] * self._placed.backend.world_size)  # saved with the factors
        self._statistics.begin({}, 0)

    def _begin_anew(self) -> None:
        """Drop all factors and second-order data."""
        self.is_of_data = True
        for stack in self._placed.stacks:
            stack.clear()
        for block in self._placed.blocks:
            block.record.masses.clear()
            block.record.solved, block.record.pending = False, 0.0

    def _wanted(self) -> Gathering:
        """Return the factors without statistics that could take them now."""
        factors_of = {}
        for block in self._placed.blocks:
            able = block.gatherable() - block.record.masses.keys()
            if able:
                factors_of[block.name] = sorted(able)
        return factors_of

    def _pass(
        self, loader: Iterable[Any], loss: LossOf, every: int, reduced: Callable[[], object]
    ) -> None:
        """Take the statistics of the batches that come after the ones which were counted."""
        batches, unfinished = self._uncounted(loader), True
        if not any(self.progress.batches):
            self.outputs = 0.0
        while unfinished:
            unfinished = self._window(batches, loss, every)
            reduced()

    def _uncounted(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches that are not counted; errors come in a window, where ranks agree."""
        batches = iter(loader)
        is_later = any(block.solved for block in self._placed.blocks)
        if batches is loader and is_later:
            raise ValueError(
                "this method takes another pass over the data, and the loader is an iterator, "
                "which is used up: pass a DataLoader or a list"
            )
        counted = self.progress.batches[self._placed.rank]
        skipped = sum(1 for _ in islice(batches, counted))
        if skipped < counted:
            raise ValueError(
                f"the loader has {skipped} batches, and {counted} were counted before the fit was "
                f"interrupted: pass the same loader, or build a new Curvature"
            )
        if self._placed.rank == 0 and sys.stderr.isatty():
            batches = _shown(batches, loader, counted)
        yield from batches

    def _window(self, batches: Iterator[Any], loss: LossOf, every: int) -> bool:
        """Take the statistics of some batches; return whether a rank has more."""
        progress, backend, error = self.progress, self._placed.backend, None
        numbers: list[float] = [0.0] * backend.world_size  # of batches in this window, by rank
        outputs = 0.0
        gathered: dict[Block, frozenset[str]] = {}
        for block in self._placed.blocks:
            if block.name in progress.gathering:
                gathered[block] = frozenset(progress.gathering[block.name])
        self._statistics.begin(gathered, 0)
        try:
            numbers[backend.rank], outputs = self._run(batches, loss, every)
        except Exception as raised:  # of any kind: all ranks raise together
            error = raised
        first = [float(error is not None), outputs]
        sums = add_over_ranks(backend, first + numbers + self._statistics.weights())
        require_no_failure(backend, error, sums[0])
        self.outputs += sums[1]
        end = 2 + len(numbers)
        numbers, weights = sums[2:end], sums[end:]
        if progress.weights:
            weights = [new + old for new, old in zip(weights, progress.weights, strict=True)]
        with torch.no_grad():
            self._statistics.fold(weights, None, step=0)
            for stack in self._placed.stacks:
                stack.arrive()
        counted = [old + int(new) for old, new in zip(progress.batches, numbers, strict=True)]
        self.progress = replace(progress, batches=counted, weights=weights)
        return every in numbers

    def _run(self, batches: Iterator[Any], loss: LossOf, every: int) -> tuple[int, float]:
        """Run both passes of at most so many batches; return their number, and of outputs."""
        losses: list[Tensor] = []
        number_of_outputs = 0.0
        first = self.progress.batches[self._placed.rank]
        for batch in together(self._model, self._placed.backend, islice(batches, every)):
            outputs, value = call_loss(loss, self._model, batch, probed=self._fisher.probed)
            self._fisher.observe(outputs, self._capture, self._samples, first + len(losses))
            if self._fisher.probed:
                # Outputs have a number if they are one tensor, and count() leaves none out.
                if isinstance(outputs, Tensor) and not self._capture.counts:
                    number_of_outputs += outputs.numel()
            else:
                with self._capture.with_parameters(outputs, value):
                    value.backward()
            losses.append(value.detach().reshape(()))
        if losses:
            # Read once for the window: the host waits for the device.
            finite = torch.stack(losses).isfinite().tolist()
            if not all(finite):
                number = first + finite.index(False)
                raise ValueError(
                    f"the loss of batch {number} (of this pass, from 0) is "
                    f"{float(losses[number - first])}: mend the data or the model, or leave the "
                    f"batch out"
                )
        self._statistics.require_counted()
        magnitudes = self._statistics.window.magnitudes(self._capture.precision)
        if not all(bool(magnitude.isfinite()) for magnitude in magnitudes):
            raise ValueError(
                f"the statistics of batches {first} to {first + len(losses) - 1} are not finite, "
                f"though their losses are: compute in float32 or bfloat16, or scale the loss"
            )
        return len(losses), number_of_outputs

    def _require_statistics(self, gathering: Gathering) -> None:
        """Raise unless all factors of a pass have statistics now."""
        idle: list[str] = []
        for block in self._placed.blocks:
            if not block.record.masses.keys() >= set(gathering.get(block.name, ())):
                idle.append(block.name)
        if len(idle) == len(gathering):
            raise ValueError(
                "no layer has statistics of these data: the loader is empty, or loss(model, "
                "batch) calls another model than the one that it is given, or under no_grad()"
            )
        if idle:
            raise ValueError(
                f"the data never reach {', '.join(idle)}, so that it has no curvature: "
                f"leave it out (skip=[...]), or fit to data that do"
            )

    def solve(self) -> None:
        """Solve the blocks with factors that are not solved; every rank must call."""
        due: list[Block] = []
        for block in self._placed.blocks:
            if block.mass > 0 and not block.solved and block.tensors:
                due.append(block)
        with within("full"), torch.no_grad():
            self._solves.advance(self._placed, due, damping=1.0, counters=Counter())
        if failed := [block.name for block in due if not block.solved]:
            raise RuntimeError(f"the factors of {', '.join(failed)} could not be solved")


def together(model: nn.Module, backend: Backend, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches; if a pass needs all ranks, raise on all where one lacks a batch."""
    if not any(map(sharding.is_distributed, model.parameters())):
        yield from batches
        return
    iterator, next_batches, error = iter(batches), list[Any](), None
    while True:
        try:
            next_batches = list(islice(iterator, 1))
        except Exception as raised:  # of any kind: the other ranks wait for this one
            error = raised
        numbers = [float(error is not None), float(len(next_batches))]
        failed, ready = add_over_ranks(backend, numbers)
        require_no_failure(backend, error, failed)
        if 0 < ready < backend.world_size:
            raise ValueError(
                f"{backend.world_size - ready:.0f} of {backend.world_size} ranks have fewer "
                f"batches than the others, and all ranks run a model together whose parameters "
                f"are sharded: give every rank as many"
            )
        if ready == 0:
            return
        yield from next_batches


def call_loss(
    loss: LossOf, model: nn.Module, batch: Any, *, probed: bool = False
) -> tuple[Any, Tensor]:
    """Return the outputs and the mean loss of a batch; raise where none has a graph to start at."""
    match loss(model, batch):
        case (outputs, Tensor() as value) if value.numel() == 1:
            starts = heads_of(outputs) if probed else [value]
            if any(start.requires_grad for start in starts):
                return outputs, value
            raise ValueError(
                "loss(model, batch) returns no tensor with a gradient: it calls another model than "
                "the one that it is given, or under no_grad(), or detaches the outputs"
            )
    raise TypeError("loss(model, batch) must return (outputs, the mean loss, a scalar)")


@contextmanager
def kept(model: nn.Module, trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Record graphs, and leave gradients and buffers as they were, after an error too."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in parameters]
    hooked = list(map(dict, hooks))
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            buffers.append((module, name, buffer, buffer.detach().clone()))
    for parameter, callbacks in zip(parameters, hooks, strict=True):
        parameter.grad = None
        callbacks.clear()  # perhaps steps of an optimizer
    try:
        with thawed(trained), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for callbacks, removed in zip(hooks, hooked, strict=True):
            callbacks.update(removed)
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                buffer.copy_(values)
                module._buffers[name] = buffer


@contextmanager
def thawed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters require gradients meanwhile, as when they were registered."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def taken(model: nn.Module) -> dict[str, Tensor]:
    """Take the gradients of a model's parameters, by name; zeros where there are none."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient, parameter.grad = parameter.grad, None
        gradients[name] = torch.zeros_like(parameter) if gradient is None else gradient
    return gradients


def _shown(batches: Iterator[Any], loader: Iterable[Any], done: int) -> Iterator[Any]:
    """Show the progress on a terminal, where tqdm is installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return batches
    total = len(loader) if isinstance(loader, Sized) else None
    progress: Iterator[Any] = iter(tqdm(batches, "curvature", total, initial=done, leave=False))
    return progress
