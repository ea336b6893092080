"""The window: everything that forward and backward passes leave between two steps, on one rank.

The next window is a new object, so that nothing is reset. `soframe.estimate.statistics.Accumulator`
adds calls to the window under way; the step folds its sums into running factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from soframe.blocks.block import Block, Stack
from soframe.blocks.home import any_nonzero
from soframe.capture.counting import Pass, Passes
from soframe.capture.hooks import Calls, LayerCall
from soframe.capture.sampling import Draw
from soframe.layers.sharing import SharedInputs
from soframe.methods.base import Addend
from soframe.methods.scaling import Contribution, Counts
from soframe.specs import FactorSpec


class Mark(NamedTuple):
    """The gradient of a parameter after a backward pass, without a reference to it."""

    parameter: nn.Parameter
    version: int = -1  # until the end of a pass, which one that raises never comes to
    storage: StorageWeakRef | None = None  # of a sparse gradient none

    def fits(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the marked one, unchanged."""
        if gradient._version != self.version:
            return False
        if self.storage is None or gradient.is_sparse:
            return self.storage is None and gradient.is_sparse
        return bool(self.storage == StorageWeakRef(gradient.untyped_storage()))


@dataclass
class Tally:
    """The numbers of one block in a window.

    Attributes:
        gathered: The factors that take statistics, the same on every rank.
        counts: The counts of its calls on this rank.
        mark: The gradient of a parameter after the last backward pass. None before any pass, and
            after a pass without counted calls or without a gradient.
    """

    gathered: frozenset[str]
    counts: Counts = field(default_factory=Counts)
    mark: Mark | None = None


@dataclass(eq=False)
class Sums:
    """The sums of a stack's statistics: by factor ``[blocks * groups, ...]``.

    Attributes:
        stack: The stack.
        totals: The sums of all blocks; of matrices the lower triangles.
    """

    stack: Stack
    totals: dict[str, Tensor] = field(default_factory=dict, init=False)
    _parts: dict[str, Sequence[Tensor]] = field(default_factory=dict, init=False)  # by block

    def allocate(self, factors: Sequence[FactorSpec]) -> None:
        """Allocate zeros for the sums of a stack of several blocks, by one call for all factors.

        In a stack of one block the first moment becomes the sum, see `add`.
        """
        like, blocks = self.stack.like, len(self.stack.blocks)
        if blocks == 1:
            return
        new: dict[str, Tensor] = {}
        for factor in factors:
            if factor.name not in self.totals:
                shape = (blocks * factor.groups, *factor.shape[1:])
                new[factor.name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        if new:
            torch._foreach_zero_(list(new.values()))
            self.totals |= new
            self._parts |= {name: total.chunk(blocks) for name, total in new.items()}

    def add(
        self, factor: FactorSpec, member: int, moment: Tensor | Addend, multiplier: float
    ) -> bool:
        """Add a multiple of a call's statistics to a block's sum; False if shapes differ."""
        # The moment is a tensor, or a function that adds to a sum in place: see `Addend`.
        name = factor.name
        if isinstance(moment, Tensor) and moment.shape != factor.shape:
            return False
        if name not in self.totals:  # of a single block; see `allocate`
            new = moment * multiplier if isinstance(moment, Tensor) else moment(None, multiplier)
            if new.shape != factor.shape:
                return False
            self.totals[name], self._parts[name] = new, (new,)
            return True
        total = self._parts[name][member]
        if isinstance(moment, Tensor):
            total.add_(moment, alpha=multiplier)
            return True
        try:
            moment(total, multiplier)
        except RuntimeError:
            # Either the shapes differ, or the method failed: a new sum has the moment's shape.
            if moment(None, multiplier).shape == factor.shape:
                raise
            return False
        return True

    def zero(self, member: int, names: Iterable[str]) -> None:
        """Set a block's sums of some factors to zero."""
        for name in names:
            if name in self._parts:
                self._parts[name][member].zero_()


@dataclass(eq=False)
class Window:
    """The records of the passes between two steps, on this rank.

    Attributes:
        due: The blocks that take statistics, the same on every rank.
        passes: The backward passes, and their samples.
        draw: Takes some of the rows of each call.
        tallies: The numbers of each block; empty if no block takes statistics.
        calls: The records of the hooks.
        sums: The sums of statistics by stack.
        contributions: The multipliers and weights that this rank sent last, by block.
        shared: The input moments that layers share.
        weight: The multiplier of statistics that are added from now on.
        of_model: The passes, and the samples, of the stage of the whole model that has the most;
            zeros until ranks agree.
    """

    due: frozenset[Block]
    passes: Passes
    draw: Draw
    tallies: dict[Block, Tally]
    calls: Calls = field(default_factory=Calls)
    sums: dict[Stack, Sums] = field(default_factory=dict)
    contributions: dict[Block, Contribution] = field(default_factory=dict)
    shared: SharedInputs = field(default_factory=SharedInputs)
    weight: float = 1.0
    of_model: tuple[int, int] = (0, 0)

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
            # The end of the pass sets the mark; a pass that raises leaves this one.
            self.tallies[block].mark = Mark(next(iter(block.parameters.values())))
        terms = call.batch.terms if call.probe is None else call.probe.samples
        return self.passes.enter(call.number, sizes, terms, call.batch, batches, stage)

    def set_model_counts(self, passes: int, samples: int) -> None:
        """Set the passes and samples of the whole model; this stage may see fewer."""
        self.of_model = passes, samples

    def end_pass(self, reached: Iterable[Block]) -> None:
        """Record the gradients of the blocks that a backward pass of the loss has reached."""
        for block in reached:
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
            if tally.mark is None:
                continue
            gradient = block.home.read(tally.mark.parameter)
            if gradient is None:
                zeroed.append(block)
            elif not tally.mark.fits(gradient):
                changed[block] = gradient
        # Since changed: zeroed in place, replaced, clipped or averaged. The host waits for entries.
        if changed and not any_nonzero(list(changed.values())):
            zeroed += changed.keys()
        if zeroed:
            self._drop(zeroed, number)

    def _drop(self, blocks: Iterable[Block], number: int) -> None:
        """Drop the statistics of blocks from the backward passes before ``number``."""
        for block in blocks:
            self.tallies[block] = Tally(self.tallies[block].gathered, Counts(since=number))
            if len(block.stack.blocks) == 1:
                self.sums.pop(block.stack, None)
            elif block.stack in self.sums:
                self.sums[block.stack].zero(block.member, [f.name for f in block.factors])
        self.shared = SharedInputs()
        used = set[int]().union(*(tally.counts.samples for tally in self.tallies.values()))
        if not used:
            # Nothing of the earlier passes counts, nor do their errors.
            self.passes = Passes(self.passes.samples, self.passes.scale_reader)
        for earlier, backward in list(self.passes.by_number.items()):
            if earlier < number and backward.number not in used:
                del self.passes.by_number[earlier]

    # -- sums ---------------------------------------------------------------------------------

    def sums_of(self, stack: Stack) -> Sums:
        """Return the sums of a stack, to be added to."""
        if stack not in self.sums:
            self.sums[stack] = Sums(stack)
        return self.sums[stack]

    def drop_dependent(self, blocks: Iterable[Block]) -> None:
        """Drop statistics that were made with second-order data of blocks, now replaced."""
        for block in blocks:
            needing = {factor.name for factor in block.captured if factor.needs}
            if needing and block in self.tallies:
                self.tallies[block].gathered -= needing
                if block.stack in self.sums:
                    self.sums[block.stack].zero(block.member, needing)

    def magnitudes(self) -> list[Tensor]:
        """Return infinity norms of the sums, as scalars: not finite where a sum is not.

        Of matrices that are psd the norms of the diagonals are enough.
        """
        scalars: list[Tensor] = []
        for device in {stack.like.device for stack in self.sums}:
            totals, diagonals = list[Tensor](), list[Tensor]()
            for stack, sums in self.sums.items():
                if stack.like.device != device:
                    continue
                for name, total in sums.totals.items():
                    if name in stack.like.psd:
                        diagonals += total.diagonal(dim1=-2, dim2=-1).unbind()
                    else:
                        totals.append(total)
            if diagonals:
                totals.append(torch.cat(diagonals))
            if totals:
                scalars += torch._foreach_norm(totals, math.inf)
        return scalars

    # -- the number of samples ----------------------------------------------------------------

    def largest_counts(self) -> tuple[int, int, int]:
        """Return the most backward passes of a stage here, and the most and fewest samples.

        The samples are of the stages with that many passes.
        """
        stages = {backward.stage for backward in self.passes.by_number.values()}
        samples_of_stages = [list(self.samples_by_pass(stage).values()) for stage in stages]
        most = max(map(len, samples_of_stages), default=0)
        totals = [sum(samples) for samples in samples_of_stages if len(samples) == most]
        return most, max(totals, default=0), min(totals, default=0)

    def samples_by_pass(self, stage: int) -> dict[int, int]:
        """Return the samples of the backward passes of a stage, by their numbers."""
        passes, samples = self.of_model
        samples_by_number: dict[int, int] = {}
        for backward in self.passes.by_number.values():
            if backward.stage == stage:
                samples_by_number[backward.number] = backward.samples
        # Passes without a call here get negative numbers; the first has all the other samples.
        rest = samples - sum(samples_by_number.values())
        for missing in range(passes - len(samples_by_number)):
            samples_by_number[-1 - missing] = rest if missing == 0 else 0
        return samples_by_number


def _mark(block: Block) -> Mark | None:
    """Mark the gradient of a parameter of a block that has one."""
    parameters = list(block.parameters.values())
    for parameter, gradient in zip(parameters, block.home.each(parameters), strict=True):
        if gradient is not None:
            storage = None if gradient.is_sparse else StorageWeakRef(gradient.untyped_storage())
            return Mark(parameter, gradient._version, storage)
    return None
