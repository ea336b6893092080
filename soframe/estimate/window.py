"""The window: everything that forward and backward passes leave between two steps, on one rank.

The next window is a new object, so that nothing is reset. `soframe.estimate.statistics.Accumulator`
adds calls to the window under way; the step folds its sums into running factors.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from soframe.blocks.block import Block, Stack
from soframe.blocks.home import any_nonzero
from soframe.capture.counting import Pass, Passes
from soframe.capture.hooks import Calls, LayerCall
from soframe.capture.sampling import Draw
from soframe.kernels.precision import Precision, within
from soframe.layers.base import LayerHelper
from soframe.layers.sharing import SharedInputs
from soframe.methods.base import Addend, few_rows
from soframe.methods.scaling import Contribution, Counts
from soframe.specs import FactorSpec


class Mark(NamedTuple):
    """The gradient of a parameter after a backward pass, without a reference to it."""

    parameter: nn.Parameter
    version: int | None = None  # None before the pass has ended
    storage: StorageWeakRef | None = None  # None of a sparse gradient

    def fits(self, gradient: Tensor, version: int) -> bool:
        """Return whether a gradient of a version is the marked one, unchanged."""
        if version != self.version:
            return False
        if self.storage is None:
            return gradient.is_sparse
        return not gradient.is_sparse and self.storage == StorageWeakRef(gradient.untyped_storage())


@dataclass
class Tally:
    """The numbers of one block in a window."""

    gathered: frozenset[str]  # the factors that take statistics, the same on every rank
    counts: Counts = field(default_factory=Counts)  # the counts of its calls on this rank
    # The gradient of a parameter after the last backward pass. None before any pass, and after a
    # pass without counted calls or without a gradient.
    mark: Mark | None = None


@dataclass(eq=False)
class _Rows:
    """Rows of a factor whose moments are not in its sum yet, of one call of each block."""

    matrices: Tensor  # of all blocks, with ones for a bias: ``[blocks * groups, rows, n]``
    parts: Sequence[Tensor]  # by block, for ``[groups, batch, ...]`` without ones
    scale: float  # the multiplier of their moments
    members: set[int] = field(default_factory=set)  # the blocks that have rows


@dataclass(eq=False)
class Sums:
    """The sums of a stack's statistics: by factor ``[blocks * groups, ...]``.

    A few rows of a call are copied, and one product adds the moments of all blocks to the totals
    (`multiply`), of which matrices are valid in the lower triangles.
    """

    stack: Stack
    together: Sequence[FactorSpec]  # the factors of the first call, zeroed by one operator
    totals: dict[str, Tensor] = field(default_factory=dict, init=False)
    _parts: dict[str, Sequence[Tensor]] = field(default_factory=dict, init=False)  # by block
    _rows: dict[str, _Rows] = field(default_factory=dict, init=False)

    def add(
        self, factor: FactorSpec, member: int, moment: Tensor | Addend, multiplier: float
    ) -> bool:
        """Add a multiple of a call's statistics to a block's sum; False if shapes differ."""
        # The moment is a tensor, or a function that adds to a sum in place: see `Addend`.
        if isinstance(moment, Tensor):
            if moment.shape != factor.shape:
                return False
            moment = partial(_add_tensor, moment)
        few = few_rows(moment, factor)
        if few is not None and self._copy_rows(factor, member, few, multiplier):
            return True
        if len(self.stack.blocks) == 1 and factor.name not in self.totals:
            # The first moment of a single block is its sum.
            new = moment(None, multiplier)
            if new.shape != factor.shape:
                return False
            self.totals[factor.name] = new
            return True
        total = self._parts_of(factor)[member]
        try:
            moment(total, multiplier)
        except RuntimeError:
            # Either the shapes differ, or the method failed: a new sum has the moment's shape.
            if moment(None, multiplier).shape == factor.shape:
                raise
            return False
        return True

    def zero(self, member: int, names: Container[str]) -> None:
        """Set a block's sums of some factors to zero."""
        self.multiply()
        for factor in self.stack.like.factors:
            if factor.name in names and factor.name in self.totals:
                self._parts_of(factor)[member].zero_()

    def multiply(self) -> None:
        """Add the moments of the rows that were copied, by one product if all blocks have some."""
        copied, self._rows = self._rows, {}
        if not copied:
            return
        for factor in self.stack.like.factors:
            if (rows := copied.pop(factor.name, None)) is None:
                continue
            blocks, matrices = len(self.stack.blocks), rows.matrices
            if len(rows.members) == blocks:
                beta = float(factor.name in self.totals)
                total = self._total(factor)
                total.baddbmm_(matrices.mT, matrices, beta=beta, alpha=rows.scale)
                continue
            parts, of_blocks = self._parts_of(factor), matrices.chunk(blocks)
            for member in rows.members:
                matrix = of_blocks[member]
                parts[member].baddbmm_(matrix.mT, matrix, alpha=rows.scale)

    def _copy_rows(
        self, factor: FactorSpec, member: int, few: tuple[Tensor, int], scale: float
    ) -> bool:
        """Copy a few rows of a call, if they are of the shape and scale of those here."""
        views, count = few
        rows = self._rows.get(factor.name)
        if rows is not None and member in rows.members:
            self.multiply()
            rows = None
        if rows is None:
            blocks = len(self.stack.blocks)
            matrices = parts = views.new_empty((blocks * factor.groups, count, factor.size))
            if blocks * views.numel() < matrices.numel():
                matrices[..., -1].fill_(1.0)
                parts = matrices[..., :-1]
            parts = parts.view(blocks, *views.shape)
            rows = self._rows[factor.name] = _Rows(matrices, parts.unbind(), scale)
        part = rows.parts[member]
        if part.shape != views.shape or rows.scale != scale:
            return False
        part.copy_(views)
        rows.members.add(member)
        return True

    def _parts_of(self, factor: FactorSpec) -> Sequence[Tensor]:
        """Return the sums by block, zeros at first."""
        if factor.name not in self.totals:
            zeros = [self._total(factor)]
            begun = self.totals.keys() | self._rows.keys()
            for other in self.together:
                if other.name not in begun:
                    zeros.append(self._total(other))
            torch._foreach_zero_(zeros)
        if factor.name not in self._parts:
            self._parts[factor.name] = self.totals[factor.name].chunk(len(self.stack.blocks))
        return self._parts[factor.name]

    def _total(self, factor: FactorSpec) -> Tensor:
        """Return the sums of all blocks, at first memory to be written."""
        if factor.name not in self.totals:
            like, blocks = self.stack.like, len(self.stack.blocks)
            shape = (blocks * factor.groups, *factor.shape[1:])
            self.totals[factor.name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.totals[factor.name]


@dataclass(eq=False)
class Window:
    """The records of the passes between two steps, on this rank."""

    due: frozenset[Block]  # the blocks that take statistics, the same on every rank
    block_of: Mapping[LayerHelper, Block]  # the block of each layer with calls
    passes: Passes  # the backward passes, and their samples
    draw: Draw  # takes some of the rows of each call
    tallies: dict[Block, Tally]  # the numbers of each block; empty if no block takes statistics
    calls: Calls  # the records of the hooks
    sums: dict[Stack, Sums] = field(default_factory=dict)  # the sums of statistics by stack
    # The multipliers and weights that this rank sent last, by block.
    contributions: dict[Block, Contribution] = field(default_factory=dict)
    # The input moments that layers share.
    shared: SharedInputs = field(default_factory=SharedInputs)
    weight: float = 1.0  # the multiplier of statistics that are added from now on
    # The blocks of backward passes that have not ended: one that raises never does.
    unended: set[Block] = field(default_factory=set)

    def weigh(self, weight: float) -> None:
        """Set the weight of statistics from now on, until the next call or the next window.

        For micro-batches of unequal sizes: the size of each, divided by their mean.
        """
        self.weight = weight

    # -- passes -------------------------------------------------------------------------------

    def count_call(self, block: Block, call: LayerCall, sizes: tuple[int, int], stage: int) -> Pass:
        """Count a call, and return its backward pass.

        The first call of a pass drops the statistics of gradients that were zeroed before it.
        ``sizes`` are the call's samples and rows; ``stage`` is the index of its pipeline stage.
        """
        batches = [call.batch]  # the forward passes that the backward pass goes through
        if call.number not in self.passes.by_number:
            self._drop_zeroed(call.number)
            if call.probe is None:
                batches = self.calls.take_waiting(call.batch)
        if call.probe is None:
            self.unended.add(block)
            terms = call.batch.terms
        else:
            terms = call.probe.samples
        return self.passes.enter(call.number, sizes, terms, call.batch, call.root, batches, stage)

    def is_empty(self, call: LayerCall) -> bool:
        """Return whether a backward pass goes through no forward pass with samples, at first."""
        if call.number in self.passes.by_number:
            return False
        if not call.root.is_empty:
            return False
        for batch in self.calls.waiting:
            if batch.is_under_way and not batch.forward.root.is_empty:
                return False
        return True

    def end_pass(self, reached: Iterable[LayerHelper]) -> None:
        """Record the gradients of the blocks that a backward pass of the loss has reached."""
        for block in dict.fromkeys(map(self.block_of.__getitem__, reached)):
            self.unended.discard(block)
            tally = self.tallies[block]
            # None if a framework has put the gradient elsewhere.
            tally.mark = _mark(block) if tally.counts.calls else None

    def forget_inputs(self) -> None:
        """Free the inputs that several blocks share."""
        self.shared = SharedInputs()

    def _drop_zeroed(self, number: int) -> None:
        """Drop the statistics of gradients that were zeroed before backward pass ``number``."""
        zeroed, changed = [], {}
        for block, tally in self.tallies.items():
            mark = tally.mark
            if block in self.unended:
                mark = Mark(next(iter(block.parameters.values())))
            if mark is None:
                continue
            gradient = block.home.read(mark.parameter)
            if gradient is None:
                zeroed.append(block)
            elif not mark.fits(gradient, block.home.version(mark.parameter, gradient)):
                changed[block] = gradient
        # Since changed: zeroed in place, replaced, clipped or averaged. The host waits for entries.
        if changed and not any_nonzero(list(changed.values())):
            zeroed += changed.keys()
        if zeroed:
            self._drop(zeroed, number)

    def _drop(self, blocks: Iterable[Block], number: int) -> None:
        """Drop the statistics of blocks from the backward passes before ``number``."""
        for block in blocks:
            self.unended.discard(block)
            self.tallies[block] = Tally(self.tallies[block].gathered, Counts(since=number))
            if len(block.stack.blocks) == 1:
                self.sums.pop(block.stack, None)
            elif block.stack in self.sums:
                self.sums[block.stack].zero(block.member, block.captured_names)
        self.shared = SharedInputs()
        used: set[int] = set()
        for tally in self.tallies.values():
            used.update(tally.counts.samples)
        if not used:
            # Nothing of the earlier passes counts, nor do their errors.
            self.passes = Passes(self.passes.samples, self.passes.scale_reader)
        for earlier, backward in list(self.passes.by_number.items()):
            # Of a pass without samples any gradient may have the zeros.
            if earlier < number and backward.samples > 0 and backward.number not in used:
                del self.passes.by_number[earlier]

    # -- sums ---------------------------------------------------------------------------------

    def sums_of(self, stack: Stack, factors: Sequence[FactorSpec] = ()) -> Sums:
        """Return the sums of a stack, to which a call adds to some factors."""
        if stack not in self.sums:
            self.sums[stack] = Sums(stack, factors)
        return self.sums[stack]

    def drop_dependent(self, blocks: Iterable[Block]) -> None:
        """Drop statistics that were made with second-order data of blocks, now replaced."""
        for block in blocks:
            if block.needing_data and block in self.tallies:
                self.tallies[block].gathered -= block.needing_data
                if block.stack in self.sums:
                    self.sums[block.stack].zero(block.member, block.needing_data)

    def magnitudes(self, precision: Precision) -> list[Tensor]:
        """Return infinity norms of the sums, as scalars: not finite where a sum is not.

        Of matrices that are psd the norms of the diagonals are enough. Rows are multiplied first.
        """
        totals: dict[torch.device, list[Tensor]] = {}
        for stack, sums in self.sums.items():
            with within(precision):
                sums.multiply()
            for name, total in sums.totals.items():
                entries = total
                if name in stack.like.psd:
                    entries = total.diagonal(dim1=-2, dim2=-1)
                totals.setdefault(stack.like.device, []).append(entries)
        scalars: list[Tensor] = []
        for tensors in totals.values():
            scalars += torch._foreach_norm(tensors, math.inf)
        return scalars

    # -- the number of samples ----------------------------------------------------------------

    def largest_counts(self) -> tuple[int, int, int]:
        """Return the most backward passes of a stage here, and the most and fewest samples.

        The samples are of the stages with that many passes.
        """
        # By stage, the samples of its passes by number: losses of the same passes share a number.
        stages: dict[int, dict[int, int]] = {}
        for backward in self.passes.by_number.values():
            stages.setdefault(backward.stage, {})[backward.number] = backward.samples
        most = max(map(len, stages.values()), default=0)
        totals = [sum(samples.values()) for samples in stages.values() if len(samples) == most]
        return most, max(totals, default=0), min(totals, default=0)

    def samples_by_pass(self, stage: int, of_model: tuple[int, int]) -> dict[int, int]:
        """Return the samples of the backward passes of a stage, by their numbers.

        ``of_model`` are the most passes of a stage of the whole model, and their samples.
        """
        passes, samples = of_model
        samples_by_number: dict[int, int] = {}
        for backward in self.passes.by_number.values():
            if backward.stage == stage:
                samples_by_number[backward.number] = backward.samples
        # Passes without a call here get negative numbers; the first has all the other samples.
        rest = samples - sum(samples_by_number.values())
        for missing in range(passes - len(samples_by_number)):
            samples_by_number[-1 - missing] = rest
            rest = 0
        return samples_by_number


def _add_tensor(moment: Tensor, total: Tensor | None, scale: float) -> Tensor:
    """Add a multiple of a moment to a sum in place; None makes a new tensor."""
    return moment * scale if total is None else total.add_(moment, alpha=scale)


def _mark(block: Block) -> Mark | None:
    """Mark the gradient of a parameter of a block that has one."""
    for parameter in block.parameters.values():
        gradient = block.home.read(parameter)
        if gradient is not None:
            storage = None
            if not gradient.is_sparse:
                storage = StorageWeakRef(gradient.untyped_storage())
            return Mark(parameter, block.home.version(parameter, gradient), storage)
    return None
